"""Pipelines planned without weights, and other ways to cut the same graph for the same machine under the same costs.

``seconds`` is from the traced graph to the plan, ``gap`` the relative distance to the proven bound, ``peak_rss_bytes``
that of the process that traced and planned. ``predicted_seconds`` is the objective's value; ratios are ours over theirs
(null where theirs does not fit the memory):

alpa        Stages by Alpa's dynamic program for inference (Zheng et al., OSDI 2022, section 5, without the backward
            pass): layers are put into uniform clusters, and the slowest stage times the number of stages is minimised
            over runs of clusters and slices of 1, 2, 4, ... devices of a node or of whole nodes, without the memory
            that stages take or what is sent between them. Its stages are then planned and costed as ours are.
even        The best of the splits into 2, 4, 8, ... stages of equal devices and equal layers, each planned as ours.
one_stage   The best plan for the whole machine.
tensor      The best one-stage plan that splits matrices as Megatron does, over the last mesh axis.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hidet
import numpy as np
from hidet import ops
from hidet.graph import FlowGraph
from rich.console import Console
from rich.table import Table

from benchmarks.search import GPT_LAYER, LLAMA_LAYER, experts
from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link, builtin, unequal_cluster
from hidet_dist.machine.slices import MeshSlice, slices_at, sub_cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.pipeline import PipelineOptions, PipelineResult, search_pipeline
from hidet_dist.pipeline.constraints import GraphOptions, StageConstraint
from hidet_dist.pipeline.tables import StageBounds
from hidet_dist.pipeline.units import find_units
from hidet_dist.search import search
from hidet_dist.search.limits import Limits
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.testing.sizes import GPTConfig
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

GPT3_39B = GPTConfig(layers=48, hidden=8192, heads=64, vocabulary=51200, batch=8, sequence=1024)
"""GPT-39B of Alpa's table 4; a batch of inference."""
CLUSTERS = 16  # uniform clusters of layers that Alpa's program cuts between
UNLIMITED = 2**62
TIME_LIMIT_SECONDS = 600.0  # of one search: what others get must not depend on the machine's speed


def _pod(machine: str, *shape: int) -> Cluster:
    return builtin(machine, DeviceMesh(shape, ("node", "gpu")))


def _unequal(first: str, second: str, gpus: int) -> Cluster:
    """Two nodes of different machines, over the network of the slower one."""
    pods = [_pod(name, 2, gpus) for name in (first, second)]
    groups = [DeviceGroup(1, pod.device, pod.links) for pod in pods]
    network = Link(
        max(pod.links[0].latency_seconds for pod in pods),
        min(pod.links[0].bandwidth_bytes_per_second for pod in pods),
    )
    return unequal_cluster(pods[0].mesh, (network, pods[0].links[1]), groups)


@dataclass(frozen=True)
class Case:
    """A graph, a machine, the objective, and by which dim Megatron splits the matrices of a layer."""

    build: Callable[[], FlowGraph]
    cluster: Callable[[], Cluster]
    layer: tuple[int, ...]
    objective: str = "throughput"
    micro_batches: int | None = 1


CASES: dict[str, Case] = {
    "gpt3_39b_8x8": Case(lambda: shapes.gpt(GPT3_39B), lambda: _pod("dgx-a100-pod", 8, 8), GPT_LAYER),
    "llama3_70b_2x8": Case(lambda: shapes.llama(shapes.LLAMA3_70B), lambda: _pod("dgx-a100-pod", 2, 8), LLAMA_LAYER),
    "llama3_70b_2x8_unequal": Case(
        lambda: shapes.llama(shapes.LLAMA3_70B), lambda: _unequal("dgx-h100-pod", "dgx-a100-pod", 8), LLAMA_LAYER
    ),
    "llama3_8b_2x4_unequal": Case(
        lambda: shapes.llama(shapes.LLAMA3_8B), lambda: _unequal("hgx-h200-pod", "dgx-a100-pod", 4), LLAMA_LAYER
    ),
}


def measure(name: str) -> dict[str, Any]:
    """Plan one case, and the others' ways for it."""
    case = CASES[name]
    traced, cluster = case.build(), case.cluster()
    begin, cpu = time.perf_counter(), time.process_time()
    graph = normalize(traced)
    options = PipelineOptions(case.objective, case.micro_batches, "last")
    result = search_pipeline(graph, cluster, pipeline=options, solver_time_limit_seconds=TIME_LIMIT_SECONDS)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    others = {
        "alpa": least(graph, cluster, options, [alpa(graph, cluster)]),
        "even": least(graph, cluster, options, even_splits(graph, cluster)),
        "one_stage": one_stage(graph, cluster, options),
        "tensor": tensor_parallel(graph, cluster, case.layer),
    }
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu, 3),
        "gap": result.gap,
        "peak_rss_bytes": peak,
        "predicted_seconds": result.value,
        "stages": described(result),
        **{f"ratio_to_{other}": None if value is None else result.value / value for other, value in others.items()},
        "others": others,
    }


