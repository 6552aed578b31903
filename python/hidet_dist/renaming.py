"""Operators of hidet that only change the shape or the order of a tensor's elements."""

from __future__ import annotations

from hidet.graph.ops.transform import FlattenOp, PermuteDimsOp, RearrangeOp, ReshapeOp, SqueezeOp, UnsqueezeOp

RESHAPES = (FlattenOp, ReshapeOp, SqueezeOp, UnsqueezeOp)
"""Operators that change the shape and keep the order of elements."""
PERMUTATIONS = (PermuteDimsOp, RearrangeOp)
"""Operators that permute dims; a RearrangeOp may merge neighbouring dims as well."""
RENAMINGS = (*RESHAPES, *PERMUTATIONS)
"""Operators whose output has all elements of the input, in another shape or order."""
