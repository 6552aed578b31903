"""A float32 graph in half precision: matrix products and what lies between them, not what would lose by it.

hidet 0.6.1 has options for this (``PassContext.set_precision`` and ``set_reduce_precision``) that none of its passes
reads. Here the graph is rewritten before it is planned, so that costs, memory and communication are those of the dtype
that runs. The rules are those of PyTorch's autocast: products take and give half precision; reductions, exponentials,
powers and all operators that are not known to be safe are computed in float32, and give it; what takes both computes
in float32. hidet accumulates products, sums and norms in float32 in either case. Beyond that:

* Weights are kept in half precision, and cast when they are written or read, not in every run; vectors that are wanted
  in float32 alone, such as the scales of norms, stay in it.
* What is computed from integers and weights alone, such as the angles of rotary positions, stays in float32: positions
  above 2048 are no numbers of float16 at all.
* Values beyond what the dtype can hold (a mask of -1e9 in float16) become its largest, instead of infinite: a row that
  is masked as a whole must not become NaN.
* Inputs and outputs of the graph have the dtypes that they had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.activation import GeluOp, ReluOp, SigmoidOp, SiluOp
from hidet.graph.ops.arithmetic import (
    AddOp,
    AddScalarOp,
    DivideOp,
    DivideScalarOp,
    MultiplyOp,
    MultiplyScalarOp,
    NegativeOp,
    RSubScalarOp,
    SubScalarOp,
    SubtractOp,
    TanhOp,
)
from hidet.graph.ops.conv1d import Conv1dOp
from hidet.graph.ops.conv2d.conv2d import Conv2dOp
from hidet.graph.ops.conv3d import Conv3dOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import (
    BroadcastOp,
    CastOp,
    ConcatOp,
    FlattenOp,
    GatherOp,
    PermuteDimsOp,
    RearrangeOp,
    RepeatInterleaveOp,
    ReshapeOp,
    SqueezeOp,
    StridedSliceOp,
    TakeOp,
    TileOp,
    UnsqueezeOp,
)
from hidet.graph.ops.transpose2d import TransposeOp2D
from hidet.ir import data_type

from hidet_dist.rules.local import rebuild
from hidet_dist.spec.extents import extents_of
from hidet_dist.weights.named import is_weight, weight_as
from hidet_dist.weights.sources import cast_within

PRECISIONS = ("float16", "bfloat16")

_PRODUCTS = (MatmulOp, Conv1dOp, Conv2dOp, Conv3dOp)
_MOVES = (
    BroadcastOp,
    ConcatOp,
    FlattenOp,
    GatherOp,
    PermuteDimsOp,
    RearrangeOp,
    RepeatInterleaveOp,
    ReshapeOp,
    SqueezeOp,
    StridedSliceOp,
    TakeOp,
    TileOp,
    TransposeOp2D,
    UnsqueezeOp,
)
_SCALARS = (AddScalarOp, DivideScalarOp, MultiplyScalarOp, RSubScalarOp, SubScalarOp)
_ELEMENTWISE = (
    AddOp,
    DivideOp,
    GeluOp,
    MultiplyOp,
    NegativeOp,
    ReluOp,
    SigmoidOp,
    SiluOp,
    SubtractOp,
    TanhOp,
)


@dataclass(frozen=True)
class HalfGraph:
    """The graph in half precision, and what has taken the place of each of its weights."""

    graph: FlowGraph
    weights: dict[Tensor, Tensor]


def in_precision(graph: FlowGraph, dtype: str) -> HalfGraph:
    """``graph`` with its float32 computation in ``dtype`` (``float16`` or ``bfloat16``) where that is sound.

    ``graph`` itself is left as it is. What is not float32 in it stays what it is.
    """
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        graph.update_nodes()
        return _Rewriter(graph, dtype, _only_float32(graph, dtype)).run()


class _Decisions:
    """The dtype in which each operator computes, decided in execution order."""

    def __init__(self, graph: FlowGraph, dtype: str):
        self.dtype = dtype
        self.inputs = set(graph.inputs)
        # Computed from integers and weights alone.
        self.exact: set[Tensor] = set()
        self.made: dict[Tensor, str] = {}  # the dtype that what an operator makes now has

    def of(self, op: Operator) -> str | None:
        """The dtype that the operator takes its float32 inputs in; None where it takes all as they are."""
        floats = [x for x in op.inputs if x.dtype.name == "float32"]
        if self.is_exact(op, floats):
            self.exact.update(op.outputs)
            return None
        if not floats:
            return None
        if isinstance(op, _PRODUCTS):
            return self.dtype
        if isinstance(op, MultiplyOp) and op.inputs[0] is op.inputs[1]:
            return "float32"  # a power, which holds but the square root of what the dtype does
        if isinstance(op, _MOVES + _ELEMENTWISE) or (isinstance(op, _SCALARS) and self.holds(op.attrs["scalar"])):
            return self.dtype if {self.now(x) for x in floats} == {self.dtype} else "float32"
        return "float32"

    def is_exact(self, op: Operator, floats: list[Tensor]) -> bool:
        if isinstance(op, CastOp) and not op.inputs[0].dtype.is_float():
            return op.outputs[0].dtype.name == "float32"
        return any(x in self.exact for x in floats) and all(x in self.exact or self.is_weight(x) for x in floats)

    def is_weight(self, x: Tensor) -> bool:
        return x not in self.inputs and (x.storage is not None or is_weight(x))

    def holds(self, scalar: Any) -> bool:
        """Whether a number is one of the dtype's, or nearly: neither too large, nor one that would be 0."""
        value = abs(float(scalar))
        limits = torch.finfo(getattr(torch, self.dtype))
        return value == 0 or limits.tiny <= value <= limits.max

    def now(self, x: Tensor) -> str:
        """The dtype in which a float32 tensor of the graph is at hand."""
        return self.dtype if self.is_weight(x) else self.made.get(x, str(x.dtype.name))


