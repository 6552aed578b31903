"""Programs of two ranks on the stand-ins for CUDA and NCCL, with kernels that run in their turn on the stream."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import as_cuda, compile_against, on_stream, serve

from hidet_dist import auto_parallel
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.compile import compile_program
from hidet_dist.export.write import BuiltProgram, write_artifacts
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.targets import TARGETS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 8, dtype=np.float32)
SHARED = {"FAKE_CUDA_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def results(stand_ins: Path, mode: str, folder: Path) -> list[Any]:
    found = serve(stand_ins, mode, folder, 2, **SHARED)
    for own in found:
        assert not isinstance(own, str), own
    return found


def check_calls(stand_ins: Path, folder: Path, inputs: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Each rank's answers, kernel by kernel and as a graph: captured in the second call of each shape."""
    np.savez(f"{folder}.npz", *inputs)
    for as_graph in (False, True):
        as_cuda(folder, cuda_graph=as_graph)
        for answers in results(stand_ins, "calls", folder):
            for y, whole in zip(answers, expected, strict=True):
                np.testing.assert_allclose(np.float32(y), whole, rtol=1e-4, atol=1e-4)


def test_collectives_run_beside_kernels(stand_ins: Path, tmp_path: Path) -> None:
    """Each rank holds half of every weight, which is gathered while the layer before computes."""
    rows, width, layers = 6, 16, 3
    machine = Cluster(DeviceMesh((2,)), (Link(1e-9, 1e9),), Device("toy", {"default": 2e9}, 1e12, 2**30, 0.0, True))
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((width, width)).astype(np.float32) / 4 for _ in range(layers)]
    x = y = hidet.symbol([rows, width], "float32", "cpu")
    for w in weights:
        y = ops.tanh(ops.matmul(y, hidet.asarray(w))) + y
    graph = normalize(hidet.trace_from(y, [x]))
    pins = {f"w{number}": "(S0, R)" for number in range(layers)}
    pins |= {f"op:Matmul#{number}": "(S0, R), (R, R) -> (S0, R)" for number in range(layers)}
    plan = search(graph, machine, pins=pins, report=False).plan
    program = partition_graph(graph, plan.stages[0])
    folder = tmp_path / "artifacts"
    folder.mkdir()
    built = BuiltProgram(plan, [(program, compile_program(program, overlap=machine))])
    (stage,) = write_artifacts(folder, {"main": built}).program().stages
    assert {"StartAllGather", "Wait"} <= set(stage.kernels)
    on_stream(folder, stand_ins)

    def whole(y: np.ndarray) -> np.ndarray:
        for w in weights:
            y = np.tanh(y @ w) + y
        return y

    inputs = [rng.standard_normal((rows, width)).astype(np.float32) for _ in range(5)]
    check_calls(stand_ins, folder, inputs, [whole(x) for x in inputs])


def test_sizes_that_are_not_known(stand_ins: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((8, 16), (16, 8)))
    x = hidet.symbol(["batch", 8], "float32", "cpu")
    graph = hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, hidet.asarray(up))), hidet.asarray(down)) + x, [x])
    pins = {"w0": "(R, S0)", "w1": "(S0, R)", "op:Matmul#0": "?, (R, S0) -> ?", "op:Matmul#1": "?, (S0, R) -> ?"}
    folder = tmp_path / "artifacts"
    result = auto_parallel(graph, {"mesh_shape": [2]}, {"symbols": {"batch": 4}, "pins": pins}, folder)
    assert result.communications
    on_stream(folder, stand_ins)
    inputs = [rng.standard_normal((batch, 8)).astype(np.float32) for batch in (3, 5, 3, 5, 3, 5, 1, 3)]
    check_calls(stand_ins, folder, inputs, [np.maximum(x @ up, 0) @ down + x for x in inputs])


class AsOnGpus:
    """Programs as for GPUs, of kernels for the CPU."""

    device = "cpu"
    record = replace(TARGETS["cpu"], keeps_nan=False)


