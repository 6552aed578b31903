"""Rewriting of graphs: replacement of operators, and subgraphs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TypeAlias, TypeVar

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.tensor import symbol_like

from hidet_dist.errors import ConfigError

Node = TypeVar("Node", bound=Hashable)
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


def longest_paths(before: Mapping[Node, Iterable[Node]], length: Mapping[Node, int]) -> dict[Node, int]:
    """Map each node to the length of the longest path that ends with it, which is the sum of its nodes' lengths.

    ``before`` maps each node to those that it depends on. Nodes of positive length that are mapped to the same number
    do not depend on one another. Raises graphlib.CycleError if nodes depend on each other.
    """
    result: dict[Node, int] = {}
    for node in TopologicalSorter(before).static_order():
        result[node] = length[node] + max((result[one] for one in before[node]), default=0)
    return result


def copy_operator(op: Operator, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy an operator with its task, for inputs of the same dtypes and shapes; return the outputs of the copy."""
    clone = copy.copy(op)
    clone.inputs = list(inputs)
    clone.attrs = dict(op.attrs)
    clone._compiled_task = None  # a loaded library cannot be sent to hidet's build processes
    device = clone.device
    clone.outputs = []
    for number, y in enumerate(op.outputs):
        made = Tensor.__new__(Tensor)  # not its constructor, which simplifies the shape that is simplified already
        made._shape, made._dtype, made._device = y._shape, y._dtype, device
        made._storage, made._layout, made._trace = None, None, (clone, number)
        clone.outputs.append(made)
    return list(clone.outputs)


def with_inputs(
    graph: FlowGraph,
    new: Mapping[Tensor, Tensor],
    key_of: Callable[[Operator], Hashable | None],
    build: Callable[[Operator, list[Tensor]], Operator],
) -> FlowGraph:
    """Replace inputs of a graph, and operators that read the new ones in another way.

    Parameters
    ----------
    graph: FlowGraph
        The graph. It is not changed; if nothing is replaced, it is the result.
    new: mapping
        The replacements of inputs.
    key_of: callable
        Returns a key of an operator that is to be replaced; None for any other. Equal operators of equal layers have
        one key, and get copies of one operator.
    build: callable
        Builds the replacement of an operator on new inputs.
    """
    known: dict[Hashable, Operator] = {}

    def make(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Sequence[Tensor] | None:
        key = key_of(op)
        if key is None:
            return None
        inputs = [replaced.get(x, x) for x in op.inputs]
        if key in known:
            return copy_operator(known[key], inputs)
        known[key] = build(op, inputs)
        return known[key].outputs

    return _rewritten(graph, make, new)


class Repeated:
    """Subgraphs that are built once for each kind of tensors, and copied for other tensors of this kind.

    Building a definition takes long, and most layers of a model have equal ones.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}

    def __call__(self, key: Hashable, inputs: Sequence[Tensor], build: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Build a subgraph on ``inputs``, or copy the one that was built for this key; return its outputs.

        Parameters
        ----------
        key: hashable
            Decides the subgraph together with the dtypes, the shapes and the devices of the inputs.
        inputs: sequence of Tensor
            The tensors that the subgraph reads. Their values must not decide what is built.
        build: callable
            Builds the subgraph; an empty list stands for none. It is called each time for a subgraph that reads other
            tensors than ``inputs``.
        """
        given = list(inputs)
        places = {x: place for place, x in reversed(list(enumerate(given)))}
        kinds = tuple(
            (x.dtype.name, tuple(map(str, x.shape)), str(x.device), x.storage is None, places[x]) for x in given
        )
        whole = (key, kinds)
        if whole in self._known:
            return _copied(*self._known[whole], given)
        made = build()
        if _reads_only(given, made):
            self._known[whole] = given, made
        return made


def _reads_only(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether outputs are computed from the inputs, and from operators without inputs, only."""
    seen, pending = set(inputs), list(outputs)
    while pending:
        y = pending.pop()
        if y in seen:
            continue
        if y.op is None:
            return False
        seen.add(y)
        pending += y.op.inputs
    return True


def _copied(inputs: Sequence[Tensor], outputs: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Copy the operators between ``inputs`` and ``outputs``, for ``others`` in place of the inputs."""
    copies = dict(zip(inputs, others, strict=True))

    def copied(y: Tensor) -> Tensor:
        if y not in copies:
            read = [copied(x) for x in y.op.inputs]
            copies.update(zip(y.op.outputs, copy_operator(y.op, read), strict=True))
        return copies[y]

    return [copied(y) for y in outputs]


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

    def make_all(node: Operator, replaced: Mapping[Tensor, Tensor]) -> Sequence[Tensor] | None:
        replacement = make(node, replaced)
        return None if replacement is None else [replacement]

    return _rewritten(graph, make_all, {})


def _rewritten(
    graph: FlowGraph,
    make: Callable[[Operator, Mapping[Tensor, Tensor]], Sequence[Tensor] | None],
    inputs: Mapping[Tensor, Tensor],
) -> FlowGraph:
    """Replace ``inputs`` of a graph, and the outputs of operators by what ``make`` returns; see :func:`rewrite`."""
    replaced = dict(inputs)
    for node in graph.nodes:
        outputs = make(node, replaced)
        if outputs is None and any(x in replaced for x in node.inputs):
            outputs = copy_operator(node, [replaced.get(x, x) for x in node.inputs])
        if outputs is not None:
            replaced.update(zip(node.outputs, outputs, strict=True))
    if not replaced:
        return graph
    result = FlowGraph([replaced.get(y, y) for y in graph.outputs], [replaced.get(x, x) for x in graph.inputs])
    result.update_nodes()
    return result


def replace_operators(
    graph: FlowGraph, replaced: Callable[[Operator, Uses], tuple[Sequence[Tensor], Build] | None]
) -> FlowGraph:
    """Replace operators as :func:`rewrite` does, with access to the consumers of each tensor.

    ``replaced`` returns the replacement of an operator of one output, given the consumers of each tensor: the tensors
    of ``graph`` that it is computed from, and a function that builds it; None for an operator that stays.
    """
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
