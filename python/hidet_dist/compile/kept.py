"""The checks that a rewrite of a graph keeps its communication operators, and computes no product twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hidet.graph import FlowGraph, Operator
from hidet.ir.compute import ReduceCompute, TensorInput
from hidet.ir.expr import TensorElement
from hidet.ir.task import Task
from hidet.ir.tools import collect

from hidet_dist.compile.cpu.tiled import TiledOp
from hidet_dist.errors import CompileError
from hidet_dist.partitioning.program import communication_operators


def check_kept(before: FlowGraph, after: FlowGraph) -> None:
    """Compare the communication operators and the products of two graphs.

    Where a rewrite replaces an operator only for some of its readers, everything before it is computed twice.

    Raises
    ------
    CompileError
        When the communication operators differ in more than their order, or the second graph has more products.
    """
    old, new = (
        Counter((op.task.name, tuple(map(str, op.inputs[0].shape))) for op in communication_operators(graph))
        for graph in (before, after)
    )
    if old != new:
        raise CompileError(
            f"Optimizing the program changed its communication: lost {dict(old - new)}, added {dict(new - old)}."
        )
    least, most = _products(before), _products(after)
    if most > least:
        raise CompileError(f"Optimizing the program made {most} products of {least}: some are computed twice.")


def _products(graph: FlowGraph) -> int:
    """Count the matrix products, the convolutions, and what else sums up products of elements of two tensors."""
    known: dict[Task, bool] = {}
    count = 0
    for op in _operators(graph):
        if op.task not in known:
            known[op.task] = isinstance(op, TiledOp) or _sums_products(op.task)
        count += known[op.task]
    return count


def _operators(graph: FlowGraph) -> Iterator[Operator]:
    """Iterate over the operators of a graph, with those that were fused in place of the fused ones."""
    for op in graph.nodes:
        fused = getattr(op.task, "fused_graph", None)
        yield from [op] if fused is None else _operators(fused)


def _sums_products(task: Task) -> bool:
    return any(
        len({e.base for e in collect(sum_.value, TensorElement) if isinstance(e.base, TensorInput)}) > 1
        for sum_ in collect(list(task.outputs), ReduceCompute)
    )
