"""The search: one call for one graph, or for several that share weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hidet.graph import FlowGraph

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.cost.model import CostModel
from hidet_dist.frugal import collector_paused
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.rules.rule import OfferedParts, RuleTable
from hidet_dist.search import tuning
from hidet_dist.search.family import search_members
from hidet_dist.search.formulation.formulate import Allow
from hidet_dist.search.limits import Limits, warn_of_limit
from hidet_dist.search.meshes import best_search
from hidet_dist.search.one_graph import search_graph
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.refine import refine
from hidet_dist.search.request import FamilyMember, SearchRequest
from hidet_dist.search.result import SearchResult
from hidet_dist.search.shares import best_of_shares
from hidet_dist.symbolic.planning import planning_view


@quick_hidet()
def search(
    graphs: NormalGraph | Sequence[FamilyMember],
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    allow: Allow | None = None,
    cost_model: CostModel | None = None,
    rules: RuleTable | None = None,
    offered: OfferedParts | None = None,
    limits: Limits | None = None,
    **changes: Any,
) -> SearchResult:
    """Find the plan of least predicted time for a graph, or those of several graphs that share weights and states.

    Parameters
    ----------
    graphs: NormalGraph, or sequence of FamilyMember
        The graph in normal form (:func:`hidet_dist.normalize.normalize`), before ``hidet.graph.optimize``. Or several,
        of which the weighted sum of the predicted times is minimized; each has its own names, pins and specs.
    cluster: Cluster
        The machine, with the mesh to plan for.
    options: SearchOptions, optional
        The memory budget, given specs and pins, and limits.
    allow: callable, optional
        Whether a spec may be chosen for an operator of a graph; the mesh is the given one then. An operator for which
        nothing is allowed keeps all its choices.
    cost_model: CostModel, optional
        The cost of the parts of a plan, on the given mesh; predicted for the cluster when not given.
    rules: RuleTable, optional
        A table, for any mesh, with which rules and proofs are shared.
    offered: OfferedParts, optional
        The parts in which axes of the given mesh may split, where they are not those that suit the graphs
        (:func:`hidet_dist.search.formulation.parts.offered_parts`).
    limits: Limits, optional
        What is left to a search of which this one is a part, instead of the limits of the options. There is no warning
        then.
    changes:
        Fields of the options, by name, that differ from ``options``: ``search(graph, cluster, mem_budget=10**9)``.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget; it states the least budget that would do.
    ConfigError, SpecError
        When specs or pins do not fit a graph, or contradict each other.
    SolverError
        When the solver fails, or no plan was found within the time limit or the memory limit.

    Warns
    -----
    SearchLimitWarning
        When the time limit was reached, and the plan is the best one until then.
    """
    options = SearchOptions.of(options, changes)
    own = options.limits() if limits is None else limits.part(1.0)
    request = SearchRequest(graphs, cluster, options, rules, offered, allow, cost_model)
    with collector_paused():  # by all parts: it looks through what was made each time that it goes on
        result = best_of_shares(request, own, _search_on) if options.searches_shares else _search_on(request, own)
        result = result.reported(own) if options.report else replace(result, write_report=None)
    if limits is None:
        warn_of_limit(own, result.gap)
    return result


def _search_on(request: SearchRequest, limits: Limits) -> SearchResult:
    """Search for the given shares of the mesh, and for a finer mesh where that may have a better plan."""
    if not isinstance(request.graphs, FlowGraph):  # the view refuses one that is not in normal form
        return search_members(request.graphs, request, limits)
    options, cluster = request.options, request.cluster
    view = planning_view(request.graphs, options.symbols, cluster.mesh)
    # What is given for the mesh does not fit another one.
    free = options.mode == "search" and not options.pins and not options.symbols
    free &= request.allow is None and request.cost_model is None and request.offered is None
    finer = refine(view, cluster, request.rules) if options.refine_mesh and free else None
    if finer is None:
        return search_graph(view, request, limits)
    inputs, outputs = (finer.translated_all(specs) for specs in (options.input_specs, options.output_specs))
    translated = replace(
        request, cluster=finer.cluster, options=replace(options, input_specs=inputs, output_specs=outputs)
    )
    # Within the gap the given mesh wins: the user knows its axes.
    best = best_search(
        [
            (tuning.GIVEN_MESH_FRACTION, lambda part: search_graph(view, request, part)),
            (1.0, lambda part: search_graph(view, translated, part, insists=False)),
        ],
        limits,
        options.solver_gap,
    )
    return replace(best, time_limit_reached=limits.time_reached)
