"""Dynamic programs over the cuts of a chain of units and the slices of the mesh.

Stages take slices of the mesh in the order of their ranks, and together all ranks. A state is the first unit of a
stage, the slice of the stage, and the spec in which data arrives there. The program runs from the last device to the
first. A stage does not compute while it sends and receives, so messages count for its period, the time from one
micro-batch to the next. A state therefore also has the number of streams in which its data arrives: the number of
devices of the smaller of the two slices.

N micro-batches take ``sum + (N - 1) * slowest`` (Zheng et al., Alpa, OSDI 2022, section 5). The least sum of stages
whose periods are below a limit is computed for several limits. Between two limits, the lesser limit and the sum for the
greater one bound all pipelines: halving the interval with the least bound closes the gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hidet_dist.machine.slices import MeshSlice

Array = npt.NDArray[np.float64]
_BISECTIONS = 60


@dataclass(frozen=True)
class ChainStage:
    """A stage of a chain: units ``begin`` to ``end`` (excluded) on a slice, and the number of the arriving spec."""

    begin: int
    end: int
    part: MeshSlice
    arrival: int


@dataclass(frozen=True)
class Chain:
    """Stages in order, with lower bounds: ``total`` of their seconds with messages, ``slowest`` of their periods."""

    stages: tuple[ChainStage, ...]
    total: float
    slowest: float

    def seconds(self, micro_batches: int) -> float:
        """Bound the seconds of a batch of micro-batches."""
        return self.total + (micro_batches - 1) * self.slowest


@dataclass(frozen=True)
class Allowed:
    """The user's constraints on one stage: its possible slices and runs ``[begin, end]`` of units; None for all."""

    parts: frozenset[MeshSlice] | None
    runs: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class ChainProblem:
    """The bounds of all possible stages.

    Attributes
    ----------
    devices: the number of all devices.
    starts: the slices that begin at each rank.
    bounds: by slice, ``[i, j, s]``: seconds of the units i to j (excluded) whose data arrives in spec s; infinite if
        there is no such stage.
    send: ``[i, s]``: seconds to send the tensor that enters unit i from one slice to another, where it arrives in spec
        s; infinite for the first unit, which has no such tensor.
    receive: ``[i, s]``: seconds to receive the tensor that enters unit i on a slice, in a number of streams and in spec
        s; 0 for the first unit.
    deliver: seconds to send the results from the last stage's slice to all others.
    stages: the constraints on each stage; None for any number of stages, two or more.
    """

    devices: int
    starts: Mapping[int, Sequence[MeshSlice]]
    bounds: Mapping[MeshSlice, Array]
    send: Callable[[MeshSlice, MeshSlice], Array]
    receive: Callable[[MeshSlice, int], Array]
    deliver: Callable[[MeshSlice], float]
    stages: Sequence[Allowed] | None = None


@dataclass(frozen=True)
class _Ways:
    """The continuations after a cut before each unit (first dim): those that send less have a greater value.

    ``send`` is the seconds of the message and ``value`` the value of the later stages; both are infinite where there
    are fewer continuations. ``part`` is the number of the next slice among those that begin there, ``arrival`` the
    number of the arriving spec.
    """

    send: Array
    value: Array
    part: npt.NDArray[np.int64]
    arrival: npt.NDArray[np.int64]


