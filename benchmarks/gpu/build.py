"""Plans and compiles one case for so many ranks, or writes its weights, in a process of its own.

    python -m benchmarks.gpu.build weights CASE WEIGHTS
    python -m benchmarks.gpu.build build CASE WEIGHTS RANKS ARCH SPACE OUT

OUT is run kernel by kernel; OUT-graph is the same, run as a CUDA graph. The last line is JSON: what was planned.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hidet.graph import FlowGraph
from safetensors.numpy import save_file

from benchmarks.gpu.cases import CASES
from hidet_dist import auto_parallel
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.targets import TARGETS
from hidet_dist.testing.rounding import tolerance
from hidet_dist.testing.shapes import random_weights
from hidet_dist.view import GraphView

SLACK = 1.3  # of an even share of the weights: what a rank may hold of them, so that they are split


def write_weights(name: str, file: str) -> None:
    """Random weights for a case, in a file that appears when it is whole."""
    save_file(random_weights(CASES[name].graph()), f"{file}.part")
    os.rename(f"{file}.part", file)


def as_graph(out: Path, graph: FlowGraph, mesh: dict[str, Any], config: dict[str, Any], plan: Plan) -> None:
    """Build the same program beside it, to be run as a CUDA graph. Its kernels are those in the cache."""
    config = {**config, "cuda": {**config["cuda"], "cuda_graph": True}}
    auto_parallel(graph, mesh, config, out.with_name(f"{out.name}-graph"), plan=plan)


def budget(graph: FlowGraph, ranks: int, arch: str) -> int:
    """Bytes for a rank's share of the weights, beside what a single device would hold of all else."""
    normal = normalize(graph)
    stage = search(normal, builtin(TARGETS["cuda"].machines[arch], DeviceMesh((1,)))).plan.stages[0]
    weights = stage.weight_bytes_per_device
    return int(SLACK * weights / ranks) + max(live_bytes(GraphView(normal), stage)) - weights


def build(name: str, ranks: int, weights: Path, arch: str, target: dict[str, Any], out: Path) -> dict[str, Any]:
    """Build a case, and say what was planned: seconds, and bytes of a rank.

    With several ranks each may hold little more than its share of the weights: a plan that replicates them would say
    nothing of collectives.
    """
    case = CASES[name]
    graph = case.graph()
    config = {**target, "weights": str(weights)}
    planned = graph if case.precision == "float32" else in_precision(graph, case.precision).graph
    if ranks > 1:
        config["mem_budget"] = budget(planned, ranks, arch)
    mesh = {"mesh_shape": [ranks]}
    result = auto_parallel(planned, mesh, config, out)
    as_graph(out, planned, mesh, config, result.plan)
    (stage,) = Manifest.load(out).program().stages
    report = result.plan.stages[0].report
    return {
        "plan_seconds": result.plan_seconds,
        "compile_seconds": result.compile_seconds,
        "predicted_seconds": result.predicted_seconds,
        "kernels": len(stage.kernels),
        "launches": len(stage.launches),
        "collectives": len(stage.communications),
        "planned_bytes": None if report is None else max(report.live_bytes),
        "weight_bytes": stage.weight_bytes,
        "workspace_bytes": sum((stage.workspace_bytes or {}).values()),
        "tolerance": tolerance(graph, case.precision),
    }


def main(do: str, name: str, weights: str, *how: str) -> None:
    if do == "weights":
        write_weights(name, weights)
    else:
        ranks, arch, space, out = how
        target = {"target": "cuda", "arch": arch, "cuda": {"space": int(space), "cublas": True}}
        print(json.dumps(build(name, int(ranks), Path(weights), arch, target, Path(out))))


if __name__ == "__main__":
    main(*sys.argv[1:])
