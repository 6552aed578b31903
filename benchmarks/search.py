"""Plan large models and compare with experts' plans under the same costs; the last line is JSON.

    python -m benchmarks.search [name ...] [--without STEP ...]

``seconds`` is from the traced graph to the plan (``cpu_seconds`` counts where others use the machine too), ``gap`` the
relative distance to the proven bound, ``peak_rss_bytes`` that of the process that traced and planned,
``ratio_to_expert`` our predicted time over that of the best expert's plan that fits the budget (null if none does).
Each expert is the best plan with what makes the expert's prescribed:

megatron      Matrices by columns, then by rows, over the last mesh axis; partial sums all-reduced.
data_parallel Every weight on every device, activations split by their first dim.
fsdp          The same, with each weight split over all devices and gathered where it is used.

Small cases have ``ratio_to_exhaustive``: our predicted time over the least of all choices of operators and weights that
fit the budget, tried one by one. They share a process. ``layers`` plans LLaMA-3-8B at several depths, each in a process
of its own: ``layers_seconds`` are the CPU seconds from the traced graph to the plan. ``--without`` leaves out steps of
the search for our plans, which are listed in hidet_dist/search/steps.py.
"""

from __future__ import annotations

import argparse
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
from hidet.graph import FlowGraph, Operator
from hidet.testing.models.resnet import Bottleneck, ResNet
from rich.console import Console
from rich.table import Table

from benchmarks.without import add_without, passed_on
from hidet_dist.cost.model import PredictedCost
from hidet_dist.machine import Cluster, builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import SearchOptions, search
from hidet_dist.search.formulation.formulate import formulate
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import Pins
from hidet_dist.search.problem import Problem, evaluate, held_bytes, readers
from hidet_dist.spec import DeviceMesh, OpShardSpec, TensorShardSpec
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

UNLIMITED = 2**62
MOST_ROWS = 2**22  # partial choices that an exhaustive search keeps at once
ROUNDING = 1e-12  # relative, of sums in another order
COLUMNS, ROWS = 1, 0
GPT_LAYER = (COLUMNS, COLUMNS, COLUMNS, ROWS, COLUMNS, ROWS)
LLAMA_LAYER = (COLUMNS, COLUMNS, COLUMNS, ROWS, COLUMNS, COLUMNS, ROWS)


def resnet50() -> FlowGraph:
    """Batch 64 of 224 x 224, in float32."""
    model = ResNet(Bottleneck, [3, 4, 6, 3])
    model.cpu()
    x = hidet.symbol([64, 3, 224, 224], "float32", "cpu")
    return hidet.trace_from(model(x), [x])


def gpt_mlp() -> FlowGraph:
    """Norm, linear, GELU, linear, with biases and the residual around them: 9 operators, 6 weights."""
    batch, seq, hidden = 8, 128, 1024
    x = hidet.symbol([batch, seq, hidden], "float16", "cpu")

    def vector(name: str, size: int) -> hidet.Tensor:
        return weight(name, [size], "float16")

    y = ops.layer_norm(x) * vector("norm.weight", hidden) + vector("norm.bias", hidden)
    y = ops.gelu(ops.matmul(y, weight("up", [hidden, 4 * hidden], "float16")) + vector("up.bias", 4 * hidden))
    y = ops.matmul(y, weight("down", [4 * hidden, hidden], "float16")) + vector("down.bias", hidden)
    return hidet.trace_from(x + y, [x])


def mlp() -> FlowGraph:
    """Linear, ReLU, linear, of more rows than columns."""
    x = hidet.symbol([8192, 1024], "float16", "cpu")
    y = ops.relu(ops.matmul(x, weight("up", [1024, 4096], "float16")))
    return hidet.trace_from(ops.matmul(y, weight("down", [4096, 1024], "float16")), [x])


def chain() -> FlowGraph:
    """Five matrices one after the other."""
    x = y = hidet.symbol([512, 4096], "float16", "cpu")
    for number in range(5):
        y = ops.matmul(y, weight(f"weight.{number}", [4096, 4096], "float16"))
    return hidet.trace_from(y, [x])