class _DynamicProgram:
    """One pass of the dynamic program: the least sum of stages with periods up to ``most``, or the least period."""

    def __init__(self, problem: ChainProblem, most: float, maximum: bool):
        self.problem, self.most, self.maximum = problem, most, maximum
        bounds = next(iter(problem.bounds.values()))
        self.units = bounds.shape[0]
        layers = [None] if problem.stages is None else list(problem.stages)
        self.count = len(layers)
        # The value of a stage that begins with unit i and spec s, by the stage's number (0 without constraints), its
        # slice, and the streams in which its data arrives.
        self.value: dict[tuple[int, MeshSlice, int], Array] = {}
        self._ways: dict[tuple[int, MeshSlice], _Ways | None] = {}
        slices = [part for parts in problem.starts.values() for part in parts]
        self.streams = {
            part: sorted({min(other.size, part.size) for other in slices if other.stop == part.start}) or [0]
            for part in slices
        }
        ranks = sorted(problem.starts, reverse=True)
        for k in range(self.count - 1, -1, -1):
            for rank in ranks:
                for part in problem.starts[rank]:
                    allowed = layers[k]
                    if allowed is not None and allowed.parts is not None and part not in allowed.parts:
                        continue
                    for streams in self.streams[part]:
                        value = self._stage(k, part, allowed, streams)
                        if value is not None:
                            self.value[k, part, streams] = value

    def _following(self, k: int) -> int | None:
        if self.problem.stages is None:
            return k
        return k + 1 if k + 1 < self.count else None

    def _masked(self, part: MeshSlice, allowed: Allowed | None) -> Array:
        bounds = self.problem.bounds[part]
        if allowed is None or allowed.runs is None:
            return bounds
        return np.where(allowed.runs[:, :, None], bounds, np.inf)

    def _stage(self, k: int, part: MeshSlice, allowed: Allowed | None, streams: int) -> Array | None:
        problem = self.problem
        bounds = self._masked(part, allowed)
        if part.stop == problem.devices:
            if problem.stages is not None and k + 1 < self.count:
                return None
            busy: Array = bounds[:, self.units] + (problem.deliver(part) if part.start else 0.0)
            period = busy + problem.receive(part, streams)
            return period if self.maximum else np.where(period <= self.most, busy, np.inf)
        following = self._following(k)
        ways = None if following is None else self._continuations(following, part)
        if ways is None:
            return None
        best = np.full((bounds.shape[0], bounds.shape[2]), np.inf)
        for rank in range(ways.send.shape[1]):
            send, value = (array[None, :, rank, None] for array in (ways.send, ways.value))
            busy = bounds[:, : self.units] + send
            period = busy + problem.receive(part, streams)[:, None, :]
            total = self._joined(period, busy, value)
            best = np.minimum(best, total.min(axis=1))
        return best

    def _continuations(self, k: int, part: MeshSlice) -> _Ways | None:
        """Find the continuations with stage ``k`` after a slice, for a cut before each unit."""
        key = k, part
        if key not in self._ways:
            others = [
                (n, other)
                for n, other in enumerate(self.problem.starts.get(part.stop, ()))
                if (k, other, min(part.size, other.size)) in self.value
            ]
            if not others:
                self._ways[key] = None
                return None
            values = [self.value[k, other, min(part.size, other.size)] for _, other in others]
            send = np.concatenate([self.problem.send(part, other) for _, other in others], axis=1)
            value = np.concatenate(values, axis=1)
            number = np.concatenate([np.full(v.shape[1], n) for (n, _), v in zip(others, values, strict=True)])
            arrival = np.concatenate([np.arange(v.shape[1]) for v in values])
            rows = np.arange(len(send))
            if self.maximum or math.isfinite(self.most):
                order = np.argsort(send, axis=1, kind="stable")
                send, value = np.take_along_axis(send, order, axis=1), np.take_along_axis(value, order, axis=1)
                before = np.minimum.accumulate(value, axis=1)
                better = value < np.concatenate([np.full((len(send), 1), np.inf), before[:, :-1]], axis=1)
                ranks = max(1, int(better.sum(axis=1).max()))
                place = np.argsort(~better, axis=1, kind="stable")[:, :ranks]
                kept = np.take_along_axis(better, place, axis=1)
                chosen = np.take_along_axis(order, place, axis=1)
                send = np.where(kept, np.take_along_axis(send, place, axis=1), np.inf)
                value = np.where(kept, np.take_along_axis(value, place, axis=1), np.inf)
            else:
                chosen = np.argmin(send + value, axis=1)[:, None]
                send, value = send[rows[:, None], chosen], value[rows[:, None], chosen]
            self._ways[key] = _Ways(send, value, number[chosen], arrival[chosen])
        return self._ways[key]

    def _joined(self, period: Array, busy: Array, value: Array) -> Array:
        """Combine a stage and the value of the later stages."""
        if self.maximum:
            return np.maximum(period, value)
        return np.where(period <= self.most, busy + value, np.inf)

    def best(self) -> Chain | None:
        """Return the best pipeline; None if there is none."""
        problem, layers = self.problem, self.problem.stages
        firsts = [
            (float(self.value[0, part, 0][0, 0]), part)
            for part in problem.starts[0]
            if (0, part, 0) in self.value and (layers is not None or part.stop < problem.devices)
        ]
        value, part = min(firsts, default=(math.inf, MeshSlice(0, 1)))
        if not math.isfinite(value):
            return None
        stages: list[ChainStage] = []
        busy_seconds: list[float] = []
        periods: list[float] = []
        k, unit, arrival, streams = 0, 0, 0, 0
        while True:
            bounds = self._masked(part, None if layers is None else layers[k])[unit, :, arrival]
            receive = float(problem.receive(part, streams)[unit, arrival])
            if part.stop == problem.devices:
                stages.append(ChainStage(unit, self.units, part, arrival))
                busy_seconds.append(float(bounds[self.units]) + (problem.deliver(part) if part.start else 0.0))
                periods.append(busy_seconds[-1] + receive)
                return Chain(tuple(stages), math.fsum(busy_seconds), max(periods))
            following = self._following(k)
            ways = None if following is None else self._continuations(following, part)
            assert following is not None and ways is not None
            busy = bounds[: self.units, None] + ways.send
            period = busy + receive
            total = self._joined(period, busy, ways.value)
            j, n = np.unravel_index(int(total.argmin()), total.shape)
            stages.append(ChainStage(unit, int(j), part, arrival))
            busy_seconds.append(float(busy[j, n]))
            periods.append(float(period[j, n]))
            k, unit, arrival = following, int(j), int(ways.arrival[j, n])
            next_part = problem.starts[part.stop][int(ways.part[j, n])]
            part, streams = next_part, min(part.size, next_part.size)