def described(result: PipelineResult) -> list[str]:
    """The operators and ranks of each stage."""
    return [f"operators {stage.operators[0]}-{stage.operators[-1]} on ranks {stage.part}" for stage in result.stages]


def least(
    graph: NormalGraph, cluster: Cluster, options: PipelineOptions, given: Sequence[tuple[StageConstraint, ...]]
) -> float | None:
    """The least value of pipelines of given stages, each stage planned; None where none of them fits the memory."""
    found = []
    for stages in given:
        try:
            given_stages = replace(options, stages=stages)
            result = search_pipeline(
                graph, cluster, pipeline=given_stages, solver_time_limit_seconds=TIME_LIMIT_SECONDS
            )
        except (InfeasibleError, SolverError):
            continue
        found.append(result.value)
    return min(found, default=None)


def one_stage(graph: NormalGraph, cluster: Cluster, options: PipelineOptions) -> float | None:
    """The value of the best plan for the whole machine."""
    try:
        whole = replace(options, stages=1)
        return search_pipeline(graph, cluster, pipeline=whole, solver_time_limit_seconds=TIME_LIMIT_SECONDS).value
    except InfeasibleError:
        return None


def tensor_parallel(graph: NormalGraph, cluster: Cluster, layer: tuple[int, ...]) -> float | None:
    """The seconds of the best plan with Megatron's splits; None where it does not fit the memory."""
    pins, allow = experts(graph, cluster.mesh, layer)["megatron"]
    try:
        found = search(
            graph,
            cluster,
            pins=pins,
            allow=allow,
            report=False,
            overlap=False,
            solver_time_limit_seconds=TIME_LIMIT_SECONDS,
        )
        return found.plan.seconds
    except (InfeasibleError, SolverError):
        return None


def layer_starts(graph: NormalGraph, count: int) -> list[int]:
    """The first operators of ``count`` parts of about equal length, where one tensor crosses."""
    units = find_units(GraphView(graph))
    places = [unit.operators.start for unit in units]
    total = units[-1].operators.stop
    chosen = [min(places, key=lambda place: abs(place - total * part / count)) for part in range(count)]
    return sorted(set(chosen))


def even_splits(graph: NormalGraph, cluster: Cluster) -> list[tuple[StageConstraint, ...]]:
    """The splits into equal devices and equal layers."""
    splits = []
    devices, total = cluster.mesh.size, len(GraphView(graph).operators)
    count = 2
    while count <= devices:
        starts = [*layer_starts(graph, count), total]
        if devices % count == 0 and len(starts) == count + 1:
            each = devices // count
            splits.append(
                tuple(StageConstraint((k * each, (k + 1) * each), (starts[k], starts[k + 1])) for k in range(count))
            )
        count *= 2
    return splits


def alpa(graph: NormalGraph, cluster: Cluster) -> tuple[StageConstraint, ...]:
    """Stages by Alpa's dynamic program for inference: the least of the slowest stage times the number of stages."""
    view = GraphView(graph)
    units = find_units(view)
    starts = layer_starts(graph, CLUSTERS)
    unit_of = {unit.operators.start: n for n, unit in enumerate(units)} | {len(view.operators): len(units)}
    ends = [*starts, len(view.operators)]
    devices, mesh = cluster.mesh.size, cluster.mesh
    parts = [part for rank in range(devices) for part in slices_at(mesh, rank) if _is_alpas(part, mesh)]
    bounds: dict[Cluster, StageBounds] = {}
    shared = frozenset[str]()
    stage_seconds: dict[tuple[int, int, MeshSlice], float] = {}
    for part in parts:
        own = sub_cluster(cluster, part)
        if own not in bounds:
            bounds[own] = StageBounds(view, units, shared, own, GraphOptions(), UNLIMITED, False, Limits())
        for a in range(len(starts)):
            for b in range(a + 1, len(ends)):
                stage_seconds[a, b, part] = float(bounds[own].seconds[unit_of[ends[a]], unit_of[ends[b]]].min())
    best: tuple[float, tuple[StageConstraint, ...]] = (math.inf, ())
    for slowest in sorted(set(stage_seconds.values())):
        if slowest >= best[0]:
            break
        count, stages = _fewest(len(starts), devices, parts, stage_seconds, slowest)
        if count * slowest < best[0]:
            given = tuple(StageConstraint((p.start, p.stop), (ends[a], ends[b])) for a, b, p in stages)
            best = count * slowest, given
    return best[1]


