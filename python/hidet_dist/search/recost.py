"""Costs of a given plan: derive the conversions of edited specs, and predict all costs anew."""

from __future__ import annotations

from dataclasses import replace

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import InfeasibleError, PlanError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.partitioning.proof import ProvenStage
from hidet_dist.search.formulation.devices import held_by_fullest, memory_budget
from hidet_dist.search.formulation.labels import label_stage
from hidet_dist.search.formulation.solution import StageCosts, lay_out
from hidet_dist.spec import StagePlan
from hidet_dist.view import GraphView


@quick_hidet()
def recost_stage(proven: ProvenStage, cluster: Cluster, cost_model: CostModel | None = None) -> ProvenStage:
    """Derive the conversions that the specs of a stage need, and predict every cost anew.

    Parameters
    ----------
    proven: ProvenStage
        The stage, whose specs are proven (:func:`hidet_dist.partitioning.proof.prove_specs`).
    cluster: Cluster
        The machine, with the stage's mesh.
    cost_model: CostModel, optional
        The costs of its parts; predicted for the machine by default.

    Raises
    ------
    PlanError
        When the stage is for another mesh.
    """
    view, stage = proven.view, proven.stage
    if stage.mesh != cluster.mesh:
        raise PlanError(f"The plan is for the mesh {stage.mesh}; the machine has {cluster.mesh}.")
    model = PredictedCost(cluster) if cost_model is None else cost_model
    stored = {tensor.name: tensor.spec for tensor in stage.stored}
    outputs = [tensor.spec for tensor in stage.outputs]
    names = {t.label: view.tensors[t.name] for t in (*stage.stored, *stage.outputs) if t.label}
    fused = model.fused(view)
    costs = StageCosts(view, stage.mesh, model, fused)
    laid_out = lay_out(costs, proven.choices, stored, outputs, proven.notes)
    if cost_model is None and cluster.device.overlaps_communication:
        result = overlapped(PlannedTasks(view, cluster, fused), laid_out, cluster.device.memory_bytes)
        laid_out = result.plan(laid_out)
    return replace(proven, stage=label_stage(view, laid_out, names))


def check_budget(view: GraphView, stage: StagePlan, cluster: Cluster, mem_budget: int | None) -> None:
    """Refuse a stage that holds more than ``mem_budget`` bytes a device; by default, than the memory of each.

    Raises
    ------
    InfeasibleError
        When it holds more.
    """
    held = held_by_fullest(view, stage, cluster, mem_budget)
    if held.excess > 0:
        raise InfeasibleError(
            f"The given plan holds {held}, and mem_budget is {held.device.nbytes}.",
            memory_budget(cluster, mem_budget) + held.excess,
        )
