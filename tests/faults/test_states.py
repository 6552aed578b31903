"""A call that the ranks agreed not to make has written no state, on no rank, and the next one is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist

from .conftest import Rank, Start, load_all

SLOTS, WIDTH = 6, 8
INNER, OUTER = (
    np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH for seed in range(2)
)


class Whole:
    """The model on one device: it writes projected rows to slots of a pool, and projects what it finds there."""

    def __init__(self) -> None:
        self.pool = np.zeros((SLOTS, WIDTH), np.float32)

    def __call__(self, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
        self.pool[slots] = x @ INNER
        return (self.pool.sum(0, keepdims=True) + self.pool[slots]) @ OUTER

    def shard(self, rank: int) -> np.ndarray:
        """The columns of the pool that a rank has."""
        return np.split(self.pool, 2, 1)[rank]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model for two ranks, each of which has half of the columns of the pool."""
    pool = hidet_dist.state("pool", [SLOTS, WIDTH])
    x, slots = hidet.symbol(["rows", WIDTH], "float32", "cpu"), hidet.symbol(["rows"], "int64", "cpu")
    new = hidet_dist.write_rows(pool, slots, ops.matmul(x, hidet.asarray(INNER)))
    y = ops.matmul(ops.sum(new, [0], keep_dim=True) + ops.take(new, slots, 0), hidet.asarray(OUTER))
    folder = tmp_path_factory.mktemp("states") / "pooled"
    config = {"symbols": {"rows": 2}, "pins": {"s0": "(R, S0)"}}
    result = hidet_dist.auto_parallel(hidet.trace_from([y, new], [x, slots]), {"mesh_shape": [2]}, config, folder)
    assert result.communications
    return folder


def ask(ranks: Sequence[Rank], commands: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of the ranks to their commands."""
    for rank, command in zip(ranks, commands, strict=True):
        rank.send(**command)
    return [rank.answer() for rank in ranks]


def check_call(ranks: Sequence[Rank], model: Whole, x: np.ndarray, slots: Sequence[int]) -> None:
    """Make a call, after which answers and states are those of the whole model."""
    command = {"command": "call_typed", "inputs": [x.tolist(), list(slots)], "dtypes": ["float32", "int64"]}
    want = model(x, np.array(slots))
    for answer in ask(ranks, [command] * 2):
        assert "error" not in answer, answer
        np.testing.assert_allclose(answer["result"][0], want, rtol=1e-4, atol=1e-5)
    for number, rank in enumerate(ranks):
        np.testing.assert_allclose(rank.do("save_states")["pool"], model.shard(number), rtol=1e-4, atol=1e-5)


def test_a_call_that_no_rank_has_made_leaves_states_as_they_are_on_all(start: Start, pooled: Path) -> None:
    ranks, model, rng = start(2), Whole(), np.random.default_rng(2)
    load_all(ranks, pooled)
    check_call(ranks, model, rng.standard_normal((2, WIDTH), np.float32), [0, 4])
    many = {"command": "call_repeated", "row": [1.0] * WIDTH, "rows": 2**21, "slot": 1}  # 64 MiB, once packed
    call = {"command": "call_typed", "inputs": [[[2.0] * WIDTH] * 2, [1, 5]], "dtypes": ["float32", "int64"]}
    beyond = {**call, "inputs": [[[2.0] * WIDTH] * 2, [1, SLOTS]]}
    other = {"command": "load_states", "values": {"pool": np.ones((SLOTS, WIDTH // 2)).tolist()}}
    larger = {"command": "load_states", "values": {"pool": np.ones((SLOTS, WIDTH)).tolist()}}
    for victim in range(2):
        before = [rank.do("save_states") for rank in ranks]
        for right, wrong, errors in (
            (many, many, ("CallError", "MemoryError")),
            (call, beyond, ("InputError", "InputError")),
            (other, larger, ("InputError", "InputError")),
            (call, other, ("InputError", "InputError")),  # not the same call
        ):
            if wrong is many:
                ranks[victim].do("limit_memory", more_bytes=2**24)
            answers = ask(ranks, [wrong if rank == victim else right for rank in range(2)])
            ranks[victim].do("unlimit_memory")
            assert (answers[1 - victim].get("error"), answers[victim].get("error")) == errors, answers
            assert [rank.do("save_states") for rank in ranks] == before, errors
        check_call(ranks, model, rng.standard_normal((3, WIDTH), np.float32), [victim, 3, 5])