def _is_alpas(part: MeshSlice, mesh: DeviceMesh) -> bool:
    """Whether a slice is a power of two of devices of a node, or whole nodes."""
    node = mesh.shape[-1]
    return part.size % node == 0 or (part.size < node and part.size & (part.size - 1) == 0)


def _fewest(
    count: int,
    devices: int,
    parts: Sequence[MeshSlice],
    seconds: dict[tuple[int, int, MeshSlice], float],
    slowest: float,
) -> tuple[float, list[tuple[int, int, MeshSlice]]]:
    """The fewest stages, none slower than ``slowest``, that take all clusters and all devices."""
    value = np.full((count + 1, devices + 1), np.inf)
    step: dict[tuple[int, int], tuple[int, MeshSlice]] = {}
    value[count, devices] = 0
    for part in sorted(parts, key=lambda one: -one.start):
        for a in range(count):
            for b in range(a + 1, count + 1):
                more = 1 + value[b, part.stop]
                if more < value[a, part.start] and seconds[a, b, part] <= slowest:
                    value[a, part.start] = more
                    step[a, part.start] = b, part
    stages = []
    a, rank = 0, 0
    while math.isfinite(value[0, 0]) and a < count:
        b, part = step[a, rank]
        stages.append((a, b, part))
        a, rank = b, part.stop
    return float(value[0, 0]), stages


def show(console: Console, names: Sequence[str]) -> dict[str, Any]:
    """Measure cases, each in a process of its own, and print them as a table."""
    results = {}
    others = ("alpa", "even", "one_stage", "tensor")
    table = Table(title="Pipelines, and other ways to cut the same graphs [predicted ms for a batch]")
    for column in ("case", "planned in", "gap", "peak RSS", "stages", "ours", *others):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.stages", "--case", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        one = results[name] = json.loads(done.stdout.splitlines()[-1])
        table.add_row(
            name,
            f"{one['seconds']:.1f} s",
            f"{one['gap']:.1e}",
            f"{one['peak_rss_bytes'] / 2**20:.0f} MiB",
            str(len(one["stages"])),
            f"{one['predicted_seconds'] * 1e3:.4g}",
            *("-" if one["others"][x] is None else f"{one['others'][x] * 1e3:.4g}" for x in others),
        )
    console.print(table)
    return results


def small_graph(console: Console, repeats: int = 7) -> dict[str, Any]:
    """Plan an MLP of three layers on 2x2 devices by each objective: the median CPU seconds in a warm process."""
    x = y = hidet.symbol([8, 1024], "float32", "cpu")
    for number in range(3):
        y = ops.matmul(y, weight(f"layers.{number}", [1024, 1024]))
        y = ops.relu(y) if number < 2 else y
    traced, cluster = hidet.trace_from(y, [x]), builtin("cpu", DeviceMesh((2, 2)))
    results = {}
    table = Table(title="An MLP of three layers on 2x2 devices, by objective")
    for column in ("objective", "planned in", "stages", "gap"):
        table.add_column(column)
    for objective in ("latency", "throughput", "batch"):
        times = []
        for _ in range(repeats):
            begin = time.process_time()
            found = search_pipeline(normalize(traced), cluster, pipeline=PipelineOptions(objective))
            times.append(time.process_time() - begin)
        seconds = float(np.median(times))
        results[objective] = {"seconds": seconds, "gap": found.gap, "predicted_seconds": found.value}
        table.add_row(objective, f"{seconds * 1e3:.0f} ms", "; ".join(described(found)), f"{found.gap:.1e}")
    console.print(table)
    return results


def three_objectives(console: Console) -> dict[str, Any]:
    """Plan four layers, of which no device has room for all, by each of the objectives: they pick different plans."""
    x = y = hidet.symbol([8, 128], "float32", "cpu")
    for number in range(4):
        y = ops.tanh(ops.matmul(y, weight(f"layers.{number}", [128, 128])))
    graph = normalize(hidet.trace_from(y, [x]))
    device = Device("slow", {"default": 1e9}, 1e9, 150_000, 1e-9)
    cluster = Cluster(DeviceMesh((4,)), (Link(5e-5, 1e8),), device)
    results = {}
    table = Table(title="Four layers on four small devices, by objective")
    for column in ("objective", "stages", "micro-batches", "seconds", "gap"):
        table.add_column(column)
    for objective in ("latency", "throughput", "batch"):
        found = search_pipeline(graph, cluster, pipeline=PipelineOptions(objective, outputs="last"))
        results[objective] = {
            "stages": described(found),
            "micro_batches": found.micro.count,
            "predicted_seconds": found.value,
            "gap": found.gap,
        }
        table.add_row(
            objective, "; ".join(described(found)), str(found.micro.count), f"{found.value:.3e}", f"{found.gap:.1e}"
        )
    console.print(table)
    return results
