"""Operators of hidet that give a tensor's elements another shape or order, and change none."""

from __future__ import annotations

from hidet.graph.ops.transform import FlattenOp, PermuteDimsOp, RearrangeOp, ReshapeOp, SqueezeOp, UnsqueezeOp

RESHAPES = (FlattenOp, ReshapeOp, SqueezeOp, UnsqueezeOp)
"""The same elements in the same order, in another shape."""
PERMUTATIONS = (PermuteDimsOp, RearrangeOp)
"""The dims in another order; a RearrangeOp may merge neighbouring dims as well."""
RENAMINGS = (*RESHAPES, *PERMUTATIONS)
"""Operators whose output is another view of their input's elements, all of them."""