def least_sum(problem: ChainProblem, most: float = math.inf) -> Chain | None:
    """Find the pipeline of the least sum whose periods are at most ``most`` seconds; None if there is none."""
    return _DynamicProgram(problem, most, False).best()


def least_slowest(problem: ChainProblem) -> Chain | None:
    """Find the pipeline with the least period of its slowest stage; None if there is none."""
    return _DynamicProgram(problem, math.inf, True).best()


@dataclass(frozen=True)
class Batched:
    """A pipeline for a number of micro-batches, and a bound of all pipelines."""

    chain: Chain
    bound: float


def least_batch(problem: ChainProblem, micro_batches: int, gap: float) -> Batched | None:
    """Find the pipeline of least ``sum + (micro_batches - 1) * slowest``, to a relative gap; None if there is none."""
    waits = micro_batches - 1
    first = least_sum(problem)
    if first is None:
        return None
    best = first
    if not waits:
        return Batched(best, best.total)
    quickest = least_slowest(problem)
    assert quickest is not None
    if quickest.seconds(micro_batches) < best.seconds(micro_batches):
        best = quickest
    # Intervals of the slowest stage's period: (bound, least, greatest, least sum of pipelines up to the greatest).
    floor = quickest.slowest
    intervals = [(first.total + waits * floor, floor, first.slowest, first.total)]
    closed = math.inf
    for _ in range(_BISECTIONS):
        value = best.seconds(micro_batches)
        left = [one for one in intervals if one[0] < value * (1 - gap) and one[1] < one[2]]
        closed = min([closed, *(one[0] for one in intervals if one not in left)])
        intervals = left
        if not intervals:
            break
        intervals.remove(widest := min(intervals))
        _, low, high, least = widest
        middle = (low + high) / 2
        chain = least_sum(problem, middle)
        if chain is not None:
            if chain.seconds(micro_batches) < value:
                best = chain
            # Pipelines between this one's slowest stage and the middle are no better.
            intervals.append((chain.total + waits * low, low, chain.slowest, chain.total))
        intervals.append((least + waits * middle, middle, high, least))
    value = best.seconds(micro_batches)
    return Batched(best, min([value, closed, *(one[0] for one in intervals)]))
