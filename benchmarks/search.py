"""Plan large models and compare with experts' plans under the same costs; the last line is JSON.

    python benchmarks/search.py [name ...]

``seconds`` is from the traced graph to the plan (``cpu_seconds`` counts where others use the machine too), ``gap`` the
relative distance to the proven bound, ``peak_rss_bytes`` that of the process that traced and planned,
``ratio_to_expert`` our predicted time over that of the best expert's plan that fits the devices' memory. Each expert is
the best plan with what makes the expert's prescribed:

megatron      Matrices by columns, then by rows, over the last mesh axis; partial sums all-reduced.
data_parallel Every weight on every device, activations split by their first dim.
fsdp          The same, with each weight split over all devices and gathered where it is used.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import hidet
from hidet.graph import FlowGraph, Operator
from hidet.testing.models.resnet import Bottleneck, ResNet
from rich.console import Console
from rich.table import Table

from hidet_dist.machine import Cluster, builtin
from hidet_dist.search import find
from hidet_dist.search.memory import live_bytes
from hidet_dist.spec import DeviceMesh, OpShardSpec, TensorShardSpec
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView

UNLIMITED = 2**62
COLUMNS, ROWS = 1, 0
GPT_LAYER = (COLUMNS, COLUMNS, COLUMNS, ROWS, COLUMNS, ROWS)
LLAMA_LAYER = (COLUMNS, COLUMNS, COLUMNS, ROWS, COLUMNS, COLUMNS, ROWS)


def resnet50() -> FlowGraph:
    """Batch 64 of 224 x 224, in float32."""
    model = ResNet(Bottleneck, [3, 4, 6, 3])
    model.cpu()
    x = hidet.symbol([64, 3, 224, 224], "float32", "cpu")
    return hidet.trace_from(model(x), [x])


# What to plan, on which mesh and machine, and by which dim Megatron splits the matrices of a layer.
CASES: dict[str, tuple[Callable[[], FlowGraph], tuple[int, ...], str, tuple[int, ...]]] = {
    "gpt2_8": (lambda: shapes.gpt(shapes.GPT2), (8,), "dgx-a100", GPT_LAYER),
    "resnet50_8": (resnet50, (8,), "dgx-a100", ()),
    "llama3_8b_8": (lambda: shapes.llama(shapes.LLAMA3_8B), (8,), "dgx-a100", LLAMA_LAYER),
    "llama3_8b_2x4": (lambda: shapes.llama(shapes.LLAMA3_8B), (2, 4), "dgx-a100", LLAMA_LAYER),
    "llama3_70b_2x8": (lambda: shapes.llama(shapes.LLAMA3_70B), (2, 8), "dgx-a100-pod", LLAMA_LAYER),
    "gpt3_175b_8x8": (lambda: shapes.gpt(shapes.GPT3_175B), (8, 8), "dgx-a100-pod", GPT_LAYER),
}


def experts(
    graph: FlowGraph, mesh: DeviceMesh, layer: tuple[int, ...]
) -> dict[str, tuple[dict[str, TensorShardSpec], Callable[[Operator, OpShardSpec], bool]]]:
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
    found = {"data_parallel": (whole, batch_only), "fsdp": (fully, batch_only)}
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


def measure(name: str) -> dict[str, Any]:
    """One case, in this process."""
    build, shape, machine, layer = CASES[name]
    graph = build()
    cluster: Cluster = builtin(machine, DeviceMesh(shape))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = find(graph, cluster, report=False)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    predicted: dict[str, float] = {}
    fitting = []
    view = GraphView(graph)
    for expert, (weights, allow) in experts(graph, cluster.mesh, layer).items():
        plan = find(graph, cluster, UNLIMITED, pins=weights, allow=allow, report=False).plan
        predicted[expert] = plan.seconds
        if max(live_bytes(view, plan.stage)) <= cluster.device.memory_bytes:
            fitting.append(plan.seconds)
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "gap": found.gap,
        "peak_rss_bytes": rss,
        "predicted_seconds": found.plan.seconds,
        "held_bytes_per_device": max(live_bytes(view, found.plan.stage)),
        "weight_bytes_per_device": found.plan.stage.weight_bytes_per_device,
        "collectives": found.plan.collectives(),
        "ratio_to_expert": found.plan.seconds / min(fitting, default=math.inf),
        "experts": predicted,
        "operators": len(found.plan.stage.operators),
    }


def main(names: list[str]) -> None:
    results = {}
    table = Table(title="Plans, and experts' plans under the same costs [ms]")
    for column in ("case", "operators", "planned in", "gap", "peak RSS", "ours", "megatron", "data_parallel", "fsdp"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name in names or list(CASES):
        # A process of its own, so that the peak of one case is not that of another.
        child = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False)
        if child.returncode:
            sys.exit(f"{name} failed:\n{child.stderr}")
        one = results[name] = json.loads(child.stdout.splitlines()[-1])
        table.add_row(
            name,
            str(one["operators"]),
            f"{one['seconds']:.2f} s",
            f"{one['gap']:.1e}",
            f"{one['peak_rss_bytes'] / 2**20:.0f} MiB",
            f"{one['predicted_seconds'] * 1e3:.2f}",
            *(
                f"{one['experts'][expert] * 1e3:.2f}" if expert in one["experts"] else "-"
                for expert in ("megatron", "data_parallel", "fsdp")
            ),
        )
    Console(width=120).print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:])
