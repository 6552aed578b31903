"""All rewrites of a graph before it is planned."""

from __future__ import annotations

import weakref

from hidet.graph import FlowGraph

from hidet_dist.normalize.projections import split_projections
from hidet_dist.normalize.squares import square_powers

_normal: weakref.WeakSet[FlowGraph] = weakref.WeakSet()
_forms: weakref.WeakKeyDictionary[FlowGraph, FlowGraph] = weakref.WeakKeyDictionary()


def normalize(graph: FlowGraph) -> FlowGraph:
    """The graph in the form that is planned, with the inputs of ``graph``; ``graph`` itself where nothing changes.

    The same graph gives the same object every time, so that tensors found in one view of it are those of another. A
    normalized graph is its own normal form.
    """
    if graph in _normal:
        return graph
    if graph not in _forms:
        found = split_projections(square_powers(graph))
        _normal.add(found)
        if found is graph:
            return graph
        _forms[graph] = found
    return _forms[graph]


def as_normal(graph: FlowGraph) -> FlowGraph:
    """``graph`` itself, taken to be in normal form: a twin of a normalized graph, operator by operator."""
    _normal.add(graph)
    return graph
