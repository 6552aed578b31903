"""One case of the benchmark of planning, in this process, which must have been started for it."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from hidet_dist.cost.work import work_of
from hidet_dist.errors import InfeasibleError
from hidet_dist.frontends.pretrained import from_transformers
from hidet_dist.machine import Cluster
from hidet_dist.machine.builtin import builtin
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.phases import Traced
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.traits import traits_of
from hidet_dist.view import GraphView

if TYPE_CHECKING:
    from benchmarks.planning import Case

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"


def megatron_ring_passes(layers: int) -> int:
    """Ring passes of Megatron's plan of a decoder, with the embedding and the head split over the vocabulary."""
    return 2 * (2 * layers + 1) + 1


def roofline_seconds(graph: NormalGraph, cluster: Cluster) -> float:
    """Predict the least time of a graph's products and weights on all devices together."""
    table = RuleTable(DeviceMesh((1,)))
    seconds, nbytes = 0.0, 0
    for op in GraphView(graph).operators:
        if not traits_of(op).is_product:
            continue
        whole = table(op)[1][0]
        rates = cluster.device.flops_per_second
        seconds += whole.operations / rates.get(op.outputs[0].dtype.name, rates["default"])
        nbytes += work_of(op, whole, table.mesh).weight_bytes
    devices = cluster.mesh.size
    return max(seconds, nbytes / cluster.device.memory_bandwidth_bytes_per_second) / devices


def measure(case: Case, has_least: bool, without: Sequence[str]) -> dict[str, Any]:
    """Plan a case without some steps of the search; the result is what the benchmark tells of it."""
    config = AutoConfig.from_pretrained(CONFIGS / case.config / "config.json", **case.changes)
    imported = time.process_time()
    graph = from_transformers(config, batch=case.batch, seq=case.seq, logits=case.logits)
    traced = time.process_time()
    # The time limit is one of the clock, which others on the machine delay.
    unhurried = {"solver_time_limit_seconds": 600, "experts": case.experts}
    mesh = {"mesh_shape": list(case.mesh), "machine": case.machine}
    plan = Traced.of(graph, mesh, unhurried).prepare().plan(without=without).plan
    planned = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    collectives, layers = plan.collectives(), config.num_hidden_layers
    has_experts = any(traits_of(op).routed for op in graph.nodes)
    found = {
        "seconds": round(planned, 2),
        "imports": round(imported, 2),
        "tracing": round(traced - imported, 2),
        "planning": round(planned - traced, 2),
        "peak_rss_bytes": peak,
        "predicted_seconds": plan.makespan_seconds,
        "roofline_seconds": roofline_seconds(normalize(graph), builtin(case.machine, DeviceMesh(case.mesh))),
        "collectives": collectives,
        "exchanges_a_layer": round(sum(collectives.values()) / layers, 2),
        "ring_passes": sum(count * COLLECTIVES[kind].ring_passes for kind, count in collectives.items()),
        "megatron_ring_passes": None if has_experts else megatron_ring_passes(layers),
        "goal_seconds": case.goal_seconds,
        "goal_bytes": case.goal_bytes,
    }
    if has_least:
        weights = sum(tensor.nbytes for tensor in plan.stages[0].weights)
        try:
            Traced.of(graph, mesh, {**unhurried, "mem_budget": 1}).prepare().plan(without=without)
        except InfeasibleError as error:
            found["least_over_even"] = round(error.least_budget * math.prod(case.mesh) / weights, 3)
    return found
