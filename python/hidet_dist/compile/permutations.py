"""Permutations of dims that undo earlier ones: they become reshapes, which copy nothing.

For instance, a product computes the values of an attention token by token. The attention takes them head by head,
[batch, heads, tokens, size], and the cache stores them token by token again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.partitioning.once import reshape
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import Moves, traits_of


def cancel_permutations(graph: FlowGraph) -> FlowGraph:
    """Replace permutations that restore an earlier order by reshapes; return the graph itself if there are none.

    Dims of one element may be anywhere.
    """

    def make(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, PermuteDimsOp):
            return None
        y = op.outputs[0]
        x = _same_order(y)
        return None if x is None else reshape(replaced.get(x, x), extents_of(y))

    return rewrite(graph, make)


def _same_order(y: Tensor) -> Tensor | None:
    """The earliest tensor that was permuted to ``y`` by several operators, and has its elements in the same order."""
    x, found, permutations = y, None, 0
    dims = _longer_dims(extents_of(y))  # those of x that y's longer dims are, in the order of y's
    while x.op is not None and x.op.inputs:
        (before, *_), after = x.op.inputs, x
        if isinstance(x.op, PermuteDimsOp):
            dims = [x.op.attrs["axes"][dim] for dim in dims]
            permutations += 1
        elif traits_of(x.op).moves is Moves.RESHAPE:
            old, new = _longer_dims(extents_of(before)), _longer_dims(extents_of(after))
            if len(old) != len(new) or not all(
                same_extent(extents_of(before)[a], extents_of(after)[b]) for a, b in zip(old, new, strict=True)
            ):
                break
            dims = [old[new.index(dim)] for dim in dims]
        else:
            break
        x = before
        if permutations > 1 and dims == sorted(dims):
            found = x
    return found


def _longer_dims(extents: Sequence[Extent]) -> list[int]:
    """The dims of more than one element."""
    return [dim for dim, extent in enumerate(extents) if not same_extent(extent, 1)]
