"""The split of a fused projection into one projection per part.

``q, k, v = split(x @ w + b, 3)`` cuts the columns of the product into three blocks. A shard of the columns would be a
shard of one or two blocks, not of each, so the product would have to be gathered before it is cut. The projections
``q = x @ w[:, :n] + b[:n]`` and so on compute the same values, and each shards by its columns, and so by heads where
these are split off later. (Megatron-LM permutes the columns of ``w`` for a number of devices instead.) Parts may be
interleaved, and products may be those by experts.

A cut is moved from its slice back to the constants: through elementwise operators, reshapes and permutations. This is
done only if the slices do not overlap and no other operator reads the tensor that they cut, so that nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import StridedSliceOp
from hidet.ir.expr import is_constant
from hidet.utils import prod

from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.rewriting import Repeated, rewrite, uses_of
from hidet_dist.rules.local import rebuild
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import Moves, traits_of
from hidet_dist.weights import is_weight, part_of_weight


@dataclass(frozen=True)
class DimCut:
    """Every ``step``-th of the elements ``start`` to ``stop`` of dim ``dim`` of a tensor."""

    dim: int
    start: int
    stop: int
    step: int = 1

    @property
    def indices(self) -> range:
        """The indices of the elements."""
        return range(self.start, self.stop, self.step)


def split_projections(graph: FlowGraph) -> FlowGraph:
    """Split each product whose only readers cut its columns into one product per part.

    Weights are copied if a part of them is not contiguous (the columns of a matrix). Returns ``graph`` itself if there
    is nothing to split.
    """
    cutter = _Cutter(graph)

    def part(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, StridedSliceOp) or not cutter.may_cut(op):
            return None
        cut = cut_of(op)
        assert cut is not None
        return cutter.part(op.inputs[0], cut, replaced)

    return rewrite(graph, part)


def cut_of(op: StridedSliceOp) -> DimCut | None:
    """Return the cut of a slice that takes all other dims whole; None for any other."""
    cuts = []
    shape = op.inputs[0].shape
    for start, stop, axis, stride in zip(
        *(op.attrs[key] for key in ("starts", "ends", "axes", "strides")), strict=True
    ):
        if not is_constant(start, stride) or int(stride) < 1:
            return None
        if (int(start), int(stride)) == (0, 1) and same_extent(stop, shape[axis]):
            continue
        if not is_constant(stop, shape[axis]):
            return None
        cuts.append(DimCut(int(axis), int(start), int(stop), int(stride)))
    return cuts[0] if len(cuts) == 1 else None


class _Cutter:
    def __init__(self, graph: FlowGraph):
        self.uses = uses_of(graph)
        self.verdicts: dict[Tensor, bool] = {}
        self.parts: dict[tuple[Tensor, DimCut], Tensor] = {}
        self.repeated = Repeated()

    def may_cut(self, op: StridedSliceOp) -> bool:
        """Whether the slice, and all other slices of the same tensor, can be moved to a product's weight."""
        x = op.inputs[0]
        if x not in self.verdicts:
            self.verdicts[x] = self.only_cut(x)
        return self.verdicts[x]

    def only_cut(self, x: Tensor) -> bool:
        cuts = set()
        for user in self.uses[x]:
            cut = cut_of(user) if isinstance(user, StridedSliceOp) else None
            if cut is None:
                return False
            cuts.add(cut)
        ordered = sorted(cuts, key=lambda cut: cut.start)
        indices = set().union(*(cut.indices for cut in ordered))
        if len({cut.dim for cut in ordered}) > 1 or len(indices) < sum(len(cut.indices) for cut in ordered):
            return False
        return all(self.reaches_product(x, cut) for cut in ordered)

    def reaches_product(self, x: Tensor, cut: DimCut) -> bool:
        """Whether a cut of ``x`` can be moved to the weight of a product without computing anything twice."""
        op = x.op
        if op is None or not is_constant(x.shape[cut.dim]):
            return False
        if isinstance(op, MatmulOp | ExpertProductOp):
            weight = op.inputs[1]
            return len(weight.shape) > 1 and cut.dim == len(x.shape) - 1 and _can_cut(weight, _of_weight(op, cut))
        reached = False
        for source, moved in zip(op.inputs, _through(op, cut) or (), strict=False):
            if moved is None or _is_constant(source):
                continue  # broadcast along the cut dim, or cut as data
            if len(self.uses[source]) > 1 or not self.reaches_product(source, moved):
                return False
            reached = True
        return reached

    def part(self, x: Tensor, cut: DimCut, new: Mapping[Tensor, Tensor]) -> Tensor:
        """Compute ``cut`` of ``x`` from cut constants; ``new`` maps tensors to those already rewritten."""
        if (x, cut) not in self.parts:
            self.parts[x, cut] = self.make(x, cut, new)
        return self.parts[x, cut]

    def make(self, x: Tensor, cut: DimCut, new: Mapping[Tensor, Tensor]) -> Tensor:
        if is_weight(x):
            return part_of_weight(x, cut.dim, cut.start, cut.stop, cut.step)
        if _is_constant(x):
            kept = slice(cut.start, cut.stop, cut.step)
            index = tuple(kept if d == cut.dim else slice(None) for d in range(len(x.shape)))
            return hidet.from_torch(x.torch()[index].contiguous())
        op = x.op
        shape = tuple(len(cut.indices) if d == cut.dim else size for d, size in enumerate(extents_of(x)))
        if isinstance(op, MatmulOp | ExpertProductOp):
            a, b, *others = op.inputs
            inputs = [new.get(a, a), self.part(b, _of_weight(op, cut), new), *(new.get(x, x) for x in others)]
        else:
            moves = _through(op, cut)
            assert moves is not None
            inputs = [
                new.get(source, source) if moved is None else self.part(source, moved, new)
                for source, moved in zip(op.inputs, moves, strict=True)
            ]
        return self.repeated((type(op), op.task, cut), inputs, lambda: [_with_shape(op, inputs, shape)])[0]