@pytest.mark.slow
def test_extremes_of_ranks_keep_nan(stand_ins: Path, tmp_path: Path) -> None:
    """NCCL's maxima and minima of floats drop NaN, as the stand-in's do."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    dtypes = ("bfloat16", "float32")
    results = [
        ops.cast(reduction(ops.cast(x, dtype), [0]), "float32") for dtype in dtypes for reduction in (ops.max, ops.min)
    ]
    graph = normalize(hidet.trace_from(ops.concat(results, 0), [x]))
    machine = Cluster(DeviceMesh((2,)), (Link(1e-9, 1e9),), Device("toy", {"default": 2e9}, 1e12, 2**30, 0.0))
    scattered, whole = "(S0, R) -> (S0)", "(S0, R) -> (R)"
    pins = {f"op:ReduceMax#{number}": (scattered, whole)[number % 2] for number in range(len(dtypes))}
    pins |= {f"op:ReduceMin#{number}": (whole, scattered)[number % 2] for number in range(len(dtypes))}
    plan = search(graph, machine, pins=pins, report=False).plan
    program = partition_graph(graph, plan.stages[0], target=AsOnGpus())
    folder = tmp_path / "artifacts"
    folder.mkdir()
    write_artifacts(folder, {"main": BuiltProgram(plan, [(program, compile_program(program))])})
    on_stream(folder, stand_ins)
    values = np.random.default_rng(0).integers(-9, 9, (4, 8)).astype(np.float32)
    values[0, 0] = values[3, 1] = values[:, 2] = values[1, 7] = np.nan
    values[:, 3], values[2, 4] = -np.inf, np.inf
    kinds = [line.partition("(")[0] for line in program.communications()]
    assert set(kinds) == {"all_gather", "all_to_all"}
    assert kinds.count("all_to_all") == len(dtypes)
    expected = np.concatenate([values.max(0), values.min(0)] * len(dtypes))
    check_calls(stand_ins, folder, [values], [expected])


@pytest.fixture
def gathered(stand_ins: Path, tmp_path: Path) -> Path:
    """x + w on half of the rows each, all of which are gathered; its kernel is the stand-in, of two candidates."""
    x = hidet.symbol([8, 8], "float32", "cpu")
    config = {"pins": {"op:0": "(S0, R), (R) -> (S0, R)"}, "input_specs": ["(S0, R)"], "output_specs": ["(R, R)"]}
    folder = tmp_path / "artifacts"
    auto_parallel(hidet.trace_from(x + hidet.asarray(W), [x]), {"mesh_shape": [2]}, config, folder)
    (stage,) = Manifest.load(folder).program().stages
    # What is gathered is reshaped, which launches nothing.
    assert [stage.kernels[launch.kernel] for launch in stage.launches][1:] == ["AllGather", "Reshape"]
    add = stage.launches[0].kernel
    compile_against(stand_ins, "stand_in_kernel.cpp", folder / stage.kernel_file(add))
    return as_cuda(folder, candidates=tuple(2 if kernel == add else 1 for kernel in range(len(stage.kernels))))


def test_ranks_take_the_candidates_that_the_first_one_finds(stand_ins: Path, gathered: Path) -> None:
    whole = np.concatenate([X, X + 100]) + W
    for cuda_graph in (False, True):
        as_cuda(gathered, cuda_graph=cuda_graph)
        for _ in range(2):  # the second time it is remembered
            for times, answer in results(stand_ins, "timed", gathered):
                assert times["Add"] < 0.04
                np.testing.assert_array_equal(np.float32(answer), whole)
    for choice in (gathered / "choices").iterdir():
        body = json.loads(choice.read_text())
        assert sorted(body["chosen"]) == [0, 0, 1]
        choice.write_text(json.dumps({**body, "chosen": [0, 0, 0]}))
    for times, answer in results(stand_ins, "timed", gathered):
        assert times["Add"] >= 0.04
        np.testing.assert_array_equal(np.float32(answer), whole)
