"""A rank that fails before, in or after the agreement of a call: the call fails on all ranks, and no answer is wrong.

From then on, either the next call is right on all of them, or none answers any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist

from .conftest import Rank, Start, X, call_all, load_all, weights, whole

Answer = dict[str, Any]


def ask(ranks: Sequence[Rank], *commands: dict[str, Any]) -> list[Answer]:
    """Give each rank its command; their answers."""
    for rank, command in zip(ranks, commands, strict=True):
        rank.send(**command)
    return [rank.answer() for rank in ranks]


def on(x: np.ndarray) -> dict[str, Any]:
    return {"command": "call", "inputs": [x.tolist()]}


@pytest.fixture
def loaded(start: Start, artifacts: Path) -> list[Rank]:
    ranks = start(2)
    load_all(ranks, artifacts)
    return ranks


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model for two ranks with an answer in bfloat16, which NumPy has not."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    first, second = map(hidet.asarray, weights(0))
    y = hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second).to("bfloat16")
    config = {"pins": {"w0": "(R, S0)", "w1": "(S0, R)"}}
    folder = tmp_path_factory.mktemp("faults") / "halves"
    result = hidet_dist.auto_parallel(hidet.trace_from(y, [x]), {"mesh_shape": [2]}, config, folder)
    assert result.communications
    return folder


@pytest.mark.parametrize("victim", [0, 1])
def test_no_memory_to_pack_an_input(start: Start, symbolic: Path, victim: int) -> None:
    ranks = start(2)
    load_all(ranks, symbolic)
    call_all(ranks)
    row, rows = [0.5] * 8, 2**21  # 64 MiB, once they are packed
    ranks[victim].do("limit_memory", more_bytes=2**24)
    answers = ask(ranks, *[{"command": "call_repeated", "row": row, "rows": rows}] * 2)
    assert answers[victim]["error"] == "MemoryError", answers
    assert answers[1 - victim]["error"] == "CallError", answers
    assert f"Rank {victim} could not make this call" in answers[1 - victim]["message"]
    assert "MemoryError" in answers[1 - victim]["message"]
    ranks[victim].do("unlimit_memory")
    call_all(ranks, X + 1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_warm_up_of_unknown_sizes(start: Start, symbolic: Path, victim: int) -> None:
    ranks = start(2)
    load_all(ranks, symbolic)
    commands = [{"command": "warm_up", "sizes": {"batsch" if rank == victim else "batch": 2}} for rank in range(2)]
    for answer in ask(ranks, *commands):
        assert answer["error"] == "InputError", answer
        assert "no symbolic dim batsch" in answer["message"]
    call_all(ranks, X + 1)


def test_a_call_that_ranks_agreed_to_themselves_ends_all_where_one_cannot_make_it(loaded: list[Rank]) -> None:
    def agreed(x: np.ndarray) -> dict[str, Any]:
        return {**on(x), "command": "call_agreed"}

    for answer in ask(loaded, agreed(X), agreed(X)):
        np.testing.assert_allclose(answer["result"], whole(X), rtol=1e-4)
    call_all(loaded, X + 1)
    wrong, right = ask(loaded, agreed(X[:3]), agreed(X))
    assert wrong["error"] == "InputError", wrong
    assert right["error"] == "CommunicationError", right
    assert "rank 0" in right["message"] and "must have the shape" in right["message"]


def test_a_warm_up_or_a_stream_on_one_rank_is_no_call_on_another(loaded: list[Rank]) -> None:
    others = {
        "warming up": {"command": "warm_up", "sizes": {}},
        "in a stream": {"command": "stream", "batches": [[X.tolist()]]},
    }
    for doing, other in others.items():
        for answer in ask(loaded, other, on(X)):
            assert answer.get("error") == "InputError", answer
            assert "must make the same calls" in answer["message"] and doing in answer["message"]
    call_all(loaded, X + 1)


def test_a_profile_of_no_calls(loaded: list[Rank]) -> None:
    profiles = [{"command": "profile", "inputs": [X.tolist()], "repeats": repeats} for repeats in (1, 0)]
    right, wrong = ask(loaded, *profiles)
    assert wrong["error"] == "ConfigError" and "repeats=0" in wrong["message"]
    assert right["error"] == "CallError" and "Rank 1 could not make this call" in right["message"]
    assert "repeats=0" in right["message"]
    call_all(loaded, X + 1)


@pytest.mark.slow
def test_kinds_of_outputs_of_which_one_rank_cannot_have_its_own(start: Start, halves: Path) -> None:
    ranks = start(2)
    load_all(ranks, halves, timeout=60.0)  # PyTorch takes its time to import
    numpy, torch = ask(ranks, on(X), {"command": "call_torch", "inputs": [X.tolist()]})
    assert numpy["error"] == torch["error"] == "InputError", (numpy, torch)
    assert "Output 0 is bfloat16, which numpy lacks" in numpy["message"]
    assert "Rank 0 refused this call: Output 0 is bfloat16" in torch["message"]
    first, second = weights(0)
    x = X + 1
    for answer in ask(ranks, *[{"command": "call_torch", "inputs": [x.tolist()]}] * 2):
        np.testing.assert_allclose(answer["result"][0], np.maximum(x @ first, 0) @ second, rtol=0.02, atol=0.2)


def test_a_call_that_only_one_rank_refused_to_its_thread(loaded: list[Rank]) -> None:
    """The others cannot be told of it, as they may not have made that call; then the next one fails on all."""
    loaded[0].send(**on(X))
    loaded[1].send("call_elsewhere", inputs=[X.tolist()])
    refused = loaded[1].answer()
    assert refused["error"] == "HidetDistError" and "attach() there" in refused["message"]
    loaded[1].send(**on(X + 1))
    for answer in (loaded[0].answer(), loaded[1].answer()):
        assert answer["error"] == "CommunicationError", answer
        assert answer["ranks"] == [0, 1]
        assert "out of step" in answer["message"]
        assert "of call 1" in answer["message"] and "of call 2" in answer["message"]


def _sweep(ranks: list[Rank], folder: Path, kind: str, events: Sequence[int]) -> int:
    """Raise an error at each of these events of a call of one rank or the other; the number of calls that it ended.

    No answer may be wrong, and after a call the ranks have the same answer to the question whether they can go on.
    """
    loaded, reached = False, 0
    for at in events:
        if not loaded:
            load_all(ranks, folder)
        victim = at % 2
        x = X + at
        commands = [on(x), on(x)]
        commands[victim] = {"command": "interrupted", "inputs": [x.tolist()], "at": at, "kind": kind}
        answers = [ask(ranks, *commands), *(ask(ranks, on(x + n), on(x + n)) for n in (1, 2))]
        for n, pair in enumerate(answers):
            for answer in pair:
                if "error" in answer:
                    assert answer["error"] in (kind, "CallError", "CommunicationError"), (at, answers)
                else:
                    np.testing.assert_allclose(answer["result"], whole(x + n), atol=1e-3, err_msg=f"event {at}")
            assert n == 0 or ("error" in pair[0]) == ("error" in pair[1]), (at, answers)
        if answers[0][victim].get("error") == kind:
            reached += 1
            # Unless it had an answer before, the other one has none, and says why.
            other = answers[0][1 - victim]
            assert "error" not in other or kind in other["message"] or "out of step" in other["message"], (at, answers)
        loaded = "error" not in answers[-1][0]
        if not loaded:
            for rank in ranks:
                rank.do("close")
    return reached


KINDS = pytest.mark.parametrize("kind", ["Alarm", "KeyboardInterrupt"])
_EVENTS = 160
"""More than a call of this model has."""


@KINDS
def test_an_exception_at_some_points_of_a_call(start: Start, artifacts: Path, kind: str) -> None:
    """Such as a signal handler raises."""
    ranks = start(2)
    assert _sweep(ranks, artifacts, kind, range(3, _EVENTS, 23)) >= 4


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("victim", [0, 1])
def test_an_exception_at_any_point_of_a_call(start: Start, artifacts: Path, kind: str, victim: int) -> None:
    ranks = start(2)
    reached = _sweep(ranks, artifacts, kind, range(2 - victim, 2 * _EVENTS, 2))
    assert 50 < reached < _EVENTS, "some events came after the call, so that all were reached"
