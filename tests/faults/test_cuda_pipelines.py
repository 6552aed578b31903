"""Pipelines on CUDA devices, served by real processes on stand-ins for the driver and NCCL, whose messages block.

The kernels are the CPU's, and run in their turn on the stream.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hidet_dist.artifacts import Manifest

from .conftest import SHORT_SECONDS, Rank, Start, load_all
from .test_pipelines import MASK, RANKS, X, assert_right, build_pipeline, kill_within_a_stream

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "cuda"))
from stand_in_artifacts import as_cuda, doubles, on_stream, weights_in_rows

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# Columns cross between stages, and the collectives are not those in place of the host.
STAGES = [
    {
        "operators": [0, 3],
        "mesh_shape": [2],
        "pins": {"w0": "(R, S0)", "y0": "(R, S0)", "op:0": "(R, R), (R, S0) -> (R, S0)"},
    },
    {"operators": [3, 5], "mesh_shape": [1]},
    {
        "operators": [5, 8],
        "mesh_shape": [2],
        "pins": {"w0": "(S0, R)", "x0": "(R, S0)", "x1": "(S0, R)", "op:0": "(R, S0), (S0, R) -> (R, R)"},
    },
]

StartOnDevices = Callable[[], list[Rank]]


@pytest.fixture(scope="module")
def pipeline(stand_ins: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with weights_in_rows():
        folder = build_pipeline(tmp_path_factory.mktemp("pipelines") / "all", stages=STAGES)
    return as_cuda(on_stream(folder, stand_ins))


@pytest.fixture
def start_on_devices(start: Start, stand_ins: Path, tmp_path: Path) -> StartOnDevices:
    """Start ranks with a device each."""
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    own = {**doubles(stand_ins, exchange), "KERNELS_OF_THE_HOST": "1"}
    return lambda: start(RANKS, environment=[own] * RANKS)


def _call_all(ranks: list[Rank], x: np.ndarray = X) -> None:
    for rank in ranks:
        rank.send("call_typed", inputs=[x.tolist(), MASK.tolist()], dtypes=["float32", "float32"])
    for rank in ranks:
        assert_right(rank.answer(), x)


def _call_on_devices(ranks: list[Rank], x: np.ndarray, results: Sequence[int] = range(RANKS)) -> None:
    for number, rank in enumerate(ranks):
        shapes = [X.shape] * 2 if number in results else []
        rank.send("call_on_device", inputs=[x.tolist(), MASK.tolist()], shapes=shapes)
    for number, rank in enumerate(ranks):
        answer = rank.answer()
        if number in results:
            assert_right(answer, x)
        else:
            assert answer.get("result") == [], answer


@pytest.mark.slow
def test_ranks_give_the_results_until_one_is_killed(start_on_devices: StartOnDevices, pipeline: Path) -> None:
    ranks = start_on_devices()
    load_all(ranks, pipeline)
    _call_all(ranks)
    batches = [(X + n).tolist() for n in range(7)]
    for rank in ranks:
        rank.send("stream", batches=[[x, MASK.tolist()] for x in batches])
    for rank in ranks:
        answer = rank.answer()
        assert "error" not in answer, answer
        for x, result in zip(batches, answer["result"], strict=True):
            assert_right({"result": result}, np.array(x, np.float32))
    for n in range(3):
        _call_on_devices(ranks, X * n)
    for rank in ranks:
        rank.send("trace", inputs=[X.tolist(), MASK.tolist()])
    profiles = [rank.answer()["result"] for rank in ranks]
    assert all(0 < one["busy"] < 1 for one in profiles), profiles
    kill_within_a_stream(ranks, 2)


@pytest.mark.slow
def test_stages_are_graphs_and_the_last_one_alone_gives_results(
    start_on_devices: StartOnDevices, pipeline: Path, tmp_path: Path
) -> None:
    """Each stage is captured in its second run, while messages are pending on other streams."""
    copy = as_cuda(Path(shutil.copytree(pipeline, tmp_path / "copy")), cuda_graph=True)
    manifest = Manifest.load(copy)
    program = manifest.program()
    assert program.pipeline is not None
    last = replace(program, pipeline=replace(program.pipeline, results="last"))
    replace(manifest, programs=(last,)).save(copy)
    ranks = start_on_devices()
    load_all(ranks, copy)
    for n in range(4):
        _call_on_devices(ranks, X + n, range(3, 5))
    for rank in ranks:
        rank.send("stream", batches=[[(X * n).tolist(), MASK.tolist()] for n in range(9)])
    answers = [rank.answer() for rank in ranks]
    assert [answer.get("result") for answer in answers[:3]] == [[None] * 9] * 3, answers
    for answer in answers[3:]:
        for n, result in enumerate(answer["result"]):
            assert_right({"result": result}, X * np.float32(n))
    for rank in ranks:
        rank.do("close")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 4])
def test_a_rank_of_the_first_or_last_stage_is_killed(
    start_on_devices: StartOnDevices, pipeline: Path, victim: int
) -> None:
    ranks = start_on_devices()
    load_all(ranks, pipeline)
    kill_within_a_stream(ranks, victim)


@pytest.mark.slow
def test_a_rank_that_stops_is_named_within_the_time_out(start_on_devices: StartOnDevices, pipeline: Path) -> None:
    ranks = start_on_devices()
    load_all(ranks, pipeline, SHORT_SECONDS)
    _call_all(ranks)
    for rank in (*ranks[:2], *ranks[3:]):
        rank.send("stream_forever", batch=[X.tolist(), MASK.tolist()])
    for rank in (*ranks[:2], *ranks[3:]):
        answer = rank.answer()
        assert answer.get("error") == "CommunicationError" and answer["ranks"] == [2], answer
