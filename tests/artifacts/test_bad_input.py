"""Invalid input that is refused before any collective starts, with a message that says what is wrong and where."""

import dataclasses
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from tests.imports import CHECKED_IMPORTS

import hidet_dist  # noqa: F401
from hidet_dist.artifacts import Manifest
from hidet_dist.config import DistributedConfig
from hidet_dist.errors import (
    ArtifactError,
    ConfigError,
    HidetDistError,
    InfeasibleError,
    InputError,
    PlanError,
)
from hidet_dist.export.write import replacing
from hidet_dist.machine import builtin, save_machine
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh


def linear(batch=4):
    """x @ w + b, small."""
    rng = np.random.default_rng(0)
    x = hidet.symbol([batch, 8], "float32", "cpu")
    w, b = (hidet.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((8, 6), (6,)))
    return hidet.trace_from(hidet.ops.matmul(x, w) + b, [x])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    out = tmp_path_factory.mktemp("artifacts") / "linear"
    hidet.distributed.auto_parallel(linear(), {"mesh_shape": [1]}, {}, out)
    return out


@pytest.fixture
def copy(artifacts, tmp_path):
    """Artifacts that a test may damage."""
    return Path(shutil.copytree(artifacts, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("distributed", "optimization", "says"),
    [
        ({"mesh_shape": [2], "mesh": 1}, {}, "'mesh'"),
        ({}, {}, "mesh_shape"),
        ({"mesh_shape": [0]}, {}, "0"),
        ({"mesh_shape": "2"}, {}, "'2'"),
        ({"mesh_shape": [2], "machine": "abacus"}, {}, "abacus"),
        ({"mesh_shape": [2]}, {"memory": 1}, "'memory'"),
        ({"mesh_shape": [2]}, {"mem_budget": 0.6}, "0.6"),
        ({"mesh_shape": [2]}, {"mem_budget": -1}, "above 0; got -1"),
        ({"mesh_shape": [2]}, {"mem_budget": 0}, "above 0; got 0"),
        ({"mesh_shape": [2]}, {"mem_budget": float("nan")}, "got nan"),
        ({"mesh_shape": [2, 8], "machine": "dgx-a100"}, {}, "has 8 devices; .* needs 16"),
        ({"mesh_shape": [4], "machine": builtin("cpu", DeviceMesh((2,)))}, {}, r"has the mesh .*2.* asks for .*4"),
        (
            {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "machine": builtin("cpu", DeviceMesh((2,), ("node",)))},
            {},
            "has the mesh .*node.* asks for .*gpu",
        ),
        ({"mesh_shape": [2], "machine": ["cpu"]}, {}, r"got \['cpu'\]"),
        ({"mesh_shape": [2]}, {"target": "abacus"}, "abacus"),
        ({"mesh_shape": [2]}, {"solver": "abacus"}, "abacus"),
        ({"mesh_shape": [2]}, {"solver_gap": 2}, "2"),
        ({"mesh_shape": [2]}, {"solver_time_limit_seconds": 0}, "0"),
        ({"mesh_shape": [2]}, {"recompile": "yes"}, "yes"),
        ({"mesh_shape": [2]}, {"input_specs": ["(S0, X)"]}, "X"),
        ({"mesh_shape": [2]}, {"input_specs": ["(S0, R)", None]}, "2 input specs"),
        ({"mesh_shape": [3]}, {"output_specs": ["(S0, R)"]}, "output 0"),
    ],
)
def test_unfit_configs_are_refused_and_nothing_is_written(distributed, optimization, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        hidet.distributed.auto_parallel(linear(), distributed, optimization, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("bandwidth_bytes_per_second", 0), ("bandwidth_bytes_per_second", -1.5), ("latency_seconds", float("nan"))],
)
def test_a_machine_file_with_invalid_figures_is_refused(key, value, tmp_path):
    file = tmp_path / "machine.json"
    save_machine(builtin("cpu", DeviceMesh((2,))), file)
    data = json.loads(file.read_text())
    data["links"][0][key] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"{file} has an invalid figure: .* got {value!r}"):
        hidet.distributed.auto_parallel(linear(), {"mesh_shape": [2], "machine": str(file)}, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [file]


def test_a_machine_may_name_the_axes():
    cluster = builtin("cpu", DeviceMesh((2,), ("node",)))
    assert DistributedConfig.parse({"mesh_shape": [2], "machine": cluster}).mesh.axis_names == ("node",)


def test_a_graph_is_expected(tmp_path):
    with pytest.raises(ConfigError, match="Module"):
        hidet.distributed.auto_parallel(hidet.nn.Module(), {"mesh_shape": [1]}, {}, tmp_path / "out")


def test_symbolic_dims_without_a_size_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="symbolic dim batch: say what size to plan for"):
        hidet.distributed.auto_parallel(linear(batch="batch"), {"mesh_shape": [1]}, {}, tmp_path / "out")


