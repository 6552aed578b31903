"""Schedules of kernels and collectives on two streams, and their makespan.

A device computes on one stream and communicates on another. Each stream runs its launches in order. A collective is
*started*: it begins when all earlier launches on the computing stream, and all earlier collectives, have ended. It is
*waited for* before its first reader: later launches on the computing stream begin when the collective has ended. In
CUDA each of the two is an event. So a program is a list of launches, and its time follows from the times of its tasks
(:func:`timeline`).

:func:`schedule` makes such a list by list scheduling (Graham, SIAM J. Applied Mathematics 17(2), 1969): each stream,
when it is free, takes the ready task that is needed first. Starts are then delayed as far as the makespan allows, so
that tensors gathered early do not fill the memory, and further if the memory limit requires it. The result depends only
on the tasks, so all ranks of a program launch their collectives in the same order.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

RUN, START, WAIT = "run", "start", "wait"
_TRIES = 4  # attempts with a smaller and smaller memory limit
_EQUAL = 1e-12  # relative difference of times that are summed in another order


@dataclass(frozen=True)
class StreamTask:
    """A kernel, or a collective.

    Attributes
    ----------
    seconds: its time without another task beside it.
    communicates: whether it runs on the communicating stream.
    reads: the tasks whose results it reads; their numbers are less than its own.
    nbytes: bytes of its result, held from its launch to the last task that reads it.
    aliases: the task with whose result it shares memory, as a view does; ``nbytes`` is then 0.
    """

    seconds: float
    communicates: bool = False
    reads: tuple[int, ...] = ()
    nbytes: int = 0
    aliases: int | None = None


@dataclass(frozen=True)
class Launch:
    """``run`` a kernel, ``start`` a collective, or ``wait`` for one; ``task`` is its number."""

    what: str
    task: int


@dataclass(frozen=True)
class Schedule:
    """A schedule: its launches, and their times.

    Attributes
    ----------
    seconds: the makespan, from the first launch to the end of the last task.
    exposed_seconds: for each task the time that it keeps the computing stream idle; 0 for kernels. The seconds of all
        kernels and the exposed seconds of all collectives add up to the makespan.
    peak_bytes: the peak bytes of results, in the order of the launches.
    """

    launches: tuple[Launch, ...]
    seconds: float
    exposed_seconds: tuple[float, ...]
    peak_bytes: int


def serial(tasks: Sequence[StreamTask]) -> Schedule:
    """Launch one task after the other, as on a device without overlap."""
    return _evaluated(tasks, _serial(tasks))


def schedule(tasks: Sequence[StreamTask], room: int | None = None) -> Schedule:
    """Find a good schedule, no longer than that of :func:`serial`, which waits for all collectives.

    There is no wait for a collective that only collectives read: they are in order on one stream.

    Parameters
    ----------
    tasks: sequence of StreamTask
        In an order in which they can run.
    room: int, optional
        Bytes of results that may be held at a time; no limit when not given. If even :func:`serial` holds more, its
        peak is the limit.
    """
    plain = serial(tasks)
    least = _least_seconds(tasks)
    limit = None if room is None else max(room, plain.peak_bytes)
    best = plain
    for backwards in (True, False):
        for in_order in (True, False):
            if best.seconds <= least * (1 + _EQUAL):
                return best
            result = _Planned(tasks, _list_order(tasks, in_order, backwards)).schedule(limit)
            if result is not None and result.seconds < best.seconds * (1 - _EQUAL):
                best = result
    return best


def _least_seconds(tasks: Sequence[StreamTask]) -> float:
    """Bound the makespan from below: by the tasks of each stream, and by chains of dependent tasks."""
    path: list[float] = []
    for task in tasks:
        path.append(task.seconds + max((path[read] for read in task.reads), default=0.0))
    streams = (
        sum(task.seconds for task in tasks if task.communicates is communicating) for communicating in (True, False)
    )
    return max(*streams, max(path, default=0.0))


def _serial(tasks: Sequence[StreamTask]) -> list[Launch]:
    launches = []
    for number, task in enumerate(tasks):
        if task.communicates:
            launches += [Launch(START, number), Launch(WAIT, number)]
        else:
            launches.append(Launch(RUN, number))
    return launches


def _evaluated(tasks: Sequence[StreamTask], launches: Sequence[Launch]) -> Schedule:
    seconds, exposed = timeline(tasks, launches)
    return Schedule(tuple(launches), seconds, exposed, max(held(tasks, launches), default=0))


def timeline(tasks: Sequence[StreamTask], launches: Sequence[Launch]) -> tuple[float, tuple[float, ...]]:
    """Compute the makespan of launches in seconds, and the time that each collective keeps the computing stream idle.

    While that stream waits, a collective runs; the idle time is attributed to the collectives that run then.
    """
    computed = communicated = 0.0
    exposed = [0.0] * len(tasks)
    begin: dict[int, float] = {}
    started: list[int] = []
    end = [0.0] * len(tasks)
    for launch in launches:
        task = tasks[launch.task]
        if launch.what == RUN:
            computed += task.seconds
        elif launch.what == START:
            begin[launch.task] = max(computed, communicated)
            end[launch.task] = communicated = begin[launch.task] + task.seconds
            started.append(launch.task)
        elif end[launch.task] > computed:
            for other in reversed(started):
                if end[other] <= computed:
                    break
                exposed[other] += max(0.0, min(end[other], end[launch.task]) - max(begin[other], computed))
            computed = end[launch.task]
    return max(computed, communicated), tuple(exposed)


def spans(tasks: Sequence[StreamTask], launches: Sequence[Launch]) -> list[tuple[float, float]]:
    """Compute the begin and the duration of each task, in seconds, from the times of :func:`timeline`."""
    computed = communicated = 0.0
    begin, end = [0.0] * len(tasks), [0.0] * len(tasks)
    for launch in launches:
        task = launch.task
        if launch.what == RUN:
            begin[task] = computed
            end[task] = computed = computed + tasks[task].seconds
        elif launch.what == START:
            begin[task] = max(computed, communicated)
            end[task] = communicated = begin[task] + tasks[task].seconds
        else:
            computed = max(computed, end[task])
    return [(first, task.seconds) for first, task in zip(begin, tasks, strict=True)]


def held(tasks: Sequence[StreamTask], launches: Sequence[Launch]) -> list[int]:
    """Compute the bytes of results held at each launch. A collective's input is held until the wait for it."""
    place: dict[int, int] = {}  # by task: the launch at which its result is written
    done: dict[int, int] = {}  # by task: the launch from which on it has surely ended
    waited = {launch.task for launch in launches if launch.what != START}
    for at, launch in enumerate(launches):
        place.setdefault(launch.task, at)
        done[launch.task] = at
    readers = _readers(tasks)
    last = [0] * len(tasks)
    change = [0] * (len(launches) + 1)
    for number in reversed(range(len(tasks))):
        task = tasks[number]
        read = max((done[reader] for reader in readers[number]), default=0)
        if number not in waited:  # it ends before the next collective does
            done[number] = max(done[number], read)
        last[number] = max(last[number], done[number], read)
        if task.aliases is None:
            change[place[number]] += task.nbytes
            change[last[number] + 1] -= task.nbytes
        else:
            last[task.aliases] = max(last[task.aliases], last[number])
    return list(accumulate(change))[:-1]


