"""The normal form of graphs, in which they are planned, partitioned and compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hidet.graph import FlowGraph

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_DIMS
from hidet_dist.normalize.empties import drop_empty_parts
from hidet_dist.normalize.projections import split_projections
from hidet_dist.normalize.squares import square_powers
from hidet_dist.normalize.views import define_views


class NormalGraph(FlowGraph):
    """A graph in normal form.

    :func:`normalize` makes it from a traced graph. A pass whose result must not be rewritten again, such as a part of a
    normal graph, declares its result normal by :meth:`of`.

    Attributes
    ----------
    symbols: the symbolic dims whose sizes are known from outside the graph. A part of a graph has those of the whole
        graph; its inputs may have dims that are computed from them. Empty for a graph whose inputs have all sizes.
    """

    symbols: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: FlowGraph, symbols: Sequence[str] = ()) -> NormalGraph:
        """Declare ``graph`` to be in normal form, without rewriting it; ``symbols`` are those known from outside."""
        normal = cls(graph.outputs, graph.inputs)
        normal.symbols = tuple(symbols)
        return normal


@quick_hidet()
def normalize(graph: FlowGraph) -> NormalGraph:
    """Rewrite a traced graph to its normal form: the same inputs and values, by operators that shard better.

    A graph in normal form is returned unchanged. For any other graph, each call makes new operators and tensors where
    it rewrites, so views, pins by tensor and programs that belong together must start from the same normal graph.

    Raises
    ------
    ConfigError
        When a tensor has more than :data:`hidet_dist.limits.MOST_DIMS` dims, or the graph has no outputs.
    """
    if isinstance(graph, NormalGraph):
        return graph
    if not graph.outputs:
        raise ConfigError("The graph has no outputs, and gives no state a new value: there is nothing to compute.")
    graph.update_nodes()  # the caller may have changed the graph
    for x in itertools.chain(graph.inputs or [], *(node.outputs for node in graph.nodes)):
        if len(x.shape) > MOST_DIMS:
            raise ConfigError(f"A tensor of the graph has {len(x.shape)} dims; at most {MOST_DIMS} are supported.")
    return NormalGraph.of(split_projections(square_powers(define_views(drop_empty_parts(graph)))))
