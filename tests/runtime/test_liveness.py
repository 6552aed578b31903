"""Which ranks are named for a collective that failed by a time-out, as the beats of the ranks tell it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hidet_dist.runtime.liveness import Beat, CollectiveProgress, Verdict, blame

NAME = "communicator0"


class Beats:
    """A store in which each rank's beat is another one at each look, until the last of them."""

    def __init__(self, beats: dict[int, list[tuple[int, list[int]]]]):
        self._beats = {
            f"beat/{rank}": itertools.chain(
                (Beat(number, {NAME: sequence}, {NAME: peers}) for number, (sequence, peers) in enumerate(states)),
                (Beat(number, {NAME: states[-1][0]}, {NAME: states[-1][1]}) for number in itertools.count(len(states))),
            )
            for rank, states in beats.items()
        }

    def check(self, keys: Sequence[str]) -> bool:
        return False

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [next(self._beats[key]).dumps().encode() for key in keys]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return value.encode()


def verdict(beats: dict[int, list[tuple[int, list[int]]]], sequence: int = 5) -> Verdict:
    """What rank 0 says of its collective with all others."""
    progress = CollectiveProgress(sequence, tuple(beats))
    return blame(Beats(beats), NAME, 0, 1 + len(beats), progress, host=0)  # type: ignore[arg-type]


def test_a_rank_that_came_after_the_time_out_and_went_on_is_named() -> None:
    """It completes the collective that has failed here, as the data were sent, and waits in the next one."""
    reason = "rank 1 took longer than the time-out, and went on since"
    assert verdict({1: [(4, []), (6, [0])]}) == Verdict((1,), reason, 0)


def test_a_late_rank_is_named_and_not_those_that_waited_for_it() -> None:
    found = verdict({1: [(5, [0, 2]), (6, [0, 2])], 2: [(4, []), (6, [0, 1])]})
    assert found.ranks == (2,) and found.reason.startswith("rank 2 took longer")


@pytest.mark.parametrize(
    ("state", "ranks", "reason"),
    [
        ((5, [0]), (), "all ranks are alive and have reached the same collective"),
        ((6, [0]), (), "ranks 0, 1 wait for one another, in different collectives"),
        ((4, []), (1,), "rank 1 did not reach collective 5"),
    ],
)
def test_a_rank_that_stays_where_it_is(state: tuple[int, list[int]], ranks: tuple[int, ...], reason: str) -> None:
    assert verdict({1: [state]}) == Verdict(ranks, reason, 0)
