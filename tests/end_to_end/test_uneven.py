"""Artifacts of a mesh with shares: one program that real processes load with their own extents."""

import json
from dataclasses import replace
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.artifacts import Manifest
from hidet_dist.config import DistributedConfig
from hidet_dist.errors import ArtifactError, ConfigError, InfeasibleError, PlanError
from hidet_dist.machine import DeviceGroup, builtin
from hidet_dist.machine.groups import unequal_cluster, with_memory_of_each
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh, Plan

from .conftest import launch, serve

HIDDEN, INNER, ROWS = 16, 32, 6
KERNELS = builtin("cpu", DeviceMesh((2,))).device.kernels
SHARES = {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": {"gpu": [5, 3]}}


def block(rng):
    """A lookup, two projections and their softmax: weights by columns and rows, an all-gather and a reduce-scatter."""

    def constant(*shape):
        return hidet.asarray(rng.uniform(-1, 1, shape).astype(np.float32))

    ids = hidet.symbol([ROWS], "int32", "cpu")
    x = ops.take(constant(24, HIDDEN), ids, 0)
    y = ops.matmul(ops.relu(ops.matmul(x, constant(HIDDEN, INNER)) + constant(INNER)), constant(INNER, HIDDEN))
    return hidet.trace_from(ops.softmax(x + y, 1), [ids])


# Rows of the table, columns, rows; the sum arrives in parts, and is gathered for the softmax.
PINS = {"w0": "(S0, R)", "w1": "(R, S0)", "w3": "(S0, R)", "op:4": "(R, S0), (S0, R) -> (R, S0)"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("uneven") / "artifacts"
    graph = block(np.random.default_rng(0))
    return graph, out, hidet.distributed.auto_parallel(graph, SHARES, {"pins": PINS}, out)


@pytest.mark.slow  # a pipeline of such stages, below, is quick
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_two_processes_with_unequal_parts_answer_as_one_would(built, tmp_path, transport, monkeypatch):
    monkeypatch.setenv("HIDET_DIST_TRANSPORT", transport)
    graph, out, result = built
    kinds = result.plan.collectives()
    assert kinds["all_gather"] >= 1
    assert kinds["reduce_scatter"] >= 1
    ids = np.array([0, 23, 15, 14, -1, 7], np.int32)
    (want,) = evaluate_graph(graph, [np.where(ids < 0, ids + 24, ids)])
    for (got,) in serve(2, out, [ids], tmp_path, 100):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_each_rank_has_its_share_of_the_weights(built):
    _, out, result = built
    weights = result.plan.stages[0].weights
    assert sum(not weight.spec.is_replicated for weight in weights) >= 3
    for rank, share in enumerate((5, 3)):
        own = [weight.nbytes if weight.spec.is_replicated else weight.nbytes * share // 8 for weight in weights]
        assert result.weight_bytes_per_rank[rank] == sum(own)
    sizes = [Manifest.load(out).files[f"weights/rank{rank}.safetensors"][0] for rank in range(2)]
    assert sizes[0] > sizes[1]
    assert result.plan.stages[0].mesh == DeviceMesh((2,), ("gpu",), ((5, 3),))
    assert Plan.load(out / "plan.json") == result.plan
    (stage,) = Manifest.load(out).program().stages
    assert stage.mesh_shares == ((5, 3),)
    assert stage.workspace_bytes is None


def test_each_rank_keeps_the_memory_of_its_device(built, tmp_path):
    """With the shares 5:3, the first rank holds more than the second one has memory for."""
    graph, out, result = built
    even = builtin("cpu", DeviceMesh((2,), ("gpu",)))

    def machine(*memory):
        groups = [DeviceGroup(1, replace(even.device, memory_bytes=nbytes)) for nbytes in memory]
        return unequal_cluster(even.mesh, even.links, groups)

    report = json.loads((out / "report.json").read_text())
    first, second = (rank["peak_bytes"] for rank in report["memory"]["ranks"])
    assert result.weight_bytes_per_rank[1] < second < first
    assert result.held_bytes_per_stage[0] <= first
    config = {**SHARES, "machine": machine(first, second)}
    within = hidet.distributed.auto_parallel(graph, config, {"pins": PINS}, tmp_path / "artifacts")
    assert within.weight_bytes_per_rank == result.weight_bytes_per_rank
    weights = result.weight_bytes_per_rank
    for memory in ((first, weights[1]), (weights[0], second)):
        config = {**SHARES, "machine": machine(*memory)}
        with pytest.raises(InfeasibleError):
            hidet.distributed.auto_parallel(graph, config, {"pins": PINS}, tmp_path / "none")


def test_a_manifest_with_other_shares_is_refused(built, tmp_path):
    from hidet_dist.artifacts.manifest import _checksum  # the file is otherwise whole

    _, out, _ = built
    body = json.loads((out / "manifest.json").read_text())
    body["programs"][0]["stages"][0]["mesh_shares"] = [[10, 6]]
    body["checksum"] = _checksum(body)
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="mesh_shares"):
        Manifest.load(tmp_path)


def test_an_even_mesh_leaves_no_trace_of_shares_in_manifests_and_plans(tmp_path):
    x = hidet.symbol([4, 8], "float32", "cpu")
    out = tmp_path / "artifacts"
    given = {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": {"gpu": [4, 4]}}
    result = hidet.distributed.auto_parallel(hidet.trace_from(ops.relu(x), [x]), given, {}, out)
    assert result.plan.stages[0].mesh == DeviceMesh((2,), ("gpu",))
    for name in ("manifest.json", "plan.json"):
        assert "share" not in (out / name).read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpu": [2, 1, 1]}, "2 coordinates but 3 shares"),
        ({"node": [2, 1]}, "the mesh has the axes gpu"),
        ([2, 1], "must map names of mesh axes"),
        ({"gpu": "2:1"}, "must map names of mesh axes"),
        ({"gpu": [2, 0]}, "whole numbers from 1"),
        ({"gpu": [2, True]}, "whole numbers from 1"),
    ],
)
def test_bad_shares_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        DistributedConfig.parse({"mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": given})


def test_shares_are_for_gpus_too():
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = hidet.trace_from(ops.matmul(x, hidet.asarray(np.ones((8, 16), np.float32))), [x])
    config = {"target": "cuda", "arch": "sm_90", "pins": {"w0": "(R, S0)"}}
    (stage,) = hidet.distributed.make_plan(graph, SHARES, config).stages
    assert stage.mesh == DeviceMesh((2,), ("gpu",), ((5, 3),))
    assert [stage.weight_bytes_of(rank) for rank in range(2)] == [8 * 10 * 4, 8 * 6 * 4]


def test_a_machine_takes_the_shares_of_the_configuration():
    even = builtin("cpu", DeviceMesh((2,), ("gpu",)))
    parsed = DistributedConfig.parse({**SHARES, "machine": even})
    assert parsed.mesh == parsed.cluster.mesh == DeviceMesh((2,), ("gpu",), ((5, 3),))


@pytest.mark.slow
def test_programs_over_one_storage_have_the_shares_that_are_searched_for_all(tmp_path):
    even = builtin("cpu", DeviceMesh((2,), ("gpu",)))
    kernels = {name: replace(one, seconds_per_operation=3 * one.seconds_per_operation) for name, one in KERNELS.items()}
    groups = [DeviceGroup(1, replace(even.device, kernels=own)) for own in (KERNELS, kernels)]
    config = {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": "auto"}
    config["machine"] = unequal_cluster(even.mesh, even.links, groups)
    rng = np.random.default_rng(0)
    up, down = (hidet.asarray(rng.standard_normal(shape, np.float32)) for shape in ((256, 512), (512, 256)))

    def of_rows(rows):
        x = hidet.symbol([rows, 256], "float32", "cpu")
        return hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, up)), down), [x])

    graphs = {"prefill": of_rows(2050), "decode": of_rows(66)}  # no multiples of 4: the weights are split, not rows
    result = hidet.distributed.build_family(graphs, config, {}, tmp_path / "artifacts")
    assert [str(plan.stages[0].mesh) for plan in result.plans.values()] == ["[gpu=3:1]"] * 2
    whole = 2 * 256 * 512 * 4
    assert result.weight_bytes_per_rank == [whole * 3 // 4, whole // 4]
    stages = [program.stages[0] for program in Manifest.load(tmp_path / "artifacts").programs]
    assert [stage.mesh_shares for stage in stages] == [((3, 1),)] * 2


# The lookup and its residual on one pair of ranks, the second projection and the softmax on another.
STAGES = [
    {
        "operators": [0, 4],
        "mesh_shape": [2],
        "shares": {"axis0": [5, 3]},
        "pins": {"w0": "(S0, R)", "w1": "(R, S0)", "y1": "(R, S0)"},
    },
    {
        "operators": [4, 11],
        "mesh_shape": [2],
        "shares": {"axis0": [1, 3]},
        "pins": {"op:0": "(R, S0), (S0, R) -> (R, S0)", "x0": "(R, S0)", "x1": "(R, S0)"},
    },
]


@pytest.mark.slow
def test_a_pipeline_of_stages_with_unequal_parts_answers_as_one_process_would(tmp_path):
    """Calls, streams and profiles of two micro-batches; each byte between the stages is sent once."""
    graph, out = block(np.random.default_rng(0)), tmp_path / "artifacts"
    config = {"stages": STAGES, "micro_batches": 2}
    result = hidet.distributed.auto_parallel(graph, {"mesh_shape": [4]}, config, out)
    assert [stage.mesh_shares for stage in Manifest.load(out).program().stages] == [((5, 3),), ((1, 3),)]
    specs = [[str(stage.outputs[1].spec) for stage in result.plan.stages[:1]]]
    specs += [[str(x.spec) for x in result.plan.stages[1].inputs]]
    assert specs == [["(R, S0)"], ["(R, S0)"] * 2]
    assert {"all_gather", "reduce_scatter"} <= set(result.plan.collectives())
    first, second, *_ = result.weight_bytes_per_rank
    assert first * 3 == second * 5  # all weights of the stage are split
    ids = np.array([0, 23, 15, 14, -1, 7], np.int32)
    np.savez(tmp_path / "inputs.npz", ids)
    done = launch(4, Path(__file__).with_name("serve_pipeline.py"), out, tmp_path / "inputs.npz", tmp_path, 100)
    assert done.returncode == 0, done.stderr
    sent = 0
    for rank in range(4):
        with np.load(tmp_path / f"rank{rank}.npz") as data:
            *answers, profile = (data[name] for name in data.files)
        for shift, got in zip([0, 0, 1, 2], answers, strict=True):
            rolled = np.roll(ids, shift)
            (want,) = evaluate_graph(graph, [np.where(rolled < 0, rolled + 24, rolled)])
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        sent += int(profile[0])
        assert profile[1]
    assert sent == sum(one.nbytes for one in result.plan.pipeline.boundaries) * 2


def test_a_given_plan_brings_its_shares(built, tmp_path):
    graph, _, result = built
    even = {key: value for key, value in SHARES.items() if key != "shares"}
    validated = hidet.distributed.make_plan(graph, even, {})
    assert not validated.stages[0].mesh.is_uneven()
    other = {**SHARES, "shares": {"gpu": [3, 5]}}
    with pytest.raises(PlanError, match="mesh"):
        hidet.distributed.auto_parallel(graph, other, {}, tmp_path / "artifacts", plan=result.plan)


def test_budgets_may_be_given_for_each_device(tmp_path):
    """A plan that fits two unlike budgets, its report, building, and the plan when it is given; less is refused."""
    x = hidet.symbol([2, 64], "float32", "cpu")
    rng = np.random.default_rng(0)
    up, down = (hidet.asarray(rng.standard_normal(shape, np.float32)) for shape in ((64, 256), (256, 64)))
    graph = hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, up)), down), [x])
    budgets = [95_000, 60_000]  # of weights of 131,072 bytes
    config = {**SHARES, "shares": "auto"}
    result = hidet.distributed.auto_parallel(graph, config, {"mem_budget": budgets}, tmp_path / "artifacts")
    (stage,) = result.plan.stages
    assert stage.mesh.is_uneven()
    ranks = json.loads((tmp_path / "artifacts/report.json").read_text())["memory"]["ranks"]
    assert [rank["budget_bytes"] for rank in ranks] == budgets
    assert all(rank["peak_bytes"] <= rank["budget_bytes"] for rank in ranks)
    assert ranks[0]["peak_bytes"] > budgets[1]
    even = {key: value for key, value in SHARES.items() if key != "shares"}
    given = {**even, "shares": {"gpu": list(stage.mesh.shares[0])}}
    again = hidet.distributed.auto_parallel(graph, given, {"mem_budget": budgets}, tmp_path / "again", plan=result.plan)
    assert again.weight_bytes_per_rank == result.weight_bytes_per_rank
    with pytest.raises(InfeasibleError):
        hidet.distributed.auto_parallel(
            graph, given, {"mem_budget": budgets[::-1]}, tmp_path / "none", plan=result.plan
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([8, 0], r"\['mem_budget'\]\[1\] must be whole bytes above 0; got 0"),
        ([8, True], r"\['mem_budget'\]\[1\] must be whole bytes"),
        ([8], "has 2 devices; memory budgets are given of 1"),
        ([], "a list with those of each device; got"),
        ("8", r"mem_budget.* must be"),
    ],
)
def test_bad_budgets_of_devices_are_refused(given, says):
    x = hidet.symbol([4, 8], "float32", "cpu")
    with pytest.raises(ConfigError, match=says):
        hidet.distributed.make_plan(hidet.trace_from(ops.relu(x), [x]), {"mesh_shape": [2]}, {"mem_budget": given})


def test_devices_at_one_coordinate_of_the_first_axis_keep_to_the_least_of_their_budgets():
    cluster = with_memory_of_each(builtin("cpu", DeviceMesh((3, 2))), [7, 5, 5, 6, 9, 8])
    assert cluster.memory_bytes == (5, 5, 8)
    assert [group.count for group in cluster.groups] == [2, 1]
    alike = with_memory_of_each(builtin("cpu", DeviceMesh((3,))), [4, 4, 4])
    assert alike.memory_bytes == (4, 4, 4)
    assert not alike.groups
