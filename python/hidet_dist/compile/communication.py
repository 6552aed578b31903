"""The check that a rewrite of a graph keeps its communication operators."""

from __future__ import annotations

from collections import Counter

from hidet.graph import FlowGraph

from hidet_dist.errors import CompileError
from hidet_dist.partitioning.program import communication_operators


def check_communication(before: FlowGraph, after: FlowGraph) -> None:
    """Compare the communication operators of two graphs.

    Raises
    ------
    CompileError
        When they differ in more than their order.
    """
    old, new = (
        Counter((op.task.name, tuple(map(str, op.inputs[0].shape))) for op in communication_operators(graph))
        for graph in (before, after)
    )
    if old != new:
        raise CompileError(
            f"Optimizing the program changed its communication: lost {dict(old - new)}, added {dict(new - old)}."
        )
