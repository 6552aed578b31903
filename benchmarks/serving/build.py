"""Plans and compiles one case for so many ranks, in a process of its own: its memory and its failures are its own.

    python -m benchmarks.serving.build CASE RANKS PRECISION WEIGHTS MACHINE OUT [VARIANT=MACHINE ...]

The plan is the best for MACHINE; PRECISION is that of stored weights, or float32. The last line is JSON: what it took,
and the time that is predicted for each VARIANT, which runs the plan on a machine of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hidet

import hidet_dist  # noqa: F401  adds auto_parallel to hidet.distributed
from benchmarks.serving.cases import CASES
from hidet_dist.cost.work import kernel_class
from hidet_dist.machine import load_machine
from hidet_dist.normalize import normalize
from hidet_dist.spec import Plan
from hidet_dist.view import GraphView


def seconds_of_parts(plan: Plan, view: GraphView) -> dict[str, float]:
    """The predicted seconds of each class of kernels, and of communication."""
    parts: dict[str, float] = {}
    for op, own in zip(view.operators, plan.stages[0].operators, strict=True):
        kernel = kernel_class(op)
        parts[kernel] = parts.get(kernel, 0.0) + own.compute_seconds
    return {**parts, "communication": max(0.0, plan.seconds - sum(parts.values()))}


def main(name: str, ranks: str, precision: str, weights: str, machine: str, out: str, *variants: str) -> None:
    case = CASES[name]
    of_weights = {"files": weights} if case.named_weights else {}
    if precision != "float32":
        of_weights["precision"] = precision
    options = {"weights": of_weights} if of_weights else {}
    graph = case.graph(Path(weights))
    normal = normalize(graph)
    result = hidet.distributed.auto_parallel(
        graph, {"mesh_shape": [int(ranks)], "machine": machine}, {**options, "recompile": True}, out
    )
    predicted, parts = {}, {}
    for variant in variants:
        title, _, file = variant.partition("=")
        plan = hidet.distributed.recost(result.plan, normal, load_machine(file, result.plan.stages[0].mesh))
        predicted[title], parts[title] = plan.seconds, seconds_of_parts(plan, GraphView(normal))
    print(
        json.dumps(
            {
                "plan_seconds": result.plan_seconds,
                "compile_seconds": result.compile_seconds,
                "predicted_seconds": predicted,
                "predicted_parts": parts,
                "collectives": result.plan.collectives(),
                "weight_bytes_per_rank": result.weight_bytes_per_rank[0],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
