"""Pipelines whose stages keep states, with real processes: plain calls, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.errors import ConfigError
from hidet_dist.normalize import normalize

from .conftest import launch

ROWS, WIDTH = 6, 8
W = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)


def graph() -> hidet.FlowGraph:
    """Rows of a pool, then a running sum of what is computed from them."""
    x, slots = hidet.symbol([2, WIDTH], "float32", "cpu"), hidet.symbol([2], "int64", "cpu")
    pool, total = hidet_dist.state("pool", [ROWS, WIDTH]), hidet_dist.state("total", [WIDTH])
    new = hidet_dist.write_rows(pool, slots, ops.matmul(x, hidet.asarray(W)))
    summed = ops.tanh(ops.sum(new, [0]))
    after = hidet_dist.replace_state(total, total + summed)
    return hidet.trace_from([ops.exp(after * 0.25), new, after], [x, slots])


def stages() -> list[dict[str, object]]:
    """The pool is of the first stage, and the sum of the second."""
    names = [node.name for node in normalize(graph()).nodes]
    cut = names.index("Tanh")
    return [{"operators": [0, cut], "mesh_shape": [1]}, {"operators": [cut, len(names)], "mesh_shape": [1]}]


def expected(calls: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    pool, total, answers = np.zeros((ROWS, WIDTH), np.float32), np.zeros(WIDTH, np.float32), []
    for x, slots in calls:
        pool[slots] = x @ W
        total = total + np.tanh(pool.sum(0))
        answers.append(np.exp(total * 0.25))
    return answers


def test_stages_keep_their_states_from_call_to_call(tmp_path: Path):
    hidet_dist.auto_parallel(graph(), {"mesh_shape": [2]}, {"stages": stages()}, tmp_path / "built")
    generator = np.random.default_rng(0)
    calls = [
        (generator.standard_normal((2, WIDTH), np.float32), generator.permutation(ROWS)[:2].astype(np.int64))
        for _ in range(4)
    ]
    given = {
        f"{name}{n}": value for n, call in enumerate(calls) for name, value in zip(("x", "slots"), call, strict=True)
    }
    np.savez(tmp_path / "calls.npz", **given)
    script = Path(__file__).with_name("serve_pipelined_states.py")
    done = launch(2, script, tmp_path / "built", tmp_path / "calls.npz", tmp_path)
    assert done.returncode == 0, done.stderr
    answers = expected(calls)
    for rank, state in enumerate(("pool", "total")):
        with np.load(tmp_path / f"rank{rank}.npz") as told:
            for number, want in enumerate([*answers, answers[0], answers[0]]):  # the last two from states of zeros
                np.testing.assert_allclose(told[f"y{number}"], want, rtol=1e-5, atol=1e-5)
            said = json.loads(str(told["said"]))
        assert said["states"] == [state]
        assert "make one call after another" in said["stream"]


def test_what_would_mix_states_is_refused_by_name():
    given = stages()
    with pytest.raises(ConfigError, match="states, such as 'pool', and a micro-batch would find"):
        hidet_dist.make_plan(graph(), {"mesh_shape": [2]}, {"stages": given, "micro_batches": 2})
    with pytest.raises(ConfigError, match="states, such as 'pool', and stages that keep them are not searched"):
        hidet_dist.make_plan(graph(), {"mesh_shape": [2]}, {"objective": "latency", "stages": 2})
    (_, cut), (_, count) = (stage["operators"] for stage in given)  # type: ignore[misc]
    parts = [[0, cut - 1], [cut - 1, count]]  # the sum of the pool's new value is in the second stage
    with pytest.raises(ConfigError, match=r"The state 'pool' is read by WriteRows in stage 0 and by .* in stage 1"):
        hidet_dist.make_plan(
            graph(), {"mesh_shape": [2]}, {"stages": [{"operators": part, "mesh_shape": [1]} for part in parts]}
        )
