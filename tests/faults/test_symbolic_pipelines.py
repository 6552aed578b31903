"""Pipelines with symbolic dims served by real processes: calls and streams of many sizes, and refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest

from .conftest import Rank, Start, assert_blames, load_all

RNG = np.random.default_rng(0)
W = [RNG.uniform(-1, 1, (8, 8)).astype(np.float32) for _ in range(3)]
STAGES: list[dict[str, Any]] = [
    {"operators": [0, 3], "mesh_shape": [2], "pins": {"w0": "(R, S0)"}},
    {"operators": [3, 5], "mesh_shape": [1]},
    {"operators": [5, 10], "mesh_shape": [1]},
]
"""The tensor ``[batch * seq, 8]`` crosses to the second stage, which reads no input of the graph."""
RANKS, MICRO_BATCHES = 4, 3
SYMBOLS = {"batch": {"expected": 12, "multiple_of": 2}, "seq": 4}
SIZES = [(12, 4), (6, 1), (2, 5), (10, 3), (4, 4), (16, 7)]


def _traced() -> hidet.FlowGraph:
    """y = tanh(h2 @ w2 + h1 + shift), h2 = exp(h1 @ w1) by rows, h1 = relu(x @ w0); h2 is an output as well."""
    x, shift = hidet.symbol(["batch", "seq", 8]), hidet.symbol(["batch", 1, 8])
    w0, w1, w2 = map(hidet.asarray, W)
    batch, seq = x.shape[0], x.shape[1]
    h1 = hidet.ops.relu(x @ w0)
    h2 = hidet.ops.exp(h1.reshape([batch * seq, 8]) @ w1)
    return hidet.trace_from([hidet.ops.tanh(h2.reshape([batch, seq, 8]) @ w2 + h1 + shift), h2], [x, shift])


def _inputs(batch: int, seq: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((batch, seq, 8), (batch, 1, 8))]


def _assert_right(result: Any, inputs: Sequence[np.ndarray]) -> None:
    x, shift = inputs
    h1 = np.maximum(x @ W[0], 0)
    h2 = np.exp(h1.reshape(-1, 8) @ W[1])
    for got, want in zip(result, [np.tanh(h2.reshape(h1.shape) @ W[2] + h1 + shift), h2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "symbolic"
    config = {"stages": STAGES, "micro_batches": MICRO_BATCHES, "symbols": SYMBOLS}
    hidet_dist.auto_parallel(_traced(), {"mesh_shape": [RANKS]}, config, folder)
    return folder


def _call(ranks: Sequence[Rank], inputs: Sequence[Sequence[np.ndarray | None]]) -> list[dict[str, Any]]:
    for rank, given in zip(ranks, inputs, strict=True):
        arrays = [None if x is None else x.tolist() for x in given]
        rank.send("call_typed", inputs=arrays, dtypes=["float32"] * 2)
    return [rank.answer() for rank in ranks]


@pytest.mark.slow
def test_calls_and_streams_of_many_sizes(start: Start, pipeline: Path) -> None:
    """Batches of fewer rows than micro-batches, or that do not divide, are run in unequal or fewer micro-batches."""
    assert [x.whole_shape for x in Manifest.load(pipeline).program().stages[1].inputs] == [("(batch * seq)", 8)]
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    for rank in ranks:
        rank.send("warm_up", sizes={"batch": 8})
    assert all("error" not in rank.answer() for rank in ranks)
    for number, sizes in enumerate(SIZES):
        inputs = _inputs(*sizes, number)
        # Inputs that a stage does not read may be None.
        for answer in _call(ranks, [inputs, inputs, [None, None], [None, inputs[1]]]):
            assert "error" not in answer, answer
            _assert_right(answer["result"], inputs)
    batches = [_inputs(*sizes, number) for number, sizes in enumerate(SIZES * 3)]
    for rank in ranks:
        rank.send("stream", batches=[[x.tolist() for x in batch] for batch in batches])
    for rank in ranks:
        answer = rank.answer()
        assert "error" not in answer, answer
        for result, batch in zip(answer["result"], batches, strict=True):
            _assert_right(result, batch)


def test_sizes_that_do_not_fit_are_refused_and_the_next_call_is_made(start: Start, pipeline: Path) -> None:
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    inputs, odd, other = _inputs(4, 3), _inputs(3, 3), _inputs(6, 3)
    for given, says in (
        ([odd] * RANKS, "The symbolic dim batch must be a positive multiple of 2; dim 0 of input"),
        ([inputs, other, inputs, inputs], "The symbolic dim batch must be the same on all ranks; it is"),
        ([inputs, inputs, inputs, [None, other[1]]], "The symbolic dim batch must be the same on all ranks"),
        # Stages 1 and 2 do not read x, which alone says the length.
        ([inputs, inputs, other, inputs], "The symbolic dim batch must be the same on all ranks"),
        ([inputs, inputs, inputs, _inputs(4, 5)], "The symbolic dim seq must be the same on all ranks"),
        ([inputs, inputs, inputs, [inputs[0], other[1]]], "The symbolic dim batch must be the same everywhere"),
        ([inputs, inputs, [inputs[0][0], None], inputs], "Input 0 must have the shape [batch, seq, 8]; got [3, 8]"),
    ):
        for answer in _call(ranks, given):
            assert answer.get("error") == "InputError" and says in answer["message"], answer
    for rank in ranks:
        rank.send("warm_up", sizes={"batch": 5})
    assert all("batch must be a positive multiple of 2" in rank.answer()["message"] for rank in ranks)
    for answer in _call(ranks, [inputs] * RANKS):
        _assert_right(answer["result"], inputs)


@pytest.mark.parametrize(
    "culprit", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_size_that_differs_within_a_stream_ends_it_on_all(start: Start, pipeline: Path, culprit: int) -> None:
    """Rank 1 shares its stage with another rank; rank 2 reads no input; rank 3 reads one that earlier stages lack."""
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    batches = [_inputs(4, 3)] * 6
    for number, rank in enumerate(ranks):
        given = [*batches[:3], _inputs(8, 3), *batches[4:]] if number == culprit else batches
        rank.send("stream", batches=[[x.tolist() for x in batch] for batch in given])
    answers = [rank.answer() for rank in ranks]
    own = answers[culprit]
    assert own["error"] in ("InputError", "CommunicationError"), own
    for answer in answers:
        assert "The symbolic dim batch must be the same on all ranks" in answer["message"], answers


@pytest.mark.slow
def test_all_stages_name_a_rank_that_is_killed_within_a_stream_of_many_sizes(start: Start, pipeline: Path) -> None:
    ranks = start(RANKS)
    load_all(ranks, pipeline)
    for rank in ranks:
        rank.send("stream_forever", batch=[x.tolist() for x in _inputs(10, 3)])
    for rank in ranks:
        assert rank.answer()["result"] == "begun"
    ranks[2].kill()
    for rank in (*ranks[:2], ranks[3]):
        assert_blames(rank.answer(), 2, "CommunicationError")
