"""The door into the search: one call for a graph, one for several graphs that share weights.

Which of the searches below answers follows from what is asked: stages that are given whole, stages that are searched,
shares of unequal devices, or one program on the whole mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.pipeline.family import search_pipeline_family
from hidet_dist.pipeline.given import GivenStage, plan_given
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.planner import search_pipeline
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import Family, FamilyMember, SearchOptions, search, search_family, search_shares
from hidet_dist.search.family_shares import search_family_shares
from hidet_dist.search.planner import formulate_problem
from hidet_dist.search.problem import Problem
from hidet_dist.spec import Plan
from hidet_dist.spec.pipeline import ALL


@dataclass(frozen=True)
class Planning:
    """What is asked of the search, besides the graph.

    Attributes
    ----------
    cluster: the machine, with the mesh to plan for.
    options: the memory budget, given specs and pins, and limits.
    stages: the stages, given whole; the options of a search for stages; or None for one program on the whole mesh.
    micro_batches, outputs: for stages that are given whole, the micro-batches of a call, and the ranks (``all`` or
        ``last``) on which it returns outputs.
    searches_shares: whether shares of the mesh's first axis are searched, for unequal devices. Of stages that are
        given whole, each may ask for that itself.
    """

    cluster: Cluster
    options: SearchOptions = field(default_factory=SearchOptions)
    stages: PipelineOptions | Sequence[GivenStage] | None = None
    micro_batches: int = 1
    outputs: str = ALL
    searches_shares: bool = False


def plan_graph(graph: NormalGraph, planning: Planning, rules: RuleTable | None = None) -> Plan:
    """Find the plan of least predicted time for a graph.

    Rules and proofs are shared with the table ``rules``, for any mesh.

    Raises
    ------
    ConfigError, SpecError
        When what is asked for does not fit the graph or the machine, or contradicts itself.
    InfeasibleError
        When no plan fits the memory budget.
    SolverError
        When the solver fails, or there is no plan within the time limit.
    """
    cluster, options, stages = planning.cluster, planning.options, planning.stages
    if isinstance(stages, PipelineOptions):
        wanted = replace(stages, searches_shares=planning.searches_shares)
        # What a search for stages finds on its way are seconds of one stage, not of the objective.
        found = search_pipeline(graph, cluster, replace(options, on_incumbent=None), wanted, rules=rules)
        return found.plan(cluster, wanted)
    if stages is not None:
        return plan_given(
            graph,
            cluster,
            stages,
            options,
            micro_batches=planning.micro_batches,
            results=planning.outputs,
            rules=rules,
        )
    if planning.searches_shares:
        return search_shares(graph, cluster, options, rules=rules)
    return search(graph, cluster, options, rules=rules)


def plan_family(
    members: Sequence[FamilyMember],
    planning: Planning,
    cost_model: CostModel | None = None,
    rules: RuleTable | None = None,
) -> Family:
    """Find the layout of shared weights, and a plan for each graph, of least weighted sum of predicted times.

    Names, pins and specs are those of the members. ``cost_model`` is predicted for the machine when not given.

    Raises
    ------
    ConfigError
        When what is asked for does not fit the graphs, is not offered for families, or weights of one name differ.
    InfeasibleError
        When no plans fit the memory budget together.
    SolverError
        When the solver fails, or there are no plans within the time limit.
    """
    if planning.searches_shares and planning.stages is not None:
        raise ConfigError(
            "Shares are not searched for stages of several graphs that share weights: give the shares of the mesh's "
            "axes, or leave the stages out."
        )
    if planning.searches_shares:
        if cost_model is not None:
            raise ConfigError("A search for shares has the predicted costs: leave out cost_model, or give the shares.")
        return search_family_shares(members, planning.cluster, planning.options, rules)
    if planning.stages is None:
        return search_family(members, planning.cluster, planning.options, cost_model, rules)
    if not isinstance(planning.stages, PipelineOptions):
        raise ConfigError(
            "The stages of several graphs that share weights are given in part, by their ranks and weights: leave out "
            "'operators' and 'mesh_shape'."
        )
    if cost_model is not None:
        raise ConfigError("A search for pipelines has the predicted costs: leave out cost_model, or pipeline.")
    return search_pipeline_family(members, planning.cluster, planning.options, planning.stages, rules)


def problem_of(graph: NormalGraph, planning: Planning, rules: RuleTable | None = None) -> Problem:
    """Formulate the problem that :func:`plan_graph` solves for the given mesh.

    Raises
    ------
    ConfigError
        For stages, which are planned as many problems, and for options that do not fit the graph.
    """
    if planning.stages is not None:
        raise ConfigError("A pipeline is planned as many problems; export a plan without stages.")
    return formulate_problem(graph, planning.cluster, planning.options, rules=rules)