@dataclass(frozen=True)
class Case:
    """A case: a model, a mesh and machine, and the dim by which Megatron splits the matrices of a layer.

    ``budget_fraction`` is the budget as a part of what the best plan without one holds; None for the device's memory.
    """

    build: Callable[[], FlowGraph]
    mesh: tuple[int, ...]
    machine: str
    layer: tuple[int, ...] = ()
    budget_fraction: float | None = None
    exhaustive: bool = False


CASES: dict[str, Case] = {
    "gpt2_8": Case(lambda: shapes.gpt(shapes.GPT2), (8,), "dgx-a100", GPT_LAYER),
    "resnet50_8": Case(resnet50, (8,), "dgx-a100"),
    "llama3_8b_8": Case(lambda: shapes.llama(shapes.LLAMA3_8B), (8,), "dgx-a100", LLAMA_LAYER),
    "llama3_8b_2x4": Case(lambda: shapes.llama(shapes.LLAMA3_8B), (2, 4), "dgx-a100", LLAMA_LAYER),
    "llama3_8b_8_tight": Case(
        lambda: shapes.llama(shapes.LLAMA3_8B), (8,), "dgx-a100", LLAMA_LAYER, budget_fraction=0.4
    ),
    "llama3_8b_2x4_tight": Case(
        lambda: shapes.llama(shapes.LLAMA3_8B), (2, 4), "dgx-a100", LLAMA_LAYER, budget_fraction=0.4
    ),
    "llama3_70b_2x8": Case(lambda: shapes.llama(shapes.LLAMA3_70B), (2, 8), "dgx-a100-pod", LLAMA_LAYER),
    "gpt3_175b_8x8": Case(lambda: shapes.gpt(shapes.GPT3_175B), (8, 8), "dgx-a100-pod", GPT_LAYER),
    "gpt_mlp_2": Case(gpt_mlp, (2,), "dgx-a100", exhaustive=True),
    "gpt_mlp_2_tight": Case(gpt_mlp, (2,), "dgx-a100", budget_fraction=0.7, exhaustive=True),
    "mlp_2x2": Case(mlp, (2, 2), "dgx-a100", exhaustive=True),
    "mlp_2x2_tight": Case(mlp, (2, 2), "dgx-a100", budget_fraction=0.9, exhaustive=True),
    "chain_2": Case(chain, (2,), "dgx-a100", exhaustive=True),
    "chain_2_tight": Case(chain, (2,), "dgx-a100", budget_fraction=0.7, exhaustive=True),
}
LAYERS = (8, 16, 32, 64)


Expert = tuple[dict[str, TensorShardSpec], Callable[[Operator, OpShardSpec], bool]]


def experts(graph: FlowGraph, mesh: DeviceMesh, layer: tuple[int, ...]) -> dict[str, Expert]:
    """For each expert how the weights lie, and which specs of an operator are in the expert's manner."""
    view = GraphView(graph)
    whole = {name: TensorShardSpec.replicated(len(view.shape(name))) for name in view.weights}

    def batch_only(op: Operator, spec: OpShardSpec) -> bool:
        """Weights are whole where they are used, and activations are split by their first dim or not at all."""
        for x, own in zip(op.inputs, spec.in_specs, strict=True):
            if view.names[x] in whole and not own.is_replicated:
                return False
        return not any(axes for own in (*spec.in_specs, *spec.out_specs) for axes in own.mesh_axes_per_dim[1:])

    fully = {name: most_split(view.shape(name), mesh) for name in view.weights}
    found: dict[str, Expert] = {"data_parallel": (whole, batch_only), "fsdp": (fully, batch_only)}
    if layer:
        matrices = [
            view.names[op.inputs[1]]
            for op in view.operators
            if op.name == "Matmul" and view.names[op.inputs[1]] in whole
        ]
        tensor_axis = mesh.ndim - 1
        megatron = dict(whole)
        for number, name in enumerate(matrices):
            dim = layer[number % len(layer)] if number < len(matrices) - 1 else COLUMNS
            spec = whole[name].with_dim(dim, (tensor_axis,))
            if spec.fits(view.shape(name), mesh, padded=True):
                megatron[name] = spec

        def as_stored(op: Operator, spec: OpShardSpec) -> bool:
            kinds = {fn.kind for fns in spec.reduce_fns for fn in fns}
            names = [view.names[x] for x in op.inputs]
            own = [s == megatron[name] for name, s in zip(names, spec.in_specs, strict=True) if name in matrices]
            return all(own) and "reduce_scatter" not in kinds

        # Vectors and tables may lie as suits the matrices.
        found["megatron"] = ({name: megatron[name] for name in matrices}, as_stored)
    return found


