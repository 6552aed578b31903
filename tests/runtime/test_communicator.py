"""Collectives between real processes, and what the others say when one of them goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from hidet_dist.runtime.liveness import SILENCE_SECONDS
from hidet_dist.runtime.mesh_groups import group_ranks

RunRanks = Callable[..., list[dict[str, Any]]]


def results(answers: list[dict[str, Any]]) -> list[Any]:
    for answer in answers:
        assert "error" not in answer, answer
    return [answer["result"] for answer in answers]


def assert_blamed(answer: dict[str, Any], ranks: list[int]) -> None:
    assert answer.get("error") == "CommunicationError", answer
    assert answer["ranks"] == ranks, answer
    for rank in ranks:
        assert f"rank {rank}" in answer["message"], answer
    assert answer["seconds"] < LONG_SECONDS, answer  # found out, and not by a time-out of the collective


LONG_SECONDS = 50.0
"""The time-out of collectives, unless one is to pass."""

TRANSPORTS = ["auto", "gloo"]


def chosen(transport: str, world_size: int) -> list[dict[str, str]]:
    return [{"HIDET_DIST_TRANSPORT": transport}] * world_size


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_every_collective_agrees_with_numpy(run_ranks: RunRanks, mesh: tuple[int, ...], transport: str) -> None:
    world_size = {(2,): 2, (3,): 3, (2, 2): 4}[mesh]
    answers = run_ranks("collectives", world_size, environment=chosen(transport, world_size), mesh=mesh)
    assert all(results(answers))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_collectives_agree_with_numpy(run_ranks: RunRanks, world_size: int, transport: str) -> None:
    environment = chosen(transport, world_size)
    assert all(results(run_ranks("large", world_size, environment=environment, mesh=[world_size], count=300_001)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world_size", "dtype", "rows", "row"),
    [
        (2, "float32", 150, 4096),  # some rows at a time
        (3, "bfloat16", 70, 5000),
        (3, "int32", 2, 100_001),  # rows in pieces
        (2, "uint8", 100_000, 1),
    ],
)
def test_exchanges_of_many_rows_and_of_long_ones(
    run_ranks: RunRanks, world_size: int, dtype: str, rows: int, row: int, transport: str
) -> None:
    environment = chosen(transport, world_size)
    answers = run_ranks(
        "exchanges_of_rows", world_size, environment=environment, mesh=[world_size], dtype=dtype, rows=rows, row=row
    )
    assert all(results(answers))


def test_ranks_of_one_host_share_memory_and_leave_nothing_behind(run_ranks: RunRanks) -> None:
    before = set(os.listdir("/dev/shm"))
    answers = results(run_ranks("routes", 4, mesh=[2, 2]))
    assert answers == [
        [[0, 2], [0, 1], [0, 1, 2, 3]],
        [[1, 3], [0, 1], [0, 1, 2, 3]],
        [[0, 2], [2, 3], [0, 1, 2, 3]],
        [[1, 3], [2, 3], [0, 1, 2, 3]],
    ]
    run_ranks("dies", 2, mesh=[2], who=0, group=1, warm=True)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_group_in_which_one_rank_cannot_share_memory_uses_gloo(run_ranks: RunRanks) -> None:
    environment = [{"HIDET_DIST_TRANSPORT": "gloo" if rank == 1 else "auto"} for rank in range(4)]
    answers = results(run_ranks("routes", 4, environment=environment, mesh=[2, 2]))
    assert answers == [[[0, 2]], [], [[0, 2], [2, 3]], [[2, 3]]]


def test_messages_take_the_way_that_their_two_ranks_have(run_ranks: RunRanks) -> None:
    assert results(run_ranks("message_routes", 4)) == [[1, 3], [0, 2], [1, 3], [0, 2]]
    environment = [{"HIDET_DIST_TRANSPORT": "gloo" if rank == 1 else "auto"} for rank in range(4)]
    # Ranks 0 and 2 send one way and receive another.
    assert results(run_ranks("message_routes", 4, environment=environment)) == [[3], [], [3], [0, 2]]


def test_an_unknown_transport_is_refused(run_ranks: RunRanks) -> None:
    answers = run_ranks("routes", 2, environment=chosen("carrier pigeon", 2), mesh=[2])
    assert {answer["error"] for answer in answers} == {"ConfigError"}
    assert "carrier pigeon" in answers[0]["message"]


def test_a_rank_that_waits_sleeps(run_ranks: RunRanks) -> None:
    assert results(run_ranks("waits", 2, seconds=2))[0] < 0.5


def test_communicators_over_one_store_do_not_clash(run_ranks: RunRanks) -> None:
    for rank, sums in enumerate(results(run_ranks("several", 4))):
        along_first = (rank + 1) + ((rank + 2) % 4 + 1)
        along_second = (rank + 1) + ((rank ^ 1) + 1)
        assert sums == [10, 10, along_first, 10, along_second, 10] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_that_dies_is_named(run_ranks: RunRanks, who: int, warm: bool, transport: str) -> None:
    answers = run_ranks("dies", 2, environment=chosen(transport, 2), mesh=[2], who=who, group=1, warm=warm)
    assert answers[who]["exit"] == -signal.SIGKILL
    assert_blamed(answers[1 - who], [who])


def test_a_rank_that_dies_is_named_by_those_that_wait_for_its_peers(run_ranks: RunRanks) -> None:
    answers = run_ranks("dies", 4, mesh=[2, 2], who=3, group=2, warm=True)
    for answer in answers[:3]:
        assert_blamed(answer, [3])


@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_that_is_late_is_named_by_all(run_ranks: RunRanks, warm: bool) -> None:
    answers = run_ranks("late", 3, mesh=[3], who=1, warm=warm, group=1)
    for answer in answers:
        assert_blamed(answer, [1])
    assert "did not reach collective" in answers[0]["message"]


def test_a_rank_that_is_late_is_named_by_other_groups(run_ranks: RunRanks) -> None:
    answers = run_ranks("late", 4, mesh=[2, 2], who=2, warm=True, group=2)
    for answer in answers:
        assert_blamed(answer, [2])


# Most of their time passes while a rank waits for the time-out of another one.
WAITING = [pytest.param(transport, marks=pytest.mark.slow if transport == "gloo" else ()) for transport in TRANSPORTS]


@pytest.mark.parametrize("transport", WAITING)
@pytest.mark.parametrize("how", ["dies", "stops", "closes"])
def test_a_rank_that_fails_the_ends_of_its_messages_is_named(run_ranks: RunRanks, how: str, transport: str) -> None:
    answers = run_ranks("messages_to_a_bad_rank", 4, environment=chosen(transport, 4), how=how)
    for answer in answers[:3]:
        assert_blamed(answer, [3])


@pytest.mark.parametrize(
    ("how", "who", "transport"),
    [("dies", 0, "auto"), ("dies", 1, "auto"), ("stops", 0, "auto"), ("closes", 1, "auto"), ("dies", 0, "gloo")],
)
def test_a_rank_that_fails_a_broadcast_is_named(run_ranks: RunRanks, how: str, who: int, transport: str) -> None:
    answers = run_ranks("broadcasts_with_a_bad_rank", 2, environment=chosen(transport, 2), how=how, who=who)
    assert_blamed(answers[1 - who], [who])


@pytest.mark.parametrize(
    ("how", "who", "transport"),
    [
        ("dies", 0, "auto"),
        pytest.param("stops", 1, "auto", marks=pytest.mark.slow),
        ("closes", 1, "auto"),
        ("dies", 1, "gloo"),
    ],
)
def test_a_rank_that_fails_an_exchange_of_rows_is_named(
    run_ranks: RunRanks, how: str, who: int, transport: str
) -> None:
    answers = run_ranks("rows_with_a_bad_rank", 2, environment=chosen(transport, 2), how=how, who=who)
    assert_blamed(answers[1 - who], [who])


@pytest.mark.parametrize("who", [0, 1])
def test_a_late_rank_is_named_by_those_that_wait_for_a_rank_that_waits_for_it(run_ranks: RunRanks, who: int) -> None:
    for answer in run_ranks("chain", 4, who=who):
        assert_blamed(answer, [who])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_of_another_length_is_refused(run_ranks: RunRanks, transport: str) -> None:
    answers = run_ranks("wrong_length", 2, environment=chosen(transport, 2))
    assert "rank 1 is in message of 4 float32 of call 0, but rank 0 in message of 8 float32" in answers[1]["message"]
    assert {answer["error"] for answer in answers} == {"CommunicationError"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "what", ["kind", "dtype", "count", "large count", "reduce_op", "root", "mask", "call", "message's call"]
)
def test_ranks_in_different_collectives_refuse_each_others_data(run_ranks: RunRanks, what: str, transport: str) -> None:
    answers = run_ranks("out_of_step", 2, environment=chosen(transport, 2), what=what)
    for answer in answers:
        assert answer.get("error") == "CommunicationError", answer
        assert answer["ranks"] == [0, 1], answer
        assert "the ranks are out of step: rank" in answer["message"]
        assert "All ranks must make the same calls in the same order" in answer["message"]


def test_a_rank_that_leaves_is_named(run_ranks: RunRanks) -> None:
    answers = run_ranks("leaves", 2, who=1)
    assert_blamed(answers[0], [1])
    assert "left" in answers[0]["message"]


def test_a_rank_that_calls_wrongly_is_named(run_ranks: RunRanks) -> None:
    answers = run_ranks("wrong_call", 2, who=1)
    for answer in answers:
        assert_blamed(answer, [1])
    assert "unknown dtype 99" in answers[1]["message"]


def test_after_a_failure_collectives_return_at_once(run_ranks: RunRanks) -> None:
    collectives, first_check, second_check = run_ranks("after_failure", 2, who=1)[0]["result"]
    # A hundred that waited would take minutes.
    assert collectives < LONG_SECONDS
    assert first_check < LONG_SECONDS
    assert second_check < SILENCE_SECONDS  # the blame is not looked for again


def test_a_group_is_ordered_row_major() -> None:
    assert group_ranks((2, 3, 2), 7, 0b101) == (0, 1, 6, 7)
    assert group_ranks((2, 3, 2), 7, 0b010) == (7, 9, 11)
    assert group_ranks((2, 3, 2), 7, 0) == (7,)
    assert group_ranks((), 0, 0) == (0,)
