"""Finer meshes: groups of devices that share a head of keys and values."""

from __future__ import annotations

import hidet
import numpy as np
import pytest

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import one_graph, search
from hidet_dist.search.refine import refine
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs
from hidet_dist.spec import DeviceMesh, Plan, TensorShardSpec
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.testing import models, shapes
from hidet_dist.view import GraphView


def test_two_heads_of_keys_and_values_are_split_over_eight_devices() -> None:
    graph = normalize(shapes.llama(shapes.LlamaConfig(1, 4096, 32, 2, 14336, 32000, batch=1, sequence=64)))
    cluster = builtin("dgx-a100", DeviceMesh((8,), ("gpu",)))
    given, finer = search(graph, cluster, refine_mesh=False).plan, search(graph, cluster).plan
    assert str(given.stages[0].mesh) == "[gpu=8]"
    assert str(finer.stages[0].mesh) == "[gpu_0=2, gpu_1=4]"
    assert finer.seconds < given.seconds
    # Each half of the devices holds one head of keys and one of values; all else of the matrices is split by all.
    specs = {name: str(spec) for name, spec in finer.param_specs.items()}
    assert specs["layers.0.key"] == specs["layers.0.value"] == "(R, S0)"
    assert specs["layers.0.gate"] == specs["head"] == "(R, S01)"
    assert Plan.from_json(finer.to_json()) == finer


def test_only_the_better_mesh_gets_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = one_graph.write_report
    monkeypatch.setattr(one_graph, "write_report", lambda *args: written.append(args) or real(*args))
    graph = normalize(shapes.llama(shapes.LlamaConfig(1, 4096, 32, 2, 14336, 32000, batch=1, sequence=64)))
    plan = search(graph, builtin("dgx-a100", DeviceMesh((8,), ("gpu",)))).plan
    assert str(plan.stages[0].mesh) == "[gpu_0=2, gpu_1=4]"
    assert len(written) == 1
    report = plan.stages[0].report
    assert report is not None and len(report.runner_ups) == len(plan.stages[0].operators)
    assert report.bound_seconds <= plan.seconds


def test_groups_that_share_heads_compute_what_the_whole_does() -> None:
    graph = normalize(models.llama(kv_heads=2)[0])
    cluster = builtin("cpu", DeviceMesh((4,), ("rank",)))
    finer = refine(GraphView(graph), cluster)
    assert finer is not None
    view, inputs = GraphView(graph), graph_inputs(graph, np.random.default_rng(0))
    columns = {name: "(R, S0)" for name in view.weights if view.shape(name) == (16, 8)}
    assert len(columns) == 2
    plan = search(graph, finer.cluster, pins=columns, mode="propagate").plan
    assert {str(plan.param_specs[name]) for name in columns} == {"(R, S0)"}
    assert check_stage(graph, plan.stages[0], inputs, evaluate_graph(graph, inputs)) == ""


def test_a_finer_mesh_costs_the_same_collectives() -> None:
    graph = normalize(shapes.gpt(shapes.GPTConfig(1, 24, 6, 96, batch=1, sequence=4, dtype="float32")))
    cluster = builtin("dgx-a100", DeviceMesh((4,), ("gpu",)))
    finer = refine(GraphView(graph), cluster)
    assert finer is not None
    assert finer.cluster.mesh == DeviceMesh((2, 2), ("gpu_0", "gpu_1"))
    assert finer.axes == ((0, 1),)
    for kind in COLLECTIVES.values():
        assert finer.cluster.collective_seconds(kind, 4096, (0, 1)) == cluster.collective_seconds(kind, 4096, (0,))
    spec = TensorShardSpec(((), (0,)))
    assert str(finer.translated(spec)) == "(R, S01)"
    mesh, fine = cluster.mesh, finer.cluster.mesh
    for rank in range(4):
        own = spec.slices((2, 8), mesh, mesh.coordinate(rank))
        assert own == finer.translated(spec).slices((2, 8), fine, fine.coordinate(rank))


def test_a_mesh_that_everything_fills_stays_as_it_is() -> None:
    x = hidet.symbol([8, 16], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.matmul(x, hidet.randn([16, 32], device="cpu")), [x]))
    assert refine(GraphView(graph), builtin("cpu", DeviceMesh((4,)))) is None
    assert search(graph, builtin("cpu", DeviceMesh((4,))), refine_mesh=True).plan.stages[0].mesh.shape == (4,)


def test_pins_name_the_axes_of_the_given_mesh() -> None:
    graph = normalize(shapes.llama(shapes.LlamaConfig(1, 64, 8, 2, 128, 64, batch=1, sequence=4, dtype="float32")))
    cluster = builtin("cpu", DeviceMesh((4,)))
    assert refine(GraphView(graph), cluster) is not None
    plan = search(graph, cluster, pins={"layers.0.gate": "(R, S0)"}).plan
    assert plan.stages[0].mesh == cluster.mesh
    assert str(plan.param_specs["layers.0.gate"]) == "(R, S0)"


def test_given_specs_keep_their_meaning_on_the_finer_mesh() -> None:
    graph = normalize(shapes.llama(shapes.LlamaConfig(1, 4096, 32, 2, 14336, 32000, batch=8, sequence=1)))
    cluster = builtin("dgx-a100", DeviceMesh((8,)))
    wanted = [TensorShardSpec.parse("(R, R, S0)")]
    plan = search(graph, cluster, output_specs=wanted).plan
    shape = plan.stages[0].outputs[0].shape
    for rank in range(8):
        mesh = plan.stages[0].mesh
        own = plan.stages[0].outputs[0].spec.slices(shape, mesh, mesh.coordinate(rank))
        assert own == wanted[0].slices(shape, cluster.mesh, (rank,))
