"""Plans and compiles one case in stages, in a process of its own.

    python build.py CASE MESHES WEIGHTS MACHINE OUT INPUTS

``MESHES`` has the number of ranks of each stage, such as ``1,1``. The graph is cut into as many runs of operators whose
predicted times are as even as can be. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hidet
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from cases import CASES

import hidet_dist  # noqa: F401  adds auto_parallel to hidet.distributed


def even_cuts(seconds: list[float], count: int) -> list[int]:
    """Where to cut operators of such seconds into ``count`` runs of nearly the same time: the end of each run."""
    done = np.cumsum(seconds)
    ends = [int(np.abs(done - done[-1] * (number + 1) / count).argmin()) + 1 for number in range(count)]
    return [*ends[:-1], len(seconds)]


def main(name: str, meshes: str, weights: str, machine: str, out: str, inputs: str) -> None:
    case, sizes = CASES[name], [int(size) for size in meshes.split(",")]
    graph = case.graph(Path(weights))
    np.savez(inputs, *case.inputs())
    options = {"weights": weights, "recompile": True} if case.named_weights else {"recompile": True}
    config = {"mesh_shape": [sum(sizes)], "machine": machine}
    if len(sizes) > 1:
        whole = hidet.distributed.make_plan(graph, {"mesh_shape": [1], "machine": "cpu"}, {})
        ends = even_cuts([op.compute_seconds for op in whole.stages[0].operators], len(sizes))
        starts = [0, *ends[:-1]]
        options["stages"] = [
            {"operators": [start, end], "mesh_shape": [size]}
            for start, end, size in zip(starts, ends, sizes, strict=True)
        ]
        options["outputs"] = "last"
    result = hidet.distributed.auto_parallel(graph, config, options, out)
    plan = result.plan
    print(
        json.dumps(
            {
                "interval_seconds": plan.interval_seconds,
                "call_seconds": plan.makespan_seconds,
                "stage_seconds": [stage.makespan_seconds for stage in plan.stages],
                "boundary_bytes": [one.nbytes for one in plan.pipeline.boundaries] if plan.pipeline else [],
                "compile_seconds": result.compile_seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
