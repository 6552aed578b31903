"""Pipelines served by real processes: right on every rank, and ended on all of them when one fails."""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import ArtifactError
from hidet_dist.spec.pipeline import Port

from .conftest import SHORT_SECONDS, TIMEOUT_SECONDS, Rank, Start, assert_blames, load_all

BATCH, MICRO_BATCHES = 4, 2
RNG = np.random.default_rng(0)
X, MASK = RNG.uniform(-1, 1, (BATCH, 8)).astype(np.float32), RNG.uniform(-1, 1, (1, 8)).astype(np.float32)
W = [RNG.uniform(-1, 1, (8, 8)).astype(np.float32) for _ in range(3)]
STAGES: list[dict[str, Any]] = [
    {"operators": [0, 3], "mesh_shape": [2], "pins": {"w0": "(R, S0)"}},
    {"operators": [3, 5], "mesh_shape": [1]},
    {"operators": [5, 8], "mesh_shape": [2], "pins": {"w0": "(S0, R)"}},
]
RANKS = 5


def _expected(x: np.ndarray) -> list[np.ndarray]:
    """Both outputs: the last stage's, and the second one's."""
    h1 = np.maximum(x @ W[0], 0) * MASK
    h2 = np.exp(h1 @ W[1])
    return [np.tanh(h2 @ W[2] + h1), h2]


