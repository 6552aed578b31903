"""Plan models of transformers, from the start of a process to the plan; the last line is JSON.

    python -m benchmarks.planning [--cases NAME ...] [--least-memory]

Each case is a process of its own: it imports what it needs, traces the model without weights, and plans it. Time is CPU
time, so that other work on the machine does not matter. Of each:

seconds          CPU seconds from the start of the process to the plan; ``imports``, ``tracing`` and ``planning`` are
                 its parts.
peak_rss_bytes   of the process.
predicted_seconds, roofline_seconds
                 Of the plan, and of its products and weights alone: the operations of products over the peak of all
                 devices, or the bytes of weights that are read over all bandwidths, whichever is longer. Of experts,
                 those count that are chosen.
collectives      of the plan, by kind; ``exchanges_a_layer``: their number over that of the layers.
ring_passes      of the plan's collectives: 2 of an all-reduce, 1 of each other kind. ``megatron_ring_passes``, for
                 models without experts, are those of Megatron's plan: two all-reduces a layer and one for the
                 embedding, and a gather of the logits.
least_over_even  with ``--least-memory``: the least budget for which there is a plan, over an even share of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hidet_dist.api import make_plan
from hidet_dist.cost.work import work_of
from hidet_dist.errors import InfeasibleError
from hidet_dist.frontends.pretrained import from_transformers
from hidet_dist.machine import Cluster
from hidet_dist.machine.builtin import builtin
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.traits import traits_of
from hidet_dist.view import GraphView

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model by its configuration, and what differs from it, the mesh and the machine, and the goals."""

    config: str
    mesh: tuple[int, ...]
    machine: str
    goal_seconds: float
    changes: dict[str, int] = field(default_factory=dict)
    batch: int = 8
    seq: int = 512
    logits: str = "last"
    goal_bytes: int = 2 * GIB


LLAMA3_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
CASES: dict[str, Case] = {
    "llama3_8b_8": Case("llama-3-8b", (8,), "dgx-h100", 8.0, logits="all"),
    "llama3_8b_8_cpu": Case("llama-3-8b", (8,), "cpu", 8.0, batch=1, seq=128, logits="all"),
    "llama3_8b_2x4": Case("llama-3-8b", (2, 4), "dgx-h100", 10.0, logits="all"),
    "llama3_70b_2x8": Case("llama-3-8b", (2, 8), "dgx-h100-pod", 20.0, LLAMA3_70B, logits="all"),
    "llama31_405b_2x8": Case("llama-3.1-405b", (2, 8), "dgx-h100-pod", 25.0, batch=16, seq=2048),
    "llama31_405b_4x8": Case("llama-3.1-405b", (4, 8), "dgx-h100-pod", 30.0, batch=16, seq=2048),
    "llama31_405b_16x8": Case("llama-3.1-405b", (16, 8), "dgx-h100-pod", 40.0, batch=16, seq=2048),
    "mixtral_8": Case("mixtral-8x7b", (8,), "dgx-h100", 20.0, batch=16, seq=1024),
    "qwen3_30b_8": Case("qwen3-30b-a3b", (8,), "dgx-h100", 20.0, seq=1024),
    "qwen3_235b_2x8": Case("qwen3-235b-a22b", (2, 8), "dgx-h100-pod", 30.0, batch=16, seq=1024),
    "qwen3_235b_4x8": Case("qwen3-235b-a22b", (4, 8), "dgx-h100-pod", 30.0, batch=32),
    "deepseek_v3_2x8": Case("deepseek-v3", (2, 8), "hgx-h200-pod", 40.0, batch=16, seq=1024),
    "llama4_maverick_2x8": Case("llama-4-maverick", (2, 8), "hgx-h200-pod", 40.0, batch=16, seq=1024),
    "gpt_oss_120b_2x8": Case("gpt-oss-120b", (2, 8), "dgx-h100-pod", 30.0, batch=16, seq=1024),
}


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


def measure(name: str, has_least: bool) -> dict[str, Any]:
    """Plan one case in this process, which must have been started for it."""
    case = CASES[name]
    config = AutoConfig.from_pretrained(CONFIGS / case.config / "config.json", **case.changes)
    imported = time.process_time()
    graph = from_transformers(config, batch=case.batch, seq=case.seq, logits=case.logits)
    traced = time.process_time()
    unhurried = {"solver_time_limit_seconds": 600}  # of the clock, which others on the machine delay
    mesh = {"mesh_shape": list(case.mesh), "machine": case.machine}
    plan = make_plan(graph, mesh, unhurried)
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
            make_plan(graph, mesh, {**unhurried, "mem_budget": 1})
        except InfeasibleError as error:
            found["least_over_even"] = round(error.least_budget * math.prod(case.mesh) / weights, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--least-memory", action="store_true", help="search for the least budget of each, too")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.least_memory)))
        return
    results: dict[str, Any] = {}
    for name in given.cases:
        command = [sys.executable, "-m", "benchmarks.planning", "--one", name, *["--least-memory"] * given.least_memory]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        own = results[name]
        print(
            f"{name}: {own['seconds']} CPU s ({own['imports']} + {own['tracing']} + {own['planning']}), "
            f"{own['peak_rss_bytes'] / GIB:.2f} GiB, {own['predicted_seconds'] * 1e3:.1f} ms (roofline "
            f"{own['roofline_seconds'] * 1e3:.1f}), {own['collectives']}",
            file=sys.stderr,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