def test_an_infeasible_budget_states_the_least_that_would_do(tmp_path):
    rng = np.random.default_rng(0)
    x = hidet.symbol([4, 64], "float32", "cpu")
    w, b = (hidet.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((64, 96), (96,)))
    arguments = hidet.trace_from(hidet.ops.matmul(x, w) + b, [x]), {"mesh_shape": [2]}
    with pytest.raises(InfeasibleError, match=r"at least [0-9]+ bytes") as caught:
        hidet.distributed.auto_parallel(*arguments, {"mem_budget": 107}, tmp_path / "out")
    least = caught.value.least_budget
    # w splits in two and so does b; x and the output are whole: there is more, but not less.
    assert least > (64 * 96 + 96) * 4 / 2 + (4 * 64 + 4 * 96) * 4
    with pytest.raises(InfeasibleError, match=f"at least {least} bytes"):
        hidet.distributed.auto_parallel(*arguments, {"mem_budget": least * 9 // 10}, tmp_path / "out")
    result = hidet.distributed.auto_parallel(*arguments, {"mem_budget": least}, tmp_path / "out")
    assert result.weight_bytes_per_rank == [(64 * 96 + 96) * 4 // 2] * 2


def test_a_plan_fits_its_own_graph_only(artifacts):
    plan = hidet.distributed.Plan.load(artifacts / "plan.json")
    with pytest.raises(PlanError, match="made for the graph"):
        hidet.distributed.partition(linear(batch=2), plan)
    with pytest.raises(PlanError, match="takes a Plan"):
        hidet.distributed.partition(linear(), "plan.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 3}', '{"format": 99, "stages": []}', '{"format": 3, "stages": [3]}']
)
def test_a_file_that_is_no_plan_is_refused(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError):
        hidet.distributed.Plan.load(path)
    with pytest.raises(PlanError, match="Cannot read"):
        hidet.distributed.Plan.load(tmp_path / "other.json")


def test_a_foreign_folder_is_left_alone(tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("...")
    with pytest.raises(ArtifactError, match="is not empty"):
        hidet.distributed.auto_parallel(linear(), {"mesh_shape": [1]}, {}, out)
    assert [path.name for path in out.iterdir()] == ["chapter1.tex"]
    hidet.distributed.auto_parallel(linear(), {"mesh_shape": [1]}, {"recompile": True}, out)
    assert (out / "manifest.json").exists()
    assert (tmp_path / "thesis.before-0" / "chapter1.tex").read_text() == "..."


def test_own_artifacts_are_replaced_whole(copy):
    (copy / "stray").write_text("")
    hidet.distributed.auto_parallel(linear(), {"mesh_shape": [2]}, {}, copy)
    assert not (copy / "stray").exists()
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_artifacts_of_another_format_are_replaced_too(copy):
    path = copy / "manifest.json"
    body = json.loads(path.read_text())
    body["format"] = 1
    body.pop("checksum")
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "checksum": checksum}))
    with pytest.raises(ArtifactError, match="has format 1, and this version reads"):
        hidet.distributed.load_partition(copy, 0)
    hidet.distributed.auto_parallel(linear(), {"mesh_shape": [1]}, {}, copy)
    with hidet.distributed.load_partition(copy, 0) as model:
        model(X)


def test_loading_while_builds_replace_the_folder(copy, tmp_path):
    """Each load gives the artifacts that were there at some time: never none, and never parts of two."""
    other = tmp_path / "other"
    x = hidet.symbol([4, 8], "float32", "cpu")
    hidet.distributed.auto_parallel(hidet.trace_from(hidet.ops.exp(x), [x]), {"mesh_shape": [1]}, {}, other)
    original = shutil.copytree(copy, tmp_path / "original")
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            for source in (other, original):
                with replacing(copy) as folder:
                    shutil.copytree(source, folder, dirs_exist_ok=True)

    builder = threading.Thread(target=replace)
    builder.start()
    try:
        whole = evaluate_graph(linear(), [X])[0]
        for _ in range(30):
            with hidet.distributed.load_partition(copy, 0) as model:
                y = model(X)
                np.testing.assert_allclose(y, np.exp(X) if y.shape == (4, 8) else whole, rtol=1e-4, atol=1e-4)
    finally:
        stop.set()
        builder.join(60)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name or "before" in path.name]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ArtifactError, match="not a folder"):
        hidet.distributed.auto_parallel(linear(), {"mesh_shape": [1]}, {}, tmp_path / "out")


