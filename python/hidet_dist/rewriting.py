"""Rewriting of graphs: replacement of operators, and subgraphs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.tensor import symbol_like

from hidet_dist.errors import ConfigError

Uses: TypeAlias = Mapping[Tensor, Sequence[Operator | None]]
"""The operators that read each tensor; None stands for the outputs of the graph."""
Build: TypeAlias = Callable[[list[Tensor]], Tensor]
"""Builds the replacement of an operator's output from tensors that it reads."""


def uses_of(graph: FlowGraph) -> Uses:
    """Map each tensor of a graph to its consumers, one entry per use."""
    uses: dict[Tensor, list[Operator | None]] = {}
    for node in graph.nodes:
        for x in node.inputs:
            uses.setdefault(x, []).append(node)
    for y in graph.outputs:
        uses.setdefault(y, []).append(None)
    return uses


def only_user(x: Tensor, uses: Uses) -> Operator | None:
    """The only consumer of a tensor; None if it has several uses, or is an output."""
    users = uses.get(x, ())
    return users[0] if len(users) == 1 else None


def copy_operator(op: Operator, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy an operator with its task, for inputs of the same dtypes and shapes; return the outputs of the copy."""
    clone = copy.copy(op)
    clone.inputs = list(inputs)
    clone.attrs = dict(op.attrs)
    clone._compiled_task = None  # a loaded library cannot be sent to hidet's build processes
    device = clone.device
    clone.outputs = []
    for number, y in enumerate(op.outputs):
        made = Tensor(shape=[], dtype=y.dtype, device=device, storage=None, trace=(clone, number))
        made._shape = y._shape  # simplified already
        clone.outputs.append(made)
    return list(clone.outputs)


def rewrite(graph: FlowGraph, make: Callable[[Operator, Mapping[Tensor, Tensor]], Tensor | None]) -> FlowGraph:
    """Replace tensors of a graph by others. Operators without consumers disappear.

    Parameters
    ----------
    graph: FlowGraph
        The graph. It is not changed; if nothing is replaced, it is the result.
    make: callable
        Returns the replacement of an operator's only output, given the operator and the replacements so far; None for
        an operator that stays.
    """
    graph.update_nodes()
    replaced: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        replacement = make(node, replaced)
        if replacement is not None:
            replaced[node.outputs[0]] = replacement
        elif any(x in replaced for x in node.inputs):
            moved = copy_operator(node, [replaced.get(x, x) for x in node.inputs])
            replaced.update(zip(node.outputs, moved, strict=True))
    if not replaced:
        return graph
    result = FlowGraph([replaced.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result


def replace_operators(
    graph: FlowGraph, replaced: Callable[[Operator, Uses], tuple[Sequence[Tensor], Build] | None]
) -> FlowGraph:
    """Replace operators as :func:`rewrite` does, with access to the consumers of each tensor.

    ``replaced`` returns the replacement of an operator of one output, given the consumers of each tensor: the tensors
    of ``graph`` that it is computed from, and a function that builds it; None for an operator that stays.
    """
    graph.update_nodes()
    uses = uses_of(graph)

    def make(node: Operator, replaced_tensors: Mapping[Tensor, Tensor]) -> Tensor | None:
        match = replaced(node, uses) if len(node.outputs) == 1 else None
        if match is None:
            return None
        inputs, build = match
        return build([replaced_tensors.get(x, x) for x in inputs])

    return rewrite(graph, make)


@dataclass(frozen=True)
class Subgraph:
    """Some operators of a graph as a separate graph.

    Attributes
    ----------
    graph: FlowGraph
        The operators, with placeholders for the results of operators outside. It shares the whole graph's weights.
    inputs, outputs: tuple of Tensor
        The tensors of the whole graph that the graph's inputs and outputs stand for: inputs in the order of their first
        use, outputs in that of the operators.
    """

    graph: FlowGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def subgraph(graph: FlowGraph, operators: Sequence[int]) -> Subgraph:
    """Copy operators of a graph, by their ascending numbers in ``graph.nodes``, to a separate graph.

    Outputs are the tensors that operators outside read, or that are outputs of the graph.

    Raises
    ------
    ConfigError
        When the graph has no such operators.
    """
    graph.update_nodes()
    numbers = list(operators)
    known = bool(numbers) and numbers[0] >= 0 and numbers[-1] < len(graph.nodes)
    if not known or any(a >= b for a, b in itertools.pairwise(numbers)):
        raise ConfigError(
            f"The graph has the operators 0 to {len(graph.nodes) - 1}; {operators} is not a range of them."
        )
    nodes = [graph.nodes[number] for number in numbers]
    graph_inputs = set(graph.inputs)
    copies: dict[Tensor, Tensor] = {}
    inputs: dict[Tensor, Tensor] = {}
    for node in nodes:
        for x in node.inputs:
            if x not in copies and (x.trace is not None or x in graph_inputs):
                inputs.setdefault(x, x if x.trace is None else symbol_like(x))
        moved = copy_operator(node, [copies.get(x, inputs.get(x, x)) for x in node.inputs])
        copies.update(zip(node.outputs, moved, strict=True))
    uses, inside = uses_of(graph), set(nodes)
    outputs = [y for y in copies if any(user is None or user not in inside for user in uses.get(y, ()))]
    result = FlowGraph([copies[y] for y in outputs], list(inputs.values()))
    result.update_nodes()
    return Subgraph(result, tuple(inputs), tuple(outputs))
