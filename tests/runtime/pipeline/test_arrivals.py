"""The order of messages between stages: it never blocks, and on a stream it receives ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.runtime.pipeline.arrivals import Arrival, Arrivals
from hidet_dist.runtime.pipeline.channel import MessageChannel, Transit

Operation = tuple[int, int, int]  # the sending stage, its micro-batch, and the call
Edges = Sequence[tuple[int, int]]


class Recorded(MessageChannel):
    """A channel of one stage that records what it begins and waits for, and sends nothing."""

    def __init__(self, stage: int, deferred: bool):
        super().__init__(None, SimpleNamespace(deferred=deferred))  # type: ignore[arg-type]
        self.stage = stage
        self.call = 0
        self.steps: list[tuple[str, Operation]] = []
        self._counts: dict[int, int] = {}

    def begin(self, ends: Sequence[Any]) -> Transit:
        # An inlet stands for its sending stage; what is sent is the stage's own.
        (source,) = {end if isinstance(end, int) else self.stage for end in ends}
        number = self._counts.get(source, 0)
        self._counts[source] = number + 1
        operation = (source, number, self.call)
        self.steps.append(("begin", operation))
        return Transit([end for end in ends if isinstance(end, int)], operation)  # type: ignore[arg-type]

    def wait(self, transit: Transit) -> list[Any]:
        self.steps.append(("wait", transit.mark))  # type: ignore[arg-type]
        return transit.parts


def steps_of(stage: int, edges: Edges, micro_batches: int, calls: int, deferred: bool) -> list[tuple[str, Operation]]:
    """The steps of one stage in several calls."""
    channel = Recorded(stage, deferred)
    arrivals = [Arrival(source, number, source) for number, (source, to) in enumerate(edges) if to == stage]  # type: ignore[arg-type]
    sends = [("outlet", None) for source, _ in edges if source == stage]
    for call in range(calls):
        channel.call = call
        arriving = Arrivals(channel, [arrivals] * micro_batches, stage)
        for micro_batch in range(micro_batches):
            taken = arriving.take(micro_batch)
            assert sorted(one.number for one, _ in taken) == [one.number for one in arrivals]
            if sends:
                channel.send(sends)  # type: ignore[arg-type]
    return channel.steps


def run(every: Sequence[Sequence[tuple[str, Operation]]], edges: Edges, deferred: bool) -> int:
    """Take all stages' steps, where an operation takes its turn on all of its stages at once; count those left."""
    steps = [deque(own) for own in every]
    queues: list[deque[Operation]] = [deque() for _ in every]
    done: set[Operation] = set()
    moved = True
    while moved:
        moved = False
        for own, queue in zip(steps, queues, strict=True):
            while own and (own[0][0] == "begin" or own[0][1] in done) and (deferred or not queue):
                kind, operation = own.popleft()
                if kind == "begin":
                    queue.append(operation)
                moved = True
        for operation in {queue[0] for queue in queues if queue}:
            ends = {operation[0], *(to for source, to in edges if source == operation[0])}
            if all(queues[end] and queues[end][0] == operation for end in ends):
                for end in ends:
                    queues[end].popleft()
                done.add(operation)
                moved = True
    return sum(map(len, steps)) + sum(map(len, queues))


@given(
    st.integers(2, 5).flatmap(
        lambda stages: st.tuples(
            st.just(stages),
            st.sets(st.sampled_from(list(itertools.combinations(range(stages), 2))), min_size=1),
        )
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_order_of_stages_blocks(
    pipeline: tuple[int, set[tuple[int, int]]], micro_batches: int, calls: int, deferred: bool
) -> None:
    """Any tensors between any stages: every operation is complete in the end, though none may overtake another."""
    stages, crossing = pipeline
    edges = sorted(crossing)
    every = [steps_of(stage, edges, micro_batches, calls, deferred) for stage in range(stages)]
    assert run(every, edges, deferred) == 0


@pytest.mark.parametrize("deferred", [True, False])
def test_the_next_micro_batch_is_received_while_one_is_computed_on_a_stream(deferred: bool) -> None:
    steps = steps_of(1, [(0, 1), (1, 2)], 3, 1, deferred)
    begun = [operation[:2] for kind, operation in steps if kind == "begin"]
    ahead = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    assert begun == (ahead if deferred else [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)])


def test_only_two_sends_are_in_progress() -> None:
    steps = steps_of(0, [(0, 1)], 4, 1, True)
    assert steps[:4] == [("begin", (0, 0, 0)), ("begin", (0, 1, 0)), ("wait", (0, 0, 0)), ("begin", (0, 2, 0))]


def test_an_order_that_blocks_is_found() -> None:
    """What the property relies on: two stages that take turns the other way round are stuck."""
    first, second = (0, 0, 0), (0, 1, 0)
    every = [[("begin", first), ("begin", second)], [("begin", second), ("begin", first)]]
    assert run(every, [(0, 1)], True) > 0
