"""Serving on CUDA devices, on stand-ins for the driver and NCCL: what is copied, launched, captured, chosen, timed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import hidet
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import as_cuda, compile_against, serve

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.errors import ConfigError
from hidet_dist.runtime.cuda import nccl
from hidet_dist.runtime.cuda.driver import check_connections

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 8, dtype=np.float32)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def added(stand_ins: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x + w, its kernel replaced by the stand-in; for the CPU yet."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    folder = tmp_path_factory.mktemp("artifacts") / "added"
    graph = hidet.trace_from(x + hidet.asarray(W), [x])
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, folder)
    (stage,) = Manifest.load(folder).program().stages
    assert len(stage.kernels) == 1
    compile_against(stand_ins, "stand_in_kernel.cpp", folder / stage.kernel_file(0))
    return folder


@pytest.fixture
def program(added: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(added, tmp_path / "artifacts"))


@pytest.mark.parametrize("as_graph", [False, True])
def test_answers_come_from_host_and_device_memory_alike(stand_ins: Path, program: Path, as_graph: bool) -> None:
    (found,) = serve(stand_ins, "answers", as_cuda(program, cuda_graph=as_graph))
    assert not isinstance(found, str), found
    for y in found:
        np.testing.assert_array_equal(np.float32(y), X + W)


def test_tensors_elsewhere_are_refused(stand_ins: Path, program: Path) -> None:
    (found,) = serve(stand_ins, "refusals", as_cuda(program))
    messages, answer = found
    assert "must be on the CPU or CUDA device 0; it is on cuda 1" in messages[0]
    assert "must be contiguous in row-major order on a CUDA device" in messages[1]
    assert "must be float32" in messages[2]
    np.testing.assert_array_equal(np.float32(answer), X + W)


def test_a_profile_is_by_the_devices_clock(stand_ins: Path, program: Path) -> None:
    ((call, kernel, begin),) = serve(stand_ins, "profile", as_cuda(program))
    assert 0.04 <= kernel <= call  # the stand-in's first candidate takes 40 ms
    assert 0 <= begin <= call


def test_weights_workspace_and_staging_are_all_that_is_held(stand_ins: Path, program: Path) -> None:
    ((before, after),) = serve(stand_ins, "memory", as_cuda(program))
    (stage,) = Manifest.load(program).program().stages
    assert 256 <= before <= 256 + max(1, stage.workspace_bytes.get("cpu", 0))  # w takes 32, rounded up
    assert after - before == 2 * X.nbytes


def test_memory_is_freed_once_no_work_uses_it(stand_ins: Path, program: Path) -> None:
    assert serve(stand_ins, "cleared", as_cuda(program), FAKE_CUDA_CLEARS_LATE="1") == [True]


def test_the_fastest_candidate_is_chosen_once(stand_ins: Path, program: Path) -> None:
    as_cuda(program, candidates=(2,))
    for _ in range(2):
        ((_, kernel, _),) = serve(stand_ins, "profile", program)
        assert kernel < 0.04
    (choice,) = (program / "choices").iterdir()
    body = json.loads(choice.read_text())
    assert body["chosen"] == [1]
    assert body["device"] == "Stand-in"
    # What is remembered is what counts.
    choice.write_text(json.dumps({**body, "chosen": [0]}))
    ((_, kernel, _),) = serve(stand_ins, "profile", program)
    assert kernel >= 0.04


def test_code_for_another_architecture_is_refused(stand_ins: Path, program: Path) -> None:
    (error,) = serve(stand_ins, "answers", as_cuda(program, "sm_80"))
    assert "built for sm_80, but CUDA device 0 (Stand-in) is sm_90" in error


def test_a_machine_without_devices_is_named(stand_ins: Path, program: Path) -> None:
    as_cuda(program)
    (error,) = serve(stand_ins, "answers", program, FAKE_CUDA_DEVICES="0")
    assert "ConfigError: There is no CUDA device" in error
    (error,) = serve(stand_ins, "answers", program, **{nccl.DRIVER_VARIABLE: "libnosuchcuda.so.1"})
    assert "is a CUDA driver installed?" in error


def test_streams_of_a_pipeline_must_not_share_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (None, "8", "32"):
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if allowed is not None:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", allowed)
        check_connections()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1, but a pipeline needs at least 8"):
        check_connections()


def test_two_ranks_share_a_product(stand_ins: Path, tmp_path: Path) -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    w = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.asarray(w)), [x])
    config = {"pins": {"op:0": "(R, S0), (S0, R) -> (R, R)"}, "input_specs": ["(R, S0)"]}
    folder = tmp_path / "artifacts"
    result = hidet.distributed.auto_parallel(graph, {"mesh_shape": [2]}, config, folder)
    assert result.communications
    as_cuda(folder)
    for devices in ("1", "2"):
        more = {"FAKE_CUDA_DEVICES": devices, "FAKE_CUDA_SYNCHRONOUS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        for found in serve(stand_ins, "product", folder, 2, **more):
            assert not isinstance(found, str), found
            for y in found:
                np.testing.assert_allclose(np.float32(y), X @ w, rtol=1e-5, atol=1e-5)
