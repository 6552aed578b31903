"""The normal form of graphs, in which they are planned, partitioned and compiled."""

from __future__ import annotations

from hidet.graph import FlowGraph

from hidet_dist.normalize.projections import split_projections
from hidet_dist.normalize.squares import square_powers


class NormalGraph(FlowGraph):
    """A graph in normal form.

    :func:`normalize` brings a traced graph into it. A pass whose result must not be rewritten again, such as a part of
    a normal graph, states by :meth:`of` that its result is in normal form.
    """

    @classmethod
    def of(cls, graph: FlowGraph) -> NormalGraph:
        """Take ``graph`` to be in normal form as it is."""
        return cls(graph.outputs, graph.inputs)


def normalize(graph: FlowGraph) -> NormalGraph:
    """Rewrite a traced graph to its normal form: the same inputs and values, by operators that shard better.

    A graph in normal form is returned as it is. Each call for any other graph makes new operators and tensors where it
    rewrites: whatever belongs together (a view, pins by tensor, a program) must start from one normal graph.
    """
    if isinstance(graph, NormalGraph):
        return graph
    return NormalGraph.of(split_projections(square_powers(graph)))