def test_an_interrupted_build_leaves_nothing_that_loads(tmp_path):
    """Killed while the artifacts are written: the destination does not exist, and what lies beside it does not load.

    The process, which takes seconds to import hidet, checks that before, for tests/test_package.py.
    """
    program = f"""
import hidet, hidet_dist
{CHECKED_IMPORTS}
import os, signal
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import hidet_dist.export.write as write
from hidet_dist.artifacts.manifest import Manifest
Manifest.save = lambda self, folder: os.kill(os.getpid(), signal.SIGKILL)
from tests.artifacts.test_bad_input import linear
hidet.distributed.auto_parallel(linear(), {{"mesh_shape": [1]}}, {{}}, {str(tmp_path / "out")!r})
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.iterdir()
    with pytest.raises(ArtifactError, match="holds no artifacts"):
        hidet.distributed.load_partition(partial, 0)


def files():
    return ["stage0/launcher.so", "kernels/*.so", "weights/rank0.safetensors"]


@pytest.mark.parametrize("name", files())
def test_missing_and_altered_files_are_named(copy, name):
    path = sorted(copy.glob(name))[0]
    name = path.relative_to(copy).as_posix()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} was altered"):
        hidet.distributed.load_partition(copy, 0)
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing"):
        hidet.distributed.load_partition(copy, 0)


def test_an_altered_manifest_is_refused(copy):
    path = copy / "manifest.json"
    body = json.loads(path.read_text())
    body["world_size"] = 7
    path.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="altered"):
        hidet.distributed.load_partition(copy, 0)
    body["format"] = 99
    path.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="format 99"):
        hidet.distributed.load_partition(copy, 0)
    path.write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        hidet.distributed.load_partition(copy, 0)


@pytest.mark.parametrize(("key", "value", "says"), [("hidet_version", "0.6.0", "0.6.0"), ("abi_version", 99, "99")])
def test_artifacts_of_other_versions_are_refused(copy, key, value, says):
    manifest = dataclasses.replace(Manifest.load(copy), **{key: value})
    manifest.save(copy)
    with pytest.raises(ArtifactError, match=says):
        hidet.distributed.load_partition(copy, 0)


def test_rank_and_world_size_must_be_the_artifacts(artifacts, monkeypatch):
    for rank in (1, "0", True):
        with pytest.raises(ConfigError, match=f"no rank {rank!r}"):
            hidet.distributed.load_partition(artifacts, rank)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="built for 1 ranks, but the world size is 2"):
        hidet.distributed.load_partition(artifacts)


X = np.ones((4, 8), np.float32)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), "takes 1 inputs; 0"),
        ((X, X), "2 were given"),
        ((X.astype(np.float64),), "must be float32; got float64"),
        ((X[:3],), r"must have the shape \[4, 8\]; got \[3, 8\]"),
        (("text",), "is a str"),
    ],
)
def test_unfit_inputs_are_refused(artifacts, inputs, says):
    with hidet.distributed.load_partition(artifacts, 0) as model, pytest.raises(InputError, match=says):
        model(*inputs)


def test_outputs_are_of_the_inputs_kind_and_strides_do_not_matter(artifacts):
    whole = evaluate_graph(linear(), [X])[0]
    with hidet.distributed.load_partition(artifacts, 0) as model:
        for x, kind in (
            (X, np.ndarray),
            (np.ones((8, 4), np.float32).T, np.ndarray),
            (torch.ones(4, 8), torch.Tensor),
            (hidet.asarray(X), hidet.Tensor),
        ):
            y = model(x)
            assert isinstance(y, kind)
            np.testing.assert_allclose(np.asarray(y if kind is not hidet.Tensor else y.numpy()), whole, atol=1e-5)


def test_two_partitions_in_one_process_do_not_share_weights(artifacts, tmp_path):
    other = tmp_path / "other"
    x = hidet.symbol([4, 8], "float32", "cpu")
    w, b = hidet.asarray(np.ones((8, 6), np.float32)), hidet.asarray(np.zeros(6, np.float32))
    hidet.distributed.auto_parallel(hidet.trace_from(hidet.ops.matmul(x, w) + b, [x]), {"mesh_shape": [1]}, {}, other)
    first, second = (hidet.distributed.load_partition(path, 0) for path in (artifacts, other))
    before = first(X)
    np.testing.assert_allclose(second(X), 8.0)
    np.testing.assert_array_equal(first(X), before)
    first.close()
    first.close()
    with pytest.raises(HidetDistError, match="closed"):
        first(X)
    np.testing.assert_allclose(second(X), 8.0)
    second.close()


def test_artifacts_that_were_rebuilt_are_loaded_anew(tmp_path):
    """The dynamic loader knows libraries by path; a partition must not get the kernels that lay there before."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    for function, close in ((hidet.ops.exp, False), (hidet.ops.tanh, True), (hidet.ops.sqrt, True)):
        graph = hidet.trace_from(function(x), [x])
        hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "out")
        model = hidet.distributed.load_partition(tmp_path / "out", 0)
        np.testing.assert_allclose(model(X), evaluate_graph(graph, [X])[0], atol=1e-6)
        if close:
            model.close()
