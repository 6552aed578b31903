"""Rewriting of graphs in which independent operators become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.rewriting import copy_operator, longest_paths

Make = Callable[[Sequence[Operator], Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]]
"""Makes the operator of a group, given its operators and their inputs; returns the outputs of each."""


_MOST = 8  # operators that become one: a kernel has the code and the parameters of each


def in_parts(groups: Iterable[Sequence[Operator]]) -> list[Sequence[Operator]]:
    """Cut groups that are too large for one kernel, and leave out single operators."""
    parts = [group[at : at + _MOST] for group in groups for at in range(0, len(group), _MOST)]
    return [part for part in parts if len(part) > 1]


def depths(
    graph: FlowGraph, earlier: Mapping[Operator, Sequence[Operator]] = MappingProxyType({})
) -> dict[Operator, int]:
    """Map each operator to the number of operators on the longest path to it, those apart that rename memory.

    Of those that are left, operators of equal depth do not depend on one another, and no cycle comes about where some
    of them become one.

    Parameters
    ----------
    graph: FlowGraph
        The graph.
    earlier: mapping, optional
        For some operators, those that must run before them although they make nothing that these read.
    """
    before = {op: [*(x.op for x in op.inputs if x.op is not None), *earlier.get(op, ())] for op in graph.nodes}
    return longest_paths(before, {op: int(not op.task.share_map) for op in graph.nodes})


def join(
    graph: FlowGraph, groups: Sequence[Sequence[Operator]], depth: Mapping[Operator, int], make: Make
) -> FlowGraph:
    """Replace groups of operators of equal depth, none of which only renames.

    Returns ``graph`` itself if there are no groups.
    """
    if not groups:
        return graph
    group_of = {op: group for group in groups for op in group}
    new: dict[Tensor, Tensor] = {}
    done: set[Operator] = set()
    for op in sorted(graph.nodes, key=lambda one: depth[one]):
        if op in done:
            continue
        group = group_of.get(op)
        if group is not None:
            made = make(group, [[new.get(x, x) for x in one.inputs] for one in group])
            for one, outputs in zip(group, made, strict=True):
                new.update(zip(one.outputs, outputs, strict=True))
            done.update(group)
        elif any(x in new for x in op.inputs):
            new.update(zip(op.outputs, copy_operator(op, [new.get(x, x) for x in op.inputs]), strict=True))
    result = FlowGraph([new.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result