def most_split(shape: tuple[int, ...], mesh: DeviceMesh) -> TensorShardSpec:
    """The weight split by as many mesh axes as its dims allow, the first dim first, with padding if need be."""
    spec = TensorShardSpec.replicated(len(shape))
    for axis in range(mesh.ndim):
        for dim in range(len(shape)):
            wider = spec.with_dim(dim, (*spec.mesh_axes_per_dim[dim], axis))
            if wider.fits(shape, mesh, padded=True):
                spec = wider
                break
    return spec


def least_of_all(problem: Problem, most: float) -> float:
    """The least seconds of all choices of all entities that fit the budget, tried one by one.

    A choice of the first entities is left out where it costs more than ``most`` seconds, with the least that the
    operators still open cost: no cost is negative. What is left is evaluated and measured as the search does.
    """
    order: list[int] = []

    def place(entity: int) -> None:
        if entity in order:
            return
        for edge in problem.edges:
            if edge.consumer == entity:
                place(edge.producer)
        order.append(entity)

    for entity in range(len(problem.cost)):
        place(entity)
    groups = readers(problem)
    picks, seconds = np.zeros((1, len(order)), dtype=np.int16), np.zeros(1)
    still_open = sum(map(min, problem.cost))
    for entity in order:
        choices = len(problem.cost[entity])
        if len(picks) * choices > MOST_ROWS:
            raise ValueError(f"More than {MOST_ROWS} choices of the first entities; the graph is too large to try all.")
        still_open -= min(problem.cost[entity])
        picks = np.repeat(picks, choices, axis=0)
        picks[:, entity] = np.tile(np.arange(choices), len(seconds))
        seconds = np.repeat(seconds, choices) + np.tile(problem.cost[entity], len(seconds))
        for group in groups.values():
            placed: list[np.ndarray] = []
            for edge in sorted(group, key=lambda edge: order.index(edge.consumer)):
                if order.index(edge.consumer) > order.index(entity):
                    break
                wish = np.array(edge.consumed)[picks[:, edge.consumer]]
                if edge.consumer == entity:
                    source = np.array(edge.produced)[picks[:, edge.producer]]
                    paid = np.logical_or.reduce([wish == other for other in placed], initial=False)
                    seconds += np.where(paid, 0.0, np.array(edge.convert)[source, wish])
                placed.append(wish)
        left = seconds + still_open <= most * (1 + ROUNDING)
        picks, seconds = picks[left], seconds[left]
    for row in np.argsort(seconds, kind="stable"):
        choices_ = picks[row].tolist()
        if max(held_bytes(problem, groups, choices_)) <= problem.budget:
            return evaluate(problem, choices_)
    return math.inf


def stated(graph: FlowGraph, cluster: Cluster, budget: int) -> Problem:
    """The problem that the search solves for a graph without pins."""
    view = GraphView(graph)
    pins = Pins(view, cluster.mesh, (), {})
    return formulate(view, cluster, PredictedCost(cluster), SearchOptions(mem_budget=budget), pins).problem


