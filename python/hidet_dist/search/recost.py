"""Plans that were changed by hand: conversions written anew, and costs predicted anew."""

from __future__ import annotations

from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import InfeasibleError, PlanError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.partitioning.proof import prove_specs
from hidet_dist.search.labels import label_plan
from hidet_dist.search.memory import live_bytes
from hidet_dist.search.planner import memory_budget
from hidet_dist.search.solution import lay_out
from hidet_dist.spec import Plan


def recost(plan: Plan, graph: NormalGraph, cluster: Cluster, cost_model: CostModel | None = None) -> Plan:
    """The plan with the conversions that its specs need now, and with every cost predicted anew.

    Raises
    ------
    PlanError
        When the plan is of another graph or mesh, or a spec is not one that its operator or tensor can have.
    """
    stage = plan.stage
    proven = prove_specs(stage, graph)
    view = proven.view
    if stage.mesh != cluster.mesh:
        raise PlanError(f"The plan is for the mesh {stage.mesh}; the machine has {cluster.mesh}.")
    model = PredictedCost(cluster) if cost_model is None else cost_model
    stored = {tensor.name: tensor.spec for tensor in (*stage.weights, *stage.inputs)}
    outputs = [tensor.spec for tensor in stage.outputs]
    names = {t.label: view.tensors[t.name] for t in (*stage.weights, *stage.inputs, *stage.outputs) if t.label}
    fused = model.fused(view)
    laid_out = lay_out(view, stage.mesh, model, proven.choices, stored, outputs, proven.notes, fused)
    if cost_model is None and cluster.device.overlaps_communication:
        (new,) = laid_out.stages
        result = overlapped(PlannedTasks(view, cluster, fused), new, cluster.device.memory_bytes)
        laid_out = Plan((result.plan(new),))
    return label_plan(view, laid_out, names)


def within_budget(plan: Plan, graph: NormalGraph, cluster: Cluster, mem_budget: int | None) -> Plan:
    """The plan, if it holds no more than ``mem_budget`` bytes a device; the device's memory by default.

    Raises
    ------
    InfeasibleError
        When it holds more.
    """
    stage = plan.stage
    budget = memory_budget(cluster, mem_budget)
    most = max(live_bytes(prove_specs(stage, graph).view, stage))
    if most > budget:
        raise InfeasibleError(f"The given plan holds {most} bytes a device, and mem_budget is {budget}.", most)
    return plan