def build_pipeline(folder: Path, **config: Any) -> Path:
    """Build three stages for two micro-batches; the first one's result is read by both others."""
    x, mask = hidet.symbol([BATCH, 8], "float32", "cpu"), hidet.symbol([1, 8], "float32", "cpu")
    w0, w1, w2 = map(hidet.asarray, W)
    h1 = hidet.ops.relu(hidet.ops.matmul(x, w0)) * mask
    h2 = hidet.ops.exp(hidet.ops.matmul(h1, w1))
    graph = hidet.trace_from([hidet.ops.tanh(hidet.ops.matmul(h2, w2) + h1), h2], [x, mask])
    given = {"stages": STAGES, "micro_batches": MICRO_BATCHES, **config}
    hidet_dist.auto_parallel(graph, {"mesh_shape": [RANKS]}, given, folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline(tmp_path_factory.mktemp("pipelines") / "all")


def assert_right(answer: dict[str, Any], x: np.ndarray) -> None:
    """The answer has both outputs for the input."""
    assert "error" not in answer, answer
    for got, want in zip(answer["result"], _expected(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def _assert_trace(traces: Sequence[dict[str, Any]]) -> None:
    """Every rank shows its stage, and its steps on each micro-batch with the bytes that cross to other stages."""
    crossing: dict[str, dict[tuple[int, int, str], int]] = {"send": {}, "receive": {}}
    for rank, trace in enumerate(traces):
        events = trace["traceEvents"]
        (name,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
        assert name == f"rank {rank} of {RANKS}, stage {(0, 0, 1, 2, 2)[rank]}"
        steps = [event for event in events if event.get("cat") == "pipeline"]
        wanted = [f"{step} {n}" for n in range(MICRO_BATCHES) for step in ("receive", "run", "send")]
        assert [event["name"] for event in steps] == [*wanted, "results"]
        ends = [event["ts"] + event["dur"] for event in steps]
        assert all(end <= after["ts"] + 0.1 for end, after in zip(ends, steps[1:], strict=False))
        for event in steps[:-1]:
            step, _, number = event["name"].partition(" ")
            for peer, nbytes in event["args"].items():
                other = int(peer.removeprefix("bytes, rank "))
                sender, receiver = (rank, other) if step == "send" else (other, rank)
                crossing[step][sender, receiver, number] = nbytes
    assert crossing["send"] == crossing["receive"]
    # h1 goes to both later stages, h2 to the last one, in each micro-batch.
    assert sum(crossing["send"].values()) == 3 * BATCH * 8 * 4


def _call_all(ranks: Sequence[Rank], x: np.ndarray = X) -> None:
    for rank in ranks:
        rank.send("call_typed", inputs=[x.tolist(), MASK.tolist()], dtypes=["float32", "float32"])
    for rank in ranks:
        assert_right(rank.answer(), x)


def test_every_rank_gives_what_the_graph_computes(start: Start, pipeline: Path) -> None:
    """Calls, streams, profiles and refused inputs, one after the other."""
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    for rank in ranks:
        rank.send("warm_up", sizes={})
    assert all("error" not in rank.answer() for rank in ranks)
    _call_all(ranks)
    batches = [(X + n).tolist() for n in range(7)]
    for lazily in (False, True):
        for rank in ranks:
            rank.send("stream", batches=[[x, MASK.tolist()] for x in batches], lazily=lazily)
        for rank in ranks:
            answer = rank.answer()
            assert "error" not in answer, answer
            for x, result in zip(batches, answer["result"], strict=True):
                assert_right({"result": result}, np.array(x, np.float32))
    for number, rank in enumerate(ranks):
        rank.send(
            "call_typed", inputs=[X[: 3 if number == 1 else BATCH].tolist(), MASK.tolist()], dtypes=["float32"] * 2
        )
    answers = [rank.answer() for rank in ranks]
    assert [answer["error"] for answer in answers] == ["InputError"] * RANKS, answers
    assert "Rank 1 refused this call: Input 0 must have the shape [4, 8]" in answers[4]["message"], answers
    for rank in ranks:
        rank.send("trace", inputs=[X.tolist(), MASK.tolist()])
    profiles = [rank.answer()["result"] for rank in ranks]
    assert all(0 < one["busy"] < 1 for one in profiles), profiles
    _assert_trace([one["trace"] for one in profiles])
    _call_all(ranks, X * 2)
    for rank in ranks:
        rank.do("close")


def kill_within_a_stream(ranks: list[Rank], victim: int) -> None:
    """Kill a rank; all other ranks, of all stages, name it."""
    for rank in ranks:
        rank.send("stream_forever", batch=[X.tolist(), MASK.tolist()])
    for rank in ranks:
        assert rank.answer()["result"] == "begun"
    ranks[victim].kill()
    for number, rank in enumerate(ranks):
        if number != victim:
            assert_blames(rank.answer(), victim, "CommunicationError")
    other = ranks[1]
    other.send("call_typed", inputs=[X.tolist(), MASK.tolist()], dtypes=["float32"] * 2)
    assert_blames(other.answer(), victim, "CommunicationError")  # what has failed stays failed


@pytest.mark.parametrize("victim", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2)), 4])
def test_all_stages_name_a_rank_that_is_killed_within_a_stream(start: Start, pipeline: Path, victim: int) -> None:
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    _call_all(ranks)
    kill_within_a_stream(ranks, victim)


def test_all_stages_name_a_rank_that_stops_within_a_stream(start: Start, pipeline: Path) -> None:
    """Rank 3 finds it: it waits within its stage for rank 4, and that for rank 1, of an earlier stage."""
    ranks = start(RANKS)
    for number, rank in enumerate(ranks):
        timeout = SHORT_SECONDS if number == 3 else TIMEOUT_SECONDS
        rank.send("load", folder=str(pipeline), timeout_seconds=timeout)
    assert [rank.answer().get("result") for rank in ranks] == list(range(RANKS))
    ranks[1].do("stop_before_sending", count=20)
    for rank in ranks:
        rank.send("stream_forever", batch=[X.tolist(), MASK.tolist()])
    for rank in ranks:
        assert rank.answer()["result"] == "begun"
    for number, rank in enumerate(ranks):
        if number != 1:
            answer = rank.answer()
            assert_blames(answer, 1, "CommunicationError", "rank 1 stopped responding")
            assert ("waiting for" in answer["message"]) == ("which may be waiting itself" in answer["message"]), answer


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_all_stages_name_a_rank_that_is_stopped_at_any_moment(start: Start, pipeline: Path, seed: int) -> None:
    """The stopped rank may hold up ranks that others wait for, and all of them have the same time-out."""
    chance = random.Random(seed)
    victim = seed % RANKS
    ranks = start(RANKS)
    load_all(ranks, pipeline, timeout=SHORT_SECONDS)
    for rank in ranks:
        rank.send("stream_forever", batch=[X.tolist(), MASK.tolist()])
    for rank in ranks:
        assert rank.answer()["result"] == "begun"
    time.sleep(chance.uniform(0.0, 0.5))
    ranks[victim].kill(signal.SIGSTOP)
    answers = {number: rank.answer() for number, rank in enumerate(ranks) if number != victim}
    for answer in answers.values():
        assert_blames(answer, victim, "CommunicationError")


@pytest.mark.slow
def test_the_last_stage_alone_gives_results_over_gloo(start: Start, tmp_path: Path) -> None:
    folder = build_pipeline(tmp_path / "last", outputs="last")
    ranks = start(RANKS, environment=[{"HIDET_DIST_TRANSPORT": "gloo"}] * RANKS)
    load_all(ranks, folder)
    for _ in range(2):
        for rank in ranks:
            rank.send("call_typed", inputs=[X.tolist(), MASK.tolist()], dtypes=["float32"] * 2)
        answers = [rank.answer() for rank in ranks]
        assert [answer.get("result") for answer in answers[:3]] == [[], [], []], answers
        for answer in answers[3:]:
            assert_right(answer, X)
    for rank in ranks:
        rank.send("stream", batches=[[(X + n).tolist(), MASK.tolist()] for n in range(5)])
    answers = [rank.answer() for rank in ranks]
    assert answers[0]["result"] == [None] * 5, answers
    for n, result in enumerate(answers[4]["result"]):
        assert_right({"result": result}, X + np.float32(n))
    ranks[1].kill()
    for rank in (ranks[0], *ranks[2:]):
        rank.send("call_typed", inputs=[X.tolist(), MASK.tolist()], dtypes=["float32"] * 2)
    for rank in (ranks[0], *ranks[2:]):
        assert_blames(rank.answer(), 1, "CommunicationError")


def test_a_manifest_whose_pipeline_contradicts_itself_is_refused(pipeline: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pipeline, tmp_path / "copy"))
    manifest = Manifest.load(copy)
    known = manifest.program().pipeline
    assert known is not None
    crossing, *others = known.boundaries
    for wrong, says in (
        (dataclasses.replace(known, boundaries=tuple(others)), "must be one boundary or one input of the graph"),
        (dataclasses.replace(known, micro_batches=2**17), "1 to 65536 micro-batches"),
        (dataclasses.replace(known, results="first"), "must be one of all, last"),
        (dataclasses.replace(known, outputs=known.outputs[:1]), None),
        (
            dataclasses.replace(known, boundaries=(dataclasses.replace(crossing, source=Port(1, 0)), *others)),
            "must be later ones",
        ),
    ):
        program = dataclasses.replace(manifest.program(), pipeline=wrong)
        dataclasses.replace(manifest, programs=(program,)).save(copy)
        if says is None:  # stage 2 still reads what would be the other output
            Manifest.load(copy)
            continue
        with pytest.raises(ArtifactError, match=rf"contradicts itself: programs\[0\]\.pipeline does not fit: .*{says}"):
            hidet_dist.load_partition(copy, 0)


def test_a_batch_that_one_rank_refuses_ends_a_stream_on_all(start: Start, pipeline: Path) -> None:
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    for number, rank in enumerate(ranks):
        batches = [[X.tolist(), MASK.tolist()]] * 4
        rank.send(
            "stream", batches=[*batches, [X[:3].tolist(), MASK.tolist()], *batches] if number == 0 else batches * 2
        )
    answers = [rank.answer() for rank in ranks]
    assert answers[0]["error"] == "InputError" and "must have the shape [4, 8]" in answers[0]["message"], answers
    for answer in answers[1:]:
        assert_blames(answer, 0, "CommunicationError", "must have the shape [4, 8]")
