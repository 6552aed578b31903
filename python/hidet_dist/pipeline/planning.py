"""The search for all that can be planned: one program on the whole mesh, given stages, stages to be searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hidet.graph import FlowGraph

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.pipeline.family import search_pipeline_family
from hidet_dist.pipeline.given import GivenStage, plan_given
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.planner import search_pipeline
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import FamilyMember, SearchOptions, SearchResult, search
from hidet_dist.search.one_graph import formulate_problem
from hidet_dist.search.problem import Problem
from hidet_dist.spec.pipeline import ALL


@dataclass(frozen=True)
class Planning:
    """What is asked of the search, besides the graphs.

    Attributes
    ----------
    cluster: the machine, with the mesh to plan for.
    options: the memory budget, given specs and pins, and limits. If shares are searched, they are those of the mesh's
        first axis, or of each stage's; of stages that are given whole, each may ask for that itself.
    stages: the stages, given whole; the options of a search for stages; or None for one program on the whole mesh.
    micro_batches, outputs: for stages that are given whole, the micro-batches of a call, and the ranks (``all`` or
        ``last``) on which it returns outputs.
    """

    cluster: Cluster
    options: SearchOptions = field(default_factory=SearchOptions)
    stages: PipelineOptions | Sequence[GivenStage] | None = None
    micro_batches: int = 1
    outputs: str = ALL


def find_plans(
    graphs: NormalGraph | Sequence[FamilyMember],
    planning: Planning,
    cost_model: CostModel | None = None,
    rules: RuleTable | None = None,
) -> SearchResult:
    """Find the plan of least predicted time for a graph, or those of several graphs that share weights.

    ``cost_model`` is predicted for the machine when not given. Rules and proofs are shared with the table ``rules``,
    for any mesh.

    Raises
    ------
    ConfigError, SpecError
        When what is asked for does not fit the graphs or the machine, contradicts itself, or is not offered for several
        graphs.
    InfeasibleError
        When no plans fit the memory budget.
    SolverError
        When the solver fails, or there are no plans within the time limit.
    """
    options, stages = planning.options, planning.stages
    if stages is None:
        return search(graphs, planning.cluster, options, cost_model=cost_model, rules=rules)
    if cost_model is not None:
        raise ConfigError("A search for pipelines has the predicted costs: leave out cost_model, or pipeline.")
    of_stages = replace(options, searches_shares=False)
    if not isinstance(graphs, FlowGraph):
        if options.searches_shares:
            raise ConfigError(
                "Shares are not searched for stages of several graphs that share weights: give the shares of the "
                "mesh's axes, or leave the stages out."
            )
        if not isinstance(stages, PipelineOptions):
            raise ConfigError(
                "The stages of several graphs that share weights are given in part, by their ranks and weights: leave "
                "out 'operators' and 'mesh_shape'."
            )
        return search_pipeline_family(graphs, planning.cluster, of_stages, stages, rules)
    if isinstance(stages, PipelineOptions):
        wanted = replace(stages, searches_shares=options.searches_shares)
        # What a search for stages finds on its way are seconds of one stage, not of the objective.
        found = search_pipeline(graphs, planning.cluster, replace(of_stages, on_incumbent=None), wanted, rules=rules)
        plan = found.plan(planning.cluster, wanted)
        return SearchResult((plan,), found.value, found.gap, found.bound_seconds, found.time_limit_reached)
    return plan_given(
        graphs,
        planning.cluster,
        stages,
        of_stages,
        micro_batches=planning.micro_batches,
        results=planning.outputs,
        rules=rules,
    )


def problem_of(graph: NormalGraph, planning: Planning, rules: RuleTable | None = None) -> Problem:
    """Formulate the problem that :func:`find_plans` solves for the given mesh.

    Raises
    ------
    ConfigError
        For stages, which are planned as many problems, and for options that do not fit the graph.
    """
    if planning.stages is not None:
        raise ConfigError("A pipeline is planned as many problems; export a plan without stages.")
    return formulate_problem(graph, planning.cluster, planning.options, rules=rules)
