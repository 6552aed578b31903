"""A graph in normal form and a plan for it: what can be derived from the two alone, without a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hidet.graph import FlowGraph

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import PlanError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.normalize.expert_layers import has_joined_layers, join_expert_layers
from hidet_dist.partitioning import stage_graphs
from hidet_dist.partitioning.proof import ProvenStage, prove, prove_specs
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.recost import recost_stage
from hidet_dist.spec import Plan


@dataclass(frozen=True)
class StagedGraph:
    """A graph cut into the stages of a plan.

    Attributes
    ----------
    graph: the graph in normal form.
    plan: the plan.
    rules: the rules of the graph's operators, and their proofs, which are shared by all stages.
    """

    graph: NormalGraph
    plan: Plan
    rules: RuleTable

    @classmethod
    def of(cls, graph: FlowGraph, plan: Plan) -> StagedGraph:
        """Normalize a graph for a plan. Raises PlanError for anything but a Plan with stages that belong together."""
        if not isinstance(plan, Plan):
            raise PlanError(f"This call takes a Plan (see Plan.load); got a {type(plan).__name__}.")
        plan.check_pipeline()
        normal = normalize(graph)
        if has_joined_layers(plan):
            normal = join_expert_layers(normal)
        return cls(normal, plan, RuleTable(plan.stages[0].mesh))

    @cached_property
    def graphs(self) -> tuple[NormalGraph, ...]:
        """The graph of each stage. Raises PlanError when the plan is of another graph."""
        return tuple(stage_graphs(self.plan, self.graph, self.rules))

    def prove(self, number: int) -> ProvenStage:
        """Prove that a stage computes its graph. Raises PlanError when it is not proven, or there is no such stage."""
        if not 0 <= number < len(self.plan.stages):
            raise PlanError(f"The plan has the stages 0 to {len(self.plan.stages) - 1}; there is no stage {number}.")
        return prove(self.plan.stages[number], self.graphs[number], self.rules)

    def prove_all(self) -> tuple[ProvenStage, ...]:
        """Prove all stages. Raises PlanError when one is not proven."""
        return tuple(map(self.prove, range(len(self.plan.stages))))

    def recost(self, clusters: Sequence[Cluster], cost_model: CostModel | None = None) -> tuple[ProvenStage, ...]:
        """Prove the specs of each stage, and derive its conversions and all costs for its machine.

        Raises
        ------
        PlanError
            When a spec is not proven, or a machine has another mesh than its stage.
        """
        stages = zip(self.plan.stages, self.graphs, clusters, strict=True)
        return tuple(
            recost_stage(prove_specs(stage, graph, self.rules), cluster, cost_model) for stage, graph, cluster in stages
        )