def measure(name: str, without: Sequence[str]) -> dict[str, Any]:
    """One case, in this process."""
    case = CASES[name]
    graph = normalize(case.build())
    cluster: Cluster = builtin(case.machine, DeviceMesh(case.mesh))
    view = GraphView(graph)
    budget = cluster.device.memory_bytes
    if case.budget_fraction is not None:
        free = search(graph, cluster, refine_mesh=False, report=False).plan.stages[0]
        budget = int(case.budget_fraction * max(live_bytes(view, free)))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = search(graph, cluster, mem_budget=budget, refine_mesh=False, report=False, without=without)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    predicted: dict[str, float] = {}
    fitting = []
    for expert, (weights, allow) in experts(graph, cluster.mesh, case.layer).items():
        plan = search(graph, cluster, mem_budget=UNLIMITED, pins=weights, allow=allow, report=False).plan
        predicted[expert] = plan.seconds
        if max(live_bytes(view, plan.stages[0])) <= budget:
            fitting.append(plan.seconds)
    result = {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "gap": found.gap,
        "peak_rss_bytes": rss,
        "predicted_seconds": found.plan.seconds,
        "held_bytes_per_device": max(live_bytes(view, found.plan.stages[0])),
        "weight_bytes_per_device": found.plan.stages[0].weight_bytes_per_device,
        "collectives": found.plan.collectives(),
        "ratio_to_expert": found.plan.seconds / min(fitting) if fitting else None,
        "experts": predicted,
        "operators": len(found.plan.stages[0].operators),
    }
    if case.exhaustive:
        least = least_of_all(stated(graph, cluster, budget), found.plan.seconds)
        result["exhaustive_seconds"] = least
        result["ratio_to_exhaustive"] = found.plan.seconds / least
    return result


def measure_layers(layers: int, without: Sequence[str]) -> float:
    """CPU seconds to plan a LLaMA-3-8B of so many layers, in this process."""
    graph = normalize(shapes.llama(replace(shapes.LLAMA3_8B, layers=layers)))
    cluster = builtin("dgx-a100", DeviceMesh((8,)))
    begin = time.process_time()
    search(graph, cluster, refine_mesh=False, report=False, without=without)
    return round(time.process_time() - begin, 3)


def child(*arguments: str) -> Any:
    """Run this program in a separate process, for its peak memory and caches, and return the last line it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.search", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(names: Sequence[str], without: Sequence[str]) -> None:
    """Measure the cases in processes of their own, and print what they found."""
    unknown = [name for name in names if name not in (*CASES, "layers")]
    if unknown:
        sys.exit(f"No case {unknown[0]!r}; there are {', '.join((*CASES, 'layers'))}.")
    results: dict[str, Any] = {}
    console = Console(width=140)
    table = Table(title="Plans, experts' plans and the best of all choices, under the same costs [ms]")
    for column in (
        *("case", "operators", "planned in", "gap", "peak RSS"),
        *("ours", "megatron", "data_parallel", "fsdp", "exhaustive"),
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    chosen = [name for name in names or CASES if name != "layers"]
    # The peak of a large case is its own; small cases hold little beside what is imported.
    for name in chosen:
        if not CASES[name].exhaustive:
            results |= child("--cases", name, *passed_on(without))
    small = [name for name in chosen if CASES[name].exhaustive]
    if small:
        results |= child("--cases", *small, *passed_on(without))
    for name, one in results.items():
        others = {**one["experts"], "exhaustive": one.get("exhaustive_seconds")}
        table.add_row(
            name,
            str(one["operators"]),
            f"{one['seconds']:.2f} s",
            f"{one['gap']:.1e}",
            f"{one['peak_rss_bytes'] / 2**20:.0f} MiB",
            f"{one['predicted_seconds'] * 1e3:.4g}",
            *(
                "-" if others.get(other) is None else f"{others[other] * 1e3:.4g}"
                for other in ("megatron", "data_parallel", "fsdp", "exhaustive")
            ),
        )
    if results:
        console.print(table)
    if not names or "layers" in names:
        own = results["layers_seconds"] = {
            str(layers): child("--layers", str(layers), *passed_on(without)) for layers in LAYERS
        }
        depths = Table(title="LLaMA-3-8B of several depths on 8 devices: CPU seconds to plan")
        for column in ("layers", "seconds", "seconds a layer"):
            depths.add_column(column, justify="right")
        for layers, seconds in own.items():
            depths.add_row(layers, f"{seconds:.2f}", f"{seconds / int(layers):.4f}")
        console.print(depths)
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases, or layers")
    add_without(parser)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cases:
        print(json.dumps({name: measure(name, given.without) for name in given.cases}))
    elif given.layers:
        print(json.dumps(measure_layers(given.layers, given.without)))
    else:
        run(given.names, given.without)


if __name__ == "__main__":
    main()