def _with_shape(op: Operator, inputs: list[Tensor], shape: tuple[Extent, ...]) -> Tensor:
    """Build the operator on other inputs, with an output of this shape."""
    if traits_of(op).moves is Moves.RESHAPE:
        reshaped: Tensor = hidet.ops.reshape(inputs[0], list(shape))
        return reshaped
    return rebuild(op, inputs, [shape])[0]


def _through(op: Operator, cut: DimCut) -> tuple[DimCut | None, ...] | None:
    """Derive the cuts of an operator's inputs from that of its output; None for an input that is needed whole."""
    traits = traits_of(op)
    if traits.moves is Moves.RESHAPE:
        moved = _reshaped(extents_of(op.inputs[0]), extents_of(op.outputs[0]), cut)
        return None if moved is None else (moved,)
    dims = None if traits.input_dims is None else traits.input_dims(op, cut.dim)
    return None if dims is None else tuple(None if dim is None else replace(cut, dim=dim) for dim in dims)


def _reshaped(before: Sequence[Extent], after: Sequence[Extent], cut: DimCut) -> DimCut | None:
    """Derive the cut of a reshape's input from that of its output: both dims must follow the same outer extent."""
    inner = prod(after[cut.dim + 1 :])
    for dim in reversed(range(len(before))):
        if same_extent(prod(before[:dim]), prod(after[: cut.dim])):
            stride = prod(before[dim + 1 :])
            if not is_constant(inner, stride):
                return None
            if cut.step > 1:
                return replace(cut, dim=dim) if inner == stride else None
            begin, end = cut.start * inner, cut.stop * inner
            return None if begin % stride or end % stride else DimCut(dim, begin // stride, end // stride)
    return None


def _of_weight(op: MatmulOp | ExpertProductOp, cut: DimCut) -> DimCut:
    """The cut of a product's weight for one of its columns."""
    transposed = op.attrs["transpose_b" if isinstance(op, MatmulOp) else "transposed"]
    return replace(cut, dim=len(op.inputs[1].shape) - (2 if transposed else 1))


def _can_cut(weight: Tensor, cut: DimCut) -> bool:
    """Whether a cut of a product's weight can be moved to a constant: the weight, or one that it is a view of."""
    if _is_constant(weight):
        return True
    if weight.op is None or traits_of(weight.op).moves is not Moves.RESHAPE:
        return False
    moved = _through(weight.op, cut)
    return moved is not None and moved[0] is not None and _can_cut(weight.op.inputs[0], moved[0])


def _is_constant(x: Tensor) -> bool:
    return x.storage is not None or is_weight(x)