def _only_float32(graph: FlowGraph, dtype: str) -> frozenset[Tensor]:
    """The vectors among the weights that no operator takes in half precision."""
    decisions = _Decisions(graph, dtype)
    wanted: dict[Tensor, set[str]] = {}
    for op in graph.nodes:
        own = decisions.of(op)
        for x in op.inputs if own is not None else ():
            if x.dtype.name == "float32" and decisions.is_weight(x):
                wanted.setdefault(x, set()).add(str(own))
        for y in op.outputs:
            decisions.made[y] = dtype if own == dtype and y.dtype.name == "float32" else str(y.dtype.name)
    return frozenset(x for x, dtypes in wanted.items() if dtypes == {"float32"} and len(x.shape) <= 1)


class _Rewriter:
    def __init__(self, graph: FlowGraph, dtype: str, kept: frozenset[Tensor]):
        self.graph = graph
        self.kept = kept  # weights that stay as they are
        self.dtype = dtype
        self.decisions = _Decisions(graph, dtype)
        self.new: dict[Tensor, Tensor] = {}
        self.cast_of: dict[tuple[Tensor, str], Tensor] = {}
        self.half_weights: dict[Tensor, Tensor] = {}

    def run(self) -> HalfGraph:
        for op in self.graph.nodes:
            outputs = self.on(op, self.decisions.of(op))
            for old, own in zip(op.outputs, outputs, strict=True):
                self.new[old] = own
                self.decisions.made[old] = str(own.dtype.name)
        outputs = [self.cast(self.new.get(y, y), y.dtype.name) for y in self.graph.outputs]
        graph = FlowGraph(outputs, list(self.graph.inputs))
        graph.update_nodes()
        return HalfGraph(graph, self.half_weights)

    def on(self, op: Operator, dtype: str | None) -> list[Tensor]:
        """The operator with its float32 inputs in ``dtype``; with all of them as they are for None."""
        inputs = [
            self.new.get(x, x) if dtype is None or x.dtype.name != "float32" else self.at_hand(x, dtype)
            for x in op.inputs
        ]
        if [x.dtype.name for x in inputs] == [x.dtype.name for x in op.inputs]:
            return rebuild(op, inputs, [extents_of(y) for y in op.outputs])
        scalar = {"scalar": data_type(dtype)(float(op.attrs["scalar"]))} if isinstance(op, _SCALARS) else None
        return list(op.reforward(inputs, scalar))

    def at_hand(self, x: Tensor, dtype: str) -> Tensor:
        if not self.decisions.is_weight(x):
            return self.cast(self.new.get(x, x), dtype)
        if x in self.kept:
            return self.cast(x, dtype)
        if x not in self.half_weights:
            self.half_weights[x] = weight_as(x, self.dtype) if is_weight(x) else _constant_as(x, self.dtype)
        return self.cast(self.half_weights[x], dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        if x.dtype.name == dtype:
            return x
        if (x, dtype) not in self.cast_of:
            if dtype == "float16" and x.dtype.name == "float32":
                limit = float(torch.finfo(torch.float16).max)
                self.cast_of[x, dtype] = hidet.ops.cast(hidet.ops.clamp(x, -limit, limit), dtype)
            else:
                self.cast_of[x, dtype] = hidet.ops.cast(x, dtype)
        return self.cast_of[x, dtype]


def _constant_as(x: Tensor, dtype: str) -> Tensor:
    return hidet.from_torch(cast_within(x.torch(), getattr(torch, dtype)))
