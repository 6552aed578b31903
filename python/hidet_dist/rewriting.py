"""Operators of a graph put in the place of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from hidet.graph import FlowGraph, Operator, Tensor

Uses: TypeAlias = Mapping[Tensor, Sequence[Operator | None]]
"""The operators that read each tensor; None stands for the outputs of the graph."""
Build: TypeAlias = Callable[[list[Tensor]], Tensor]
"""Makes what takes an operator's place, from what that reads."""


def uses_of(graph: FlowGraph) -> Uses:
    """Who reads each tensor of a graph, once for each time."""
    uses: dict[Tensor, list[Operator | None]] = {}
    for node in graph.nodes:
        for x in node.inputs:
            uses.setdefault(x, []).append(node)
    for y in graph.outputs:
        uses.setdefault(y, []).append(None)
    return uses


def only_user(x: Tensor, uses: Uses) -> Operator | None:
    """The operator that alone reads a tensor, once; None if there are more, or it is an output."""
    users = uses.get(x, ())
    return users[0] if len(users) == 1 else None


def rewrite(graph: FlowGraph, make: Callable[[Operator, Mapping[Tensor, Tensor]], Tensor | None]) -> FlowGraph:
    """The graph with other tensors in the place of some; what nobody reads then is gone.

    Parameters
    ----------
    graph: FlowGraph
        Stays as it is, and is given back where nothing is replaced.
    make: callable
        For an operator, and what has taken the place of each tensor so far, what takes that of its only output; None
        for an operator that stays.
    """
    graph.update_nodes()
    made: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        own = make(node, made)
        if own is not None:
            made[node.outputs[0]] = own
        elif any(x in made for x in node.inputs):
            moved = copy.copy(node)
            moved.inputs = [made.get(x, x) for x in node.inputs]
            moved.outputs = moved.symbolic_run()
            made.update(zip(node.outputs, moved.outputs, strict=True))
    if not made:
        return graph
    result = FlowGraph([made.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result


def replace_operators(
    graph: FlowGraph, replaced: Callable[[Operator, Uses], tuple[Sequence[Tensor], Build] | None]
) -> FlowGraph:
    """As :func:`rewrite`, of operators told by who reads their results.

    ``replaced`` says for an operator of one output, and who reads each tensor, what takes its place: the tensors of
    ``graph`` that it is computed from, and how; None for what stays.
    """
    graph.update_nodes()
    uses = uses_of(graph)

    def make(node: Operator, made: Mapping[Tensor, Tensor]) -> Tensor | None:
        found = replaced(node, uses) if len(node.outputs) == 1 else None
        if found is None:
            return None
        inputs, build = found
        return build([made.get(x, x) for x in inputs])

    return rewrite(graph, make)
