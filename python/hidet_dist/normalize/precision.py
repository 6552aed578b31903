"""Conversion of a float32 graph to half precision where that is safe: matrix products, and operators between them.

hidet 0.6.1 has options for this (``PassContext.set_precision`` and ``set_reduce_precision``), but none of its passes
reads them. Here the graph is rewritten before planning, so that costs, memory and communication are those of the dtype
that runs. The rules are those of PyTorch's autocast. Products have half-precision operands and results. Reductions,
exponentials, powers and all operators that are not known to be safe compute in float32, with float32 results. Operators
with operands of both dtypes compute in float32. hidet accumulates products, sums and norms in float32 in either case.
Further rules:

* Weights are stored in half precision: they are cast when artifacts are written or weights are read, not in every run.
  Vectors that are only used in float32, such as the scales of norms, stay in float32.
* Values that are computed from integers and weights alone, such as the angles of rotary positions, stay in float32:
  float16 cannot represent all positions above 2048.
* Values beyond the range of the dtype (a mask of -1e9 in float16) become its largest value instead of infinity, since a
  completely masked row must not become NaN.
* Inputs and outputs of the graph keep their dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.arithmetic import MultiplyOp
from hidet.graph.ops.transform import CastOp
from hidet.ir import data_type

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.rules.local import rebuild
from hidet_dist.spec.extents import extents_of
from hidet_dist.traits import Half, traits_of
from hidet_dist.weights.combined import cast_within
from hidet_dist.weights.named import is_weight, weight_as

PRECISIONS = ("float16", "bfloat16")


@dataclass(frozen=True)
class HalfGraph:
    """The graph in half precision, and the replacement of each of its weights."""

    graph: FlowGraph
    weights: dict[Tensor, Tensor]


@quick_hidet()
def in_precision(graph: FlowGraph, dtype: str) -> HalfGraph:
    """Convert float32 computation of ``graph`` to ``dtype`` (``float16`` or ``bfloat16``) where that is safe.

    ``graph`` itself is not changed. Tensors of other dtypes keep them.
    """
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        graph.update_nodes()
        return _PrecisionRewriter(graph, dtype, _only_float32(graph, dtype)).run()


class _Decisions:
    """The dtype in which each operator computes, decided in execution order."""

    def __init__(self, graph: FlowGraph, dtype: str):
        self.dtype = dtype
        self.inputs = set(graph.inputs)
        # Tensors that are computed from integers and weights alone.
        self.exact: set[Tensor] = set()
        self.dtypes: dict[Tensor, str] = {}  # the dtype of each rewritten operator's results

    def of(self, op: Operator) -> str | None:
        """Choose the dtype of the operator's float32 inputs; None to keep the dtypes of all inputs."""
        floats = [x for x in op.inputs if x.dtype.name == "float32"]
        if self.is_exact(op, floats):
            self.exact.update(op.outputs)
            return None
        if not floats:
            return None
        half = traits_of(op).half
        if half is Half.ALWAYS:
            return self.dtype
        if isinstance(op, MultiplyOp) and op.inputs[0] is op.inputs[1]:
            return "float32"  # a power: its base may only be as large as the root of the dtype's largest value
        if half is Half.FOLLOW and self.holds(op.attrs.get("scalar", 0)):
            return self.dtype if {self.now(x) for x in floats} == {self.dtype} else "float32"
        return "float32"

    def is_exact(self, op: Operator, floats: list[Tensor]) -> bool:
        if isinstance(op, CastOp) and not op.inputs[0].dtype.is_float():
            return op.outputs[0].dtype.name == "float32"
        return any(x in self.exact for x in floats) and all(x in self.exact or self.is_weight(x) for x in floats)

    def is_weight(self, x: Tensor) -> bool:
        return x not in self.inputs and (x.storage is not None or is_weight(x))

    def holds(self, scalar: Any) -> bool:
        """Whether the dtype can hold a number: it neither overflows nor becomes 0."""
        value = abs(float(scalar))
        limits = torch.finfo(getattr(torch, self.dtype))
        return value == 0 or limits.tiny <= value <= limits.max

    def now(self, x: Tensor) -> str:
        """Return the dtype of a float32 tensor in the rewritten graph."""
        return self.dtype if self.is_weight(x) else self.dtypes.get(x, str(x.dtype.name))


def _only_float32(graph: FlowGraph, dtype: str) -> frozenset[Tensor]:
    """Find the vectors among the weights that no operator reads in half precision."""
    decisions = _Decisions(graph, dtype)
    wanted: dict[Tensor, set[str]] = {}
    for op in graph.nodes:
        chosen = decisions.of(op)
        for x in op.inputs if chosen is not None else ():
            if x.dtype.name == "float32" and decisions.is_weight(x):
                wanted.setdefault(x, set()).add(str(chosen))
        for y in op.outputs:
            decisions.dtypes[y] = dtype if chosen == dtype and y.dtype.name == "float32" else str(y.dtype.name)
    return frozenset(x for x, dtypes in wanted.items() if dtypes == {"float32"} and len(x.shape) <= 1)


class _PrecisionRewriter:
    def __init__(self, graph: FlowGraph, dtype: str, kept: frozenset[Tensor]):
        self.graph = graph
        self.kept = kept  # weights that stay in float32
        self.dtype = dtype
        self.decisions = _Decisions(graph, dtype)
        self.new: dict[Tensor, Tensor] = {}
        self.cast_of: dict[tuple[Tensor, str], Tensor] = {}
        self.half_weights: dict[Tensor, Tensor] = {}

    def run(self) -> HalfGraph:
        for op in self.graph.nodes:
            outputs = self.on(op, self.decisions.of(op))
            for old, y in zip(op.outputs, outputs, strict=True):
                self.new[old] = y
                self.decisions.dtypes[old] = str(y.dtype.name)
        outputs = [self.cast(self.new.get(y, y), y.dtype.name) for y in self.graph.outputs]
        graph = FlowGraph(outputs, list(self.graph.inputs))
        graph.update_nodes()
        return HalfGraph(graph, self.half_weights)

    def on(self, op: Operator, dtype: str | None) -> list[Tensor]:
        """Rebuild an operator with its float32 inputs in ``dtype``; with None, inputs keep their dtypes."""
        inputs = [
            self.new.get(x, x) if dtype is None or x.dtype.name != "float32" else self.at_hand(x, dtype)
            for x in op.inputs
        ]
        if [x.dtype.name for x in inputs] == [x.dtype.name for x in op.inputs]:
            return rebuild(op, inputs, [extents_of(y) for y in op.outputs])
        scalar = {"scalar": data_type(dtype)(float(op.attrs["scalar"]))} if "scalar" in op.attrs else None
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
