"""The split of a fused projection into one projection per part.

``q, k, v = split(x @ w + b, 3)`` cuts the columns of the product into three blocks. A shard of the columns would be a
shard of one or two blocks, not of each, so the product would have to be gathered before it is cut. The projections
``q = x @ w[:, :n] + b[:n]`` and so on compute the same values, and each shards by its columns, and so by heads where
these are split off later. (Megatron-LM permutes the columns of ``w`` for a number of devices instead.)

A cut is moved from its slice back to the constants: through elementwise operators, reshapes and permutations. This is
done only if the slices do not overlap and no other operator reads the tensor that they cut, so that nothing is computed
twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.arithmetic import BinaryElementwiseOp, UnaryElementwiseOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import (
    PermuteDimsOp,
    RearrangeOp,
    StridedSliceOp,
)
from hidet.ir.expr import is_constant
from hidet.utils import prod

from hidet_dist.rewriting import Repeated, rewrite, uses_of
from hidet_dist.rules.local import rebuild
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import Moves, traits_of
from hidet_dist.weights import is_weight, part_of_weight


@dataclass(frozen=True)
class Cut:
    """The elements ``start`` to ``stop`` of dim ``dim`` of a tensor."""

    dim: int
    start: int
    stop: int


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


def cut_of(op: StridedSliceOp) -> Cut | None:
    """Return the cut of a slice that takes all other dims whole and has step 1; None for any other."""
    cuts = []
    shape = op.inputs[0].shape
    for start, stop, axis, stride in zip(
        *(op.attrs[key] for key in ("starts", "ends", "axes", "strides")), strict=True
    ):
        if not is_constant(start, stride) or int(stride) != 1:
            return None
        if int(start) == 0 and same_extent(stop, shape[axis]):
            continue
        if not is_constant(stop, shape[axis]):
            return None
        cuts.append(Cut(int(axis), int(start), int(stop)))
    return cuts[0] if len(cuts) == 1 else None


class _Cutter:
    def __init__(self, graph: FlowGraph):
        self.uses = uses_of(graph)
        self.verdicts: dict[Tensor, bool] = {}
        self.parts: dict[tuple[Tensor, Cut], Tensor] = {}
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
        if any(a.dim != b.dim or a.stop > b.start for a, b in itertools.pairwise(ordered)):
            return False
        return all(self.reaches_product(x, cut) for cut in ordered)

    def reaches_product(self, x: Tensor, cut: Cut) -> bool:
        """Whether a cut of ``x`` can be moved to the weight of a product without computing anything twice."""
        op = x.op
        if op is None or not is_constant(x.shape[cut.dim]):
            return False
        if isinstance(op, MatmulOp):
            return _is_constant(op.inputs[1]) and len(op.inputs[1].shape) > 1 and cut.dim == len(x.shape) - 1
        reached = False
        for source, moved in zip(op.inputs, _through(op, cut) or (), strict=False):
            if moved is None or _is_constant(source):
                continue  # broadcast along the cut dim, or cut as data
            if len(self.uses[source]) > 1 or not self.reaches_product(source, moved):
                return False
            reached = True
        return reached

    def part(self, x: Tensor, cut: Cut, new: Mapping[Tensor, Tensor]) -> Tensor:
        """Compute ``cut`` of ``x`` from cut constants; ``new`` maps tensors to those already rewritten."""
        if (x, cut) not in self.parts:
            self.parts[x, cut] = self.make(x, cut, new)
        return self.parts[x, cut]

    def make(self, x: Tensor, cut: Cut, new: Mapping[Tensor, Tensor]) -> Tensor:
        if is_weight(x):
            return part_of_weight(x, cut.dim, cut.start, cut.stop)
        if _is_constant(x):
            index = tuple(slice(cut.start, cut.stop) if d == cut.dim else slice(None) for d in range(len(x.shape)))
            return hidet.from_torch(x.torch()[index].contiguous())
        op = x.op
        shape = tuple(cut.stop - cut.start if d == cut.dim else size for d, size in enumerate(extents_of(x)))
        if isinstance(op, MatmulOp):
            a, b = op.inputs
            columns = len(b.shape) - (2 if op.attrs["transpose_b"] else 1)
            inputs = [new.get(a, a), self.part(b, Cut(columns, cut.start, cut.stop), new)]
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


def _through(op: Operator, cut: Cut) -> tuple[Cut | None, ...] | None:
    """Derive the cuts of an operator's inputs from that of its output; None for an input that is needed whole."""
    shape = extents_of(op.outputs[0])
    if isinstance(op, UnaryElementwiseOp):
        return (cut,)
    if isinstance(op, BinaryElementwiseOp):
        moves: list[Cut | None] = []
        for x in op.inputs:
            dim = cut.dim - len(shape) + len(x.shape)  # shapes broadcast aligned at their last dims
            broadcast = dim < 0 or same_extent(x.shape[dim], 1)
            moves.append(None if broadcast else Cut(dim, cut.start, cut.stop))
        return tuple(moves)
    if isinstance(op, PermuteDimsOp):
        return (Cut(op.attrs["axes"][cut.dim], cut.start, cut.stop),)
    if isinstance(op, RearrangeOp) and all(len(dims) == 1 for dims in op.attrs["plan"]):
        return (Cut(op.attrs["plan"][cut.dim][0], cut.start, cut.stop),)
    if traits_of(op).moves is Moves.RESHAPE:
        moved = _reshaped(extents_of(op.inputs[0]), shape, cut)
        return None if moved is None else (moved,)
    return None


def _reshaped(before: Sequence[Extent], after: Sequence[Extent], cut: Cut) -> Cut | None:
    """Derive the cut of a reshape's input from that of its output: both dims must follow the same outer extent."""
    inner = prod(after[cut.dim + 1 :])
    for dim in reversed(range(len(before))):
        if same_extent(prod(before[:dim]), prod(after[: cut.dim])):
            stride = prod(before[dim + 1 :])
            if not is_constant(inner, stride):
                return None
            begin, end = cut.start * inner, cut.stop * inner
            return None if begin % stride or end % stride else Cut(dim, begin // stride, end // stride)
    return None


def _is_constant(x: Tensor) -> bool:
    return x.storage is not None or is_weight(x)
