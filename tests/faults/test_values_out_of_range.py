"""Indices that no table has and divisions by zero: refused by all ranks, or defined; the ranks serve on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist

from .conftest import Rank, Start, load_all

WORDS, POSITIONS, WIDTH = 51, 7, 8
IDS = np.array([[0, 50, -1, -51], [3, 3, 49, 7]])
PLACES = np.array([[0, 1, 2, 3], [4, 4, 0, -3]])  # two are added before they are looked up
HUGE = 10**9


def table(rows: int, seed: int) -> np.ndarray:
    """A table of embeddings."""
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def expected(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The outputs of the unsharded model."""
    return table(WORDS, 0)[ids] + table(POSITIONS, 1)[places + 2]


def build(folder: Path, batch: int | str, pins: dict[str, str]) -> Path:
    """Words and positions that are looked up, over two ranks; the rows of the words' table do not divide."""
    ids, places = hidet.symbol([batch, 4], "int64", "cpu"), hidet.symbol([batch, 2, 2], "int32", "cpu")
    rows = ids.shape[0]
    words = ops.take(hidet.asarray(table(WORDS, 0)), ops.cast(ids, "int32"), 0)
    where = ops.take(hidet.asarray(table(POSITIONS, 1)), ops.reshape(places, [rows, 4]) + 2, 0)
    config: dict[str, Any] = {"pins": pins}
    if isinstance(batch, str):
        config["symbols"] = {batch: {"expected": 4, "multiple_of": 2}}
    graph = hidet.trace_from(words + where, [ids, places])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [2]}, config, folder)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the words' table are sharded."""
    return build(tmp_path_factory.mktemp("values") / "words", 2, {"w0": "(S0, R)"})


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any number of sentences, which are sharded, and gathered in the end."""
    return build(tmp_path_factory.mktemp("values") / "sentences", "batch", {"x0": "(S0, R)", "y0": "(R, R, R)"})


def call(ranks: list[Rank], inputs: list[list[np.ndarray]]) -> list[dict[str, Any]]:
    """The ranks' answers to inputs, which are those of each rank."""
    for rank, own in zip(ranks, inputs, strict=True):
        rank.send("call_typed", inputs=[x.tolist() for x in own], dtypes=["int64", "int32"])
    return [rank.answer() for rank in ranks]


def changed(x: np.ndarray, place: tuple[int, ...], value: int) -> np.ndarray:
    """The same with another value."""
    y = x.copy()
    y[place] = value
    return y


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (HUGE, f"Input 0 is {HUGE} at [1, 2]: it is used as an index into 51 rows, and must be from -51 to 50"),
        (51, "Input 0 is 51 at [1, 2]"),  # the padding of the table's last shard
        (-52, "Input 0 is -52 at [1, 2]"),
        (2**32, "Input 0 is 4294967296 at [1, 2]"),  # 0 once it is cast
    ],
)
def test_an_index_that_the_table_has_not_is_refused_by_all_ranks(
    start: Start, words: Path, bad: int, says: str
) -> None:
    ranks = start(2)
    load_all(ranks, words)
    places = PLACES.reshape(2, 2, 2)
    right, wrong = call(ranks, [[IDS, places], [changed(IDS, (1, 2), bad), places]])
    assert wrong["error"] == right["error"] == "InputError", (wrong, right)
    assert says in wrong["message"]
    assert f"Rank 1 refused this call: {says}" in right["message"]
    for answer in call(ranks, [[IDS, places]] * 2):
        np.testing.assert_allclose(answer["result"][0], expected(IDS, PLACES), atol=1e-6)


def test_the_place_is_that_in_the_input_and_what_is_added_counts(start: Start, words: Path) -> None:
    ranks = start(2)
    load_all(ranks, words)
    for value in (5, -10):
        for answer in call(ranks, [[IDS, changed(PLACES.reshape(2, 2, 2), (1, 0, 1), value)]] * 2):
            assert answer["error"] == "InputError", answer
            assert (
                f"Input 1 is {value} at [1, 0, 1]: it is used as an index into 7 rows, and must be from -9 to 4"
                in answer["message"]
            )


def test_inputs_whose_sizes_are_not_known(start: Start, sentences: Path) -> None:
    ranks = start(2)
    load_all(ranks, sentences)
    ids, places = np.tile(IDS, (3, 1)), np.tile(PLACES, (3, 1)).reshape(6, 2, 2)
    shards = [[ids[:3], places], [ids[3:], places]]
    for answer in call(ranks, shards):
        assert "error" not in answer, answer
        np.testing.assert_allclose(answer["result"][0], expected(ids, np.tile(PLACES, (3, 1))), atol=1e-6)
    wrong, right = call(ranks, [[changed(ids[:3], (2, 0), HUGE), places], shards[1]])
    assert f"Input 0 is {HUGE} at [2, 0] of this rank's shard" in wrong["message"]
    assert right["error"] == "InputError" and "Rank 0 refused this call" in right["message"]


def test_what_is_computed_is_defined(start: Start, tmp_path: Path) -> None:
    """Indices that are computed, and divisions of integers, end no process."""
    a, b = hidet.symbol([4], "int64", "cpu"), hidet.symbol([4], "int32", "cpu")
    whole, numbers = hidet.asarray(table(WORDS, 0)), hidet.asarray(np.arange(WORDS, dtype=np.int32))
    index = ops.cast(a * ops.cast(b, "int64"), "int64")
    outputs = [
        ops.take(whole, index, 0),
        ops.take(numbers, index, 0),
        ops.divide(b, ops.cast(a, "int32")),
        ops.mod(b, ops.cast(a, "int32")),
    ]
    folder = tmp_path / "artifacts"
    hidet_dist.auto_parallel(
        hidet.trace_from(outputs, [a, b]), {"mesh_shape": [2]}, {"pins": {"w0": "(S0, R)", "w1": "(S0)"}}, folder
    )
    ranks = start(2)
    load_all(ranks, folder)
    for rank in ranks:
        rank.send("call_typed", inputs=[[0, HUGE, -1, 5], [-5, 7, -(2**31), 10]], dtypes=["int64", "int32"])
    for rank in ranks:
        answer = rank.answer()
        assert "error" not in answer, answer
        rows, numbers_, quotients, remainders = answer["result"]
        np.testing.assert_allclose(rows[0], table(WORDS, 0)[0], atol=1e-6)
        np.testing.assert_allclose(rows[3], table(WORDS, 0)[50], atol=1e-6)
        assert np.isnan(rows[1]).all() and np.isnan(rows[2]).all()
        assert numbers_ == [0, -(2**31), -(2**31), 50]
        assert quotients == [0, 0, -(2**31), 2]
        assert remainders == [0, 7, 0, 0]
