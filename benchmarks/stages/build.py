"""Plans and compiles one case in stages, in a process of its own.

    python -m benchmarks.stages.build CASE MESHES WEIGHTS MACHINE OUT INPUTS [CUTS [FRACTION PERIOD_SECONDS]]

``MESHES`` has the number of ranks of each stage, such as ``1,1``. With the ``CUTS`` ``even``, the graph is cut into as
many runs of operators whose predicted times are as even as can be; with ``searched``, the cuts are searched; with
``shares``, the shares of the ranks of one stage. The last rank runs for a ``FRACTION`` of each period, by default for
all of it. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import hidet
import numpy as np

import hidet_dist  # noqa: F401  adds auto_parallel to hidet.distributed
from benchmarks.serving.cases import CASES
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link, builtin, unequal_cluster
from hidet_dist.machine.builtin import MACHINES
from hidet_dist.machine.file import load_machine
from hidet_dist.machine.kernels import KernelCost
from hidet_dist.spec import DeviceMesh


def even_cuts(seconds: list[float], count: int) -> list[int]:
    """Cut operators of such seconds into ``count`` runs of nearly the same time; return the end of each run."""
    done = np.cumsum(seconds)
    ends = [int(np.abs(done - done[-1] * (number + 1) / count).argmin()) + 1 for number in range(count)]
    return [*ends[:-1], len(seconds)]


def slowed(device: Device, fraction: float) -> Device:
    """Describe a device that has a fraction of another one's speed."""
    return replace(
        device,
        name=f"{device.name}, {fraction:.0%}",
        flops_per_second={dtype: rate * fraction for dtype, rate in device.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=device.memory_bandwidth_bytes_per_second * fraction,
        launch_seconds=device.launch_seconds / fraction,
        kernels={
            name: KernelCost(
                cost.seconds_per_operation / fraction,
                cost.seconds_per_byte / fraction,
                cost.seconds_per_call / fraction,
            )
            for name, cost in device.kernels.items()
        },
    )


def slowed_link(link: Link, fraction: float, period_seconds: float) -> Link:
    """Describe the link to a rank that runs for a fraction of each period: it copies as slowly as it computes.

    Who needs it while it is stopped, ``1 - fraction`` of the time, waits for half of the rest of the period on average.
    """
    waiting = (1 - fraction) ** 2 * period_seconds / 2
    return Link(link.latency_seconds + waiting, link.bandwidth_bytes_per_second * fraction)


def cluster_of(machine: str, sizes: list[int], fraction: float, period_seconds: float) -> Cluster:
    """Describe the ranks of all stages as a machine; the last one runs for a fraction of each period."""
    mesh = DeviceMesh((sum(sizes),))
    whole = builtin(machine, mesh) if machine in MACHINES else load_machine(machine, mesh)
    if fraction == 1:
        return whole
    groups = [DeviceGroup(sum(sizes) - 1, whole.device), DeviceGroup(1, slowed(whole.device, fraction))]
    return unequal_cluster(whole.mesh, [slowed_link(link, fraction, period_seconds) for link in whole.links], groups)


def main(
    name: str,
    meshes: str,
    weights: str,
    machine: str,
    out: str,
    inputs: str,
    cuts: str = "even",
    fraction: str = "1",
    period: str = "0",
) -> None:
    case, sizes = CASES[name], [int(size) for size in meshes.split(",")]
    graph = case.graph(Path(weights))
    np.savez(inputs, *case.inputs())
    options: dict[str, Any] = {"recompile": True}
    if case.named_weights:
        options["weights"] = weights
    cluster = cluster_of(machine, sizes, float(fraction), float(period))
    config: dict[str, Any] = {"mesh_shape": [sum(sizes)], "machine": cluster}
    if cuts == "shares":
        config["shares"] = "auto"
    if len(sizes) > 1:
        options["outputs"] = "last"
    if len(sizes) > 1 and cuts == "searched":
        ranks = [list(ends) for ends in pairwise(accumulate(sizes, initial=0))]
        options |= {"objective": "throughput", "micro_batches": 1, "stages": [{"ranks": ends} for ends in ranks]}
    elif len(sizes) > 1:
        whole = hidet.distributed.make_plan(graph, {"mesh_shape": [1], "machine": machine}, {})
        ends = even_cuts([op.compute_seconds for op in whole.stages[0].operators], len(sizes))
        options["stages"] = [
            {"operators": [start, end], "mesh_shape": [size]}
            for start, end, size in zip([0, *ends[:-1]], ends, sizes, strict=True)
        ]
    result = hidet.distributed.auto_parallel(graph, config, options, out)
    plan = result.plan
    print(
        json.dumps(
            {
                "interval_seconds": plan.interval_seconds,
                "call_seconds": plan.makespan_seconds,
                "stage_seconds": [stage.makespan_seconds for stage in plan.stages],
                "stage_operators": [len(stage.operators) for stage in plan.stages],
                "boundary_bytes": [one.nbytes for one in plan.pipeline.boundaries] if plan.pipeline else [],
                "meshes": [str(stage.mesh) for stage in plan.stages],
                "compile_seconds": result.compile_seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