def _readers(tasks: Sequence[StreamTask]) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for read in dict.fromkeys(task.reads):
            readers[read].append(number)
    return readers


@dataclass(frozen=True)
class _Order:
    """The tasks of each stream in order, and the start time of each task."""

    computed: list[int]
    communicated: list[int]
    begin: list[float]


def _list_order(tasks: Sequence[StreamTask], in_order: bool, backwards: bool) -> _Order:
    """Order tasks by list scheduling, from the first task on, or ``backwards`` from the last one.

    Forwards, communication begins as early as possible. Backwards, it begins as late as possible, and does not delay
    communication that is needed at once.
    """
    if not backwards:
        return _ListScheduling([task.reads for task in tasks], tasks, in_order).order()
    last = len(tasks) - 1
    flipped = [[last - reader for reader in readers] for readers in reversed(_readers(tasks))]
    order = _ListScheduling(flipped, [*reversed(tasks)], in_order).order()
    ends = [begin + task.seconds for begin, task in zip(reversed(order.begin), tasks, strict=True)]
    makespan = max(ends, default=0.0)
    return _Order(
        [last - number for number in reversed(order.computed)],
        [last - number for number in reversed(order.communicated)],
        [makespan - end for end in ends],
    )


class _ListScheduling:
    """List scheduling: both streams take the ready task of the earliest deadline.

    ``reads`` has the tasks on which each task depends. With ``in_order``, a kernel also waits for all kernels with
    earlier deadlines.
    """

    def __init__(self, reads: Sequence[Sequence[int]], tasks: Sequence[StreamTask], in_order: bool):
        self.tasks = tasks
        self.in_order = in_order
        self.reads = [tuple(dict.fromkeys(task_reads)) for task_reads in reads]
        self.readers: list[list[int]] = [[] for _ in tasks]
        for number, task_reads in enumerate(self.reads):
            for read in task_reads:
                self.readers[read].append(number)
        self.wanted = self._wanted()

    def _wanted(self) -> list[float]:
        """Compute the deadline of each task's begin for all kernels to run in program order without waiting.

        The deadline of a collective, and of a kernel whose result one reads, is its duration before that of its reader.
        Any other kernel may begin as late as the next one: tasks with deadlines during its run must precede it.
        """
        begin: list[float] = []
        computed = 0.0
        for task in self.tasks:
            begin.append(computed)
            computed += 0.0 if task.communicates else task.seconds
        wanted = [0.0] * len(begin)
        for number in reversed(range(len(begin))):
            task, readers = self.tasks[number], self.readers[number]
            sent = [begin[reader] for reader in readers if self.tasks[reader].communicates]
            if task.communicates:
                latest = min((begin[reader] for reader in readers), default=computed)
                wanted[number] = begin[number] = latest - task.seconds
            elif sent:
                wanted[number] = begin[number] = min(begin[number], min(sent) - task.seconds)
            else:
                wanted[number] = begin[number] + task.seconds
        return wanted

    def order(self) -> _Order:
        """Schedule all tasks."""
        tasks = self.tasks
        missing = [len(task_reads) for task_reads in self.reads]
        kernels = self._kernels_in_order() if self.in_order else []
        ready: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        kernels_ready: set[int] = set()
        running: list[tuple[float, int]] = []
        free = {True: True, False: True}
        now = 0.0
        order = _Order([], [], [0.0] * len(tasks))

        def make_ready(number: int) -> None:
            heapq.heappush(ready[tasks[number].communicates], (self.wanted[number], number))
            kernels_ready.add(number)

        for number, count in enumerate(missing):
            if not count:
                make_ready(number)
        while True:
            for communicates in (True, False):
                if not free[communicates]:
                    continue
                if communicates or not self.in_order:
                    if not ready[communicates]:
                        continue
                    number = heapq.heappop(ready[communicates])[1]
                else:
                    following = len(order.computed)
                    if following == len(kernels) or kernels[following] not in kernels_ready:
                        continue
                    number = kernels[following]
                (order.communicated if communicates else order.computed).append(number)
                order.begin[number] = now
                free[communicates] = False
                heapq.heappush(running, (now + tasks[number].seconds, number))
            if not running:
                return order
            now = running[0][0]
            while running and running[0][0] <= now:
                number = heapq.heappop(running)[1]
                free[tasks[number].communicates] = True
                for reader in self.readers[number]:
                    missing[reader] -= 1
                    if not missing[reader]:
                        make_ready(reader)

    def _kernels_in_order(self) -> list[int]:
        """Order the kernels by deadline, each after its dependencies."""
        missing = [len(task_reads) for task_reads in self.reads]
        ready = [(self.wanted[number], number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            number = heapq.heappop(ready)[1]
            if not self.tasks[number].communicates:
                order.append(number)
            for reader in self.readers[number]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (self.wanted[reader], reader))
        return order


class _Planned:
    """A schedule under construction: the starts of collectives, and the waits for them."""

    def __init__(self, tasks: Sequence[StreamTask], order: _Order):
        self.tasks = tasks
        self.computed, self.communicated, self.begin = order.computed, order.communicated, order.begin
        self.readers = _readers(tasks)

    def schedule(self, limit: int | None) -> Schedule | None:
        """List the launches, with collectives started just in time; None if they hold more bytes than ``limit``."""
        slots, waits = self._slots()
        room = limit
        for _ in range(_TRIES):
            starts = slots if room is None else self._within(slots, waits, room)
            result = _evaluated(self.tasks, self._launches(starts, waits))
            if limit is None or room is None or result.peak_bytes <= limit:
                return result
            room -= result.peak_bytes - limit
        return None

    def _slots(self) -> tuple[dict[int, int], dict[int, int]]:
        """Count, for each collective, the kernels launched before its start, and before the wait for it."""
        place = {number: at for at, number in enumerate(self.computed)}
        end = [self.begin[number] + self.tasks[number].seconds for number in self.computed]
        waits: dict[int, int] = {}
        latest: dict[int, float] = {}  # the latest begin of each task that delays no other
        following = math.inf
        for number in reversed(self.communicated):
            due, wait = following, len(self.computed)
            for reader in self.readers[number]:
                if self.tasks[reader].communicates:
                    due, wait = min(due, latest[reader]), min(wait, waits[reader])
                else:
                    due, wait = min(due, self.begin[reader]), min(wait, place[reader])
            waits[number] = wait
            if due == math.inf:  # an output of the program: it may end with the program
                due = max(end[-1] if end else 0.0, self.begin[number] + self.tasks[number].seconds)
            latest[number] = following = max(due - self.tasks[number].seconds, self.begin[number])
        slots = {}
        for number in self.communicated:
            after_inputs = [place[read] + 1 for read in self.tasks[number].reads if read in place]
            slot = bisect.bisect_right(end, latest[number] + _EQUAL * abs(latest[number]))
            slots[number] = min(max([slot, *after_inputs]), waits[number])
        return slots, waits

    def _within(self, slots: dict[int, int], waits: dict[int, int], room: int) -> dict[int, int]:
        """Delay starts as far as needed for ``room`` to suffice, if that is possible."""
        latest = dict(slots)
        for number in reversed(self.communicated):  # a slot no later than its wait, or the start of a collective reader
            later = [latest[reader] for reader in self.readers[number] if self.tasks[reader].communicates]
            latest[number] = min([waits[number], *later])
        launches = self._launches(latest, waits)
        nbytes = held(self.tasks, launches)
        # Bytes held at each kernel, and between kernels.
        level = [0] * (len(self.computed) + 1)
        at = 0
        for launch, task_bytes in zip(launches, nbytes, strict=True):
            level[at] = max(level[at], task_bytes)
            at += launch.what == RUN
        starts: dict[int, int] = {}
        for number in self.communicated:
            size, slot = self.tasks[number].nbytes, latest[number]
            earliest = max([slots[number], *(starts[r] for r in self.tasks[number].reads if r in starts)])
            while slot > earliest and level[slot - 1] + size <= room:
                slot -= 1
                level[slot] += size
            starts[number] = slot
        return starts

    def _launches(self, starts: dict[int, int], waits: dict[int, int]) -> list[Launch]:
        begun: dict[int, list[int]] = {}
        ended: dict[int, list[int]] = {}
        for number in self.communicated:
            begun.setdefault(starts[number], []).append(number)
            if not self.readers[number] or any(not self.tasks[r].communicates for r in self.readers[number]):
                ended.setdefault(waits[number], []).append(number)
        launches = []
        for at, kernel in enumerate([*self.computed, None]):
            launches += [Launch(START, number) for number in begun.get(at, ())]
            launches += [Launch(WAIT, number) for number in ended.get(at, ())]
            if kernel is not None:
                launches.append(Launch(RUN, kernel))
        return launches
