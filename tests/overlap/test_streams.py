"""Two streams: makespans of small programs in closed form, and what holds of every schedule."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.overlap.streams import RUN, START, WAIT, Launch, Schedule, StreamTask, held, schedule, serial, timeline


def kernel(seconds: float, *reads: int, nbytes: int = 0) -> StreamTask:
    return StreamTask(seconds, False, reads, nbytes)


def collective(seconds: float, *reads: int, nbytes: int = 0) -> StreamTask:
    return StreamTask(seconds, True, reads, nbytes)


def test_communication_independent_of_earlier_kernels_is_hidden_completely() -> None:
    # A weight is gathered while the kernel before its reader runs.
    tasks = [kernel(5.0), collective(3.0), kernel(2.0, 0, 1)]
    found = schedule(tasks)
    assert serial(tasks).seconds == 10.0
    assert (found.seconds, found.exposed_seconds) == (7.0, (0.0, 0.0, 0.0))


def test_communication_longer_than_the_kernels_before_is_hidden_in_part() -> None:
    found = schedule([kernel(5.0), collective(8.0), kernel(2.0, 0, 1)])
    assert (found.seconds, found.exposed_seconds[1]) == (10.0, 3.0)


def test_communication_between_two_kernels_is_not_hidden() -> None:
    tasks = [kernel(5.0), collective(3.0, 0), kernel(2.0, 1)]
    found = schedule(tasks)
    assert (found.seconds, found.exposed_seconds[1]) == (10.0, 3.0)
    assert found.launches == (Launch(RUN, 0), Launch(START, 1), Launch(WAIT, 1), Launch(RUN, 2))


def test_a_branch_computes_while_the_other_communicates() -> None:
    # Two branches that are added at the end; in program order one comes after the other.
    tasks = [
        *(kernel(4.0), collective(4.0, 0), kernel(1.0, 1)),
        *(kernel(4.0), collective(4.0, 3), kernel(1.0, 4)),
        kernel(1.0, 2, 5),
    ]
    assert serial(tasks).seconds == 19.0
    # The second branch's kernel runs beside the first collective; its own collective beside the first's reader.
    assert schedule(tasks).seconds == 4 + 4 + 4 + 1 + 1
    # Where both branches' kernels cannot be held at once, the order stays as it is.
    large = [StreamTask(t.seconds, t.communicates, t.reads, 10) for t in tasks]
    tight = schedule(large, room=20)
    assert tight.peak_bytes <= max(20, serial(large).peak_bytes)


def layers(count: int, compute: float, gather: float, nbytes: int) -> list[StreamTask]:
    """Each layer reads what the one before made, and a weight that is gathered."""
    tasks: list[StreamTask] = []
    for layer in range(count):
        before = (len(tasks) - 1,) if layer else ()
        tasks += [collective(gather, nbytes=nbytes), kernel(compute, *before, len(tasks), nbytes=1)]
    return tasks


def test_gathering_weights_just_in_time_holds_two_layers_of_them() -> None:
    tasks = layers(10, compute=3.0, gather=2.0, nbytes=100)
    found = schedule(tasks)
    # Nothing hides the first.
    assert found.seconds == 10 * 3.0 + 2.0
    assert found.peak_bytes == 2 * 100 + 2
    assert serial(tasks).peak_bytes == 100 + 2


def test_communication_that_takes_longer_in_all_sets_the_time() -> None:
    tasks = layers(10, compute=2.0, gather=3.0, nbytes=100)
    assert schedule(tasks).seconds == 10 * 3.0 + 2.0


@pytest.mark.parametrize(("room", "seconds"), [(102, 50.0), (202, 32.0), (10**6, 32.0), (None, 32.0), (0, 50.0)])
def test_the_memory_limit_decides_how_early_a_collective_starts(room: int | None, seconds: float) -> None:
    tasks = layers(10, compute=3.0, gather=2.0, nbytes=100)
    found = schedule(tasks, room)
    assert found.seconds == seconds
    assert found.peak_bytes <= max(room or 0, 102) or room is None


def test_two_steps_with_a_kernel_between_them_are_both_hidden() -> None:
    # A weight is gathered along two mesh axes, with a copy between; its reader needs it after 10 s of other kernels.
    tasks = [kernel(5.0), kernel(5.0, 0), collective(2.0), kernel(1.0, 2), collective(2.0, 3), kernel(1.0, 1, 4)]
    found = schedule(tasks)
    assert found.seconds == 5.0 + 5.0 + 1.0 + 1.0


def test_collectives_that_follow_each_other_are_waited_for_once() -> None:
    tasks = [kernel(5.0), collective(2.0, nbytes=8), collective(2.0, 1, nbytes=8), kernel(1.0, 0, 2)]
    found = schedule(tasks)
    assert found.seconds == 6.0
    assert [launch for launch in found.launches if launch.what == WAIT] == [Launch(WAIT, 2)]
    # The first one's result is what the second sends: held until that has ended.
    assert found.peak_bytes == 16


def test_a_view_holds_the_memory_that_it_is_in() -> None:
    tasks = [
        kernel(1.0, nbytes=10),
        StreamTask(0.0, False, (0,), 0, aliases=0),
        kernel(1.0, nbytes=5),
        kernel(1.0, 1, 2),
    ]
    launches = [Launch(RUN, number) for number in range(4)]
    assert held(tasks, launches) == [10, 10, 15, 15]
    assert held(tasks[:3], launches[:3]) == [10, 10, 5]


def test_the_input_of_a_collective_is_held_until_the_wait_for_it() -> None:
    tasks = [kernel(1.0, nbytes=7), collective(1.0, 0, nbytes=3), kernel(1.0, nbytes=20), kernel(1.0, 1, 2)]
    launches = [Launch(RUN, 0), Launch(START, 1), Launch(RUN, 2), Launch(WAIT, 1), Launch(RUN, 3)]
    assert held(tasks, launches) == [7, 10, 30, 30, 23]


@st.composite
def programs(draw: st.DrawFn) -> list[StreamTask]:
    tasks: list[StreamTask] = []
    for number in range(draw(st.integers(1, 14))):
        reads = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=3)))) if number else ()
        seconds = draw(st.integers(0, 8)) / 4
        if reads and draw(st.integers(0, 5)) == 0:
            tasks.append(StreamTask(0.0, False, reads[:1], 0, aliases=reads[0]))
        else:
            tasks.append(StreamTask(seconds, draw(st.booleans()), reads, draw(st.integers(0, 9))))
    return tasks


def check(tasks: list[StreamTask], found: Schedule) -> None:
    """Everything is launched once, after what it reads; what is read by a kernel was waited for."""
    ran: set[int] = set()
    started: set[int] = set()
    for launch in found.launches:
        task = tasks[launch.task]
        assert (launch.what == RUN) != task.communicates
        if launch.what == WAIT:
            assert launch.task in started
        else:
            assert launch.task not in started | ran
            assert all(read in ran or (task.communicates and read in started) for read in task.reads)
        (started if launch.what == START else ran).add(launch.task)
    assert len(started | ran) == len(tasks)
    chained = {read for task in tasks if task.communicates for read in task.reads}
    assert started - ran <= chained


@settings(max_examples=120, deadline=None)
@given(programs(), st.one_of(st.none(), st.integers(0, 60)))
def test_every_schedule_keeps_to_its_dependences_time_and_room(tasks: list[StreamTask], room: int | None) -> None:
    found, plain = schedule(tasks, room), serial(tasks)
    check(tasks, found)
    check(tasks, plain)
    kernels = math.fsum(task.seconds for task in tasks if not task.communicates)
    collectives = math.fsum(task.seconds for task in tasks if task.communicates)
    assert plain.seconds == pytest.approx(kernels + collectives)
    assert max(kernels, collectives) - 1e-9 <= found.seconds <= plain.seconds
    assert found.seconds == pytest.approx(kernels + math.fsum(found.exposed_seconds))
    assert all(0 <= own <= task.seconds + 1e-9 for own, task in zip(found.exposed_seconds, tasks, strict=True))
    if room is not None:
        assert found.peak_bytes <= max(room, plain.peak_bytes)
    assert (found.seconds, found.exposed_seconds) == timeline(tasks, found.launches)
    assert found.peak_bytes == max(held(tasks, found.launches))
    assert found == schedule(tasks, room)


@settings(max_examples=40, deadline=None)
@given(programs())
def test_the_communicating_stream_never_lags_behind_its_launches(tasks: list[StreamTask]) -> None:
    found = schedule(tasks)
    order = [launch.task for launch in found.launches if launch.what == START]
    for before, after in pairwise(order):
        assert before not in tasks[after].reads or before < after
    path = [0.0] * len(tasks)
    for number, task in enumerate(tasks):
        path[number] = task.seconds + max((path[read] for read in task.reads), default=0.0)
    assert found.seconds >= max(path) - 1e-9
