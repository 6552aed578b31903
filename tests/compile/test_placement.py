"""Where a program puts its activations: nothing that is live is overwritten, and little room is lost."""

from __future__ import annotations

from dataclasses import replace

import hidet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.compile.buffers import ActivationBuffer
from hidet_dist.compile.placement import live_peak, place_buffers, placed_nbytes

X = hidet.symbol([1], "float32", "cpu")
UNIT = 128


def buffers_of(spans: list[tuple[int, int, int]], memory: int = 0) -> list[ActivationBuffer]:
    """Buffers of spans: the first and the last node, and units of 128 bytes."""
    return [ActivationBuffer(X, first, last, units * UNIT, memory) for first, last, units in sorted(spans)]


def lowest_places(
    buffers: list[ActivationBuffer], order: tuple[int, ...], before: tuple[tuple[int, ...], ...]
) -> list[int]:
    """The places that a launcher computes: each the lowest that none of those before it overlap."""
    places = [0] * len(buffers)
    for number in order:
        taken = sorted((places[n], places[n] + buffers[n].nbytes) for n in before[number] if buffers[n].nbytes)
        at = 0
        for begin, end in taken if buffers[number].nbytes else []:
            if begin - at >= buffers[number].nbytes:
                break
            at = max(at, end)
        places[number] = at
    return places


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 9), st.integers(0, 1)), max_size=25))
def test_buffers_that_are_live_together_lie_apart(cases: list[tuple[int, int, int, int]]) -> None:
    buffers = sorted(
        (ActivationBuffer(X, first, first + length, units * UNIT, memory) for first, length, units, memory in cases),
        key=lambda one: one.first,
    )
    found = place_buffers(buffers)
    assert sorted(found.order) == list(range(len(buffers)))
    places = lowest_places(buffers, found.order, found.before)
    ends = [0, 0]
    for n, one in enumerate(buffers):
        ends[one.memory] = max(ends[one.memory], places[n] + one.nbytes)
        for m, other in enumerate(buffers[:n]):
            if one.memory == other.memory and one.first <= other.last and other.first <= one.last:
                assert places[n] + one.nbytes <= places[m] or places[m] + other.nbytes <= places[n]
    assert found.nbytes == sum(ends) == placed_nbytes(buffers, found)
    halves = [replace(one, nbytes=one.nbytes // 2) for one in buffers]  # as of a device with lesser parts
    places = lowest_places(halves, found.order, found.before)
    sized = [[at + one.nbytes for at, one in zip(places, halves, strict=True) if one.memory == m] for m in (0, 1)]
    assert placed_nbytes(halves, found) == sum(max(ends, default=0) for ends in sized)
    assert found.nbytes >= max((live_peak([b for b in buffers if b.memory == m]) for m in (0, 1)), default=0)


@pytest.mark.parametrize(
    "spans",
    [
        # An allocator that does not know what follows puts the last buffer behind the second.
        [(0, 1, 1), (0, 4, 1), (2, 4, 2)],
        [(0, 1, 2), (0, 2, 1), (2, 4, 3), (1, 3, 1)],
        [(at, at + 1 + at % 3, 1 + at % 5) for at in range(30)],
    ],
)
def test_no_room_is_lost_where_none_needs_to_be(spans: list[tuple[int, int, int]]) -> None:
    buffers = buffers_of(spans)
    assert place_buffers(buffers).nbytes == live_peak(buffers)
