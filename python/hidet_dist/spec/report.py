"""Reports of searches as plain data: bounds, runner-ups, memory over time, incumbents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from hidet_dist.codec import OMITTED, Signed, decode, encode
from hidet_dist.errors import PlanError, SpecError


@dataclass(frozen=True)
class RunnerUp:
    """The next best choice of an operator, or another choice of a weight.

    Attributes
    ----------
    spec: the spec, as text.
    at_least_seconds: a lower bound on all plans with this choice. It is attained if no budget binds and no tensor has
        very many readers. None if the graph is too densely connected to compute it.
    alone_seconds: the seconds of the plan with only this choice changed, ignoring memory.
    """

    spec: str
    at_least_seconds: Signed | None
    alone_seconds: Signed


@dataclass(frozen=True)
class Saving:
    """The cheapest known choice of an operator or a tensor that avoids a conversion or a reduction.

    Attributes
    ----------
    operator: the operator at which the plan has the conversion or reduction; None for a graph output.
    tensor: the name of the converted or reduced tensor.
    target: the spec that it is converted to, as text; empty for a reduction.
    changed: the name of the operator or tensor whose spec differs, such as ``op:7`` or ``w0``.
    spec: that spec, as text.
    at_least_seconds, alone_seconds: the times of plans with it, as for a :class:`RunnerUp`.
    """

    operator: int | None
    tensor: str
    target: str
    changed: str
    spec: str
    at_least_seconds: Signed | None
    alone_seconds: Signed


@dataclass(frozen=True)
class PlanRow:
    """A line of a plan's table: an operator, a conversion for it (after ``|-``), or a graph output."""

    name: str
    in_spec: str
    out_spec: str
    seconds: float


@dataclass(frozen=True)
class IncumbentTimes:
    """The seconds of the best plan at some time of the search, and the lower bound at that time.

    ``elapsed_seconds`` is None in artifacts, which do not depend on the machine that searched.
    """

    seconds: float
    bound_seconds: Signed
    elapsed_seconds: float | None


@dataclass(frozen=True)
class Incumbent(IncumbentTimes):
    """The best plan at some time of the search.

    ``rows`` are the parts of its table that differ from the previous incumbent's, by operator number; the graph outputs
    come last.
    """

    rows: dict[int, tuple[PlanRow, ...]]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind: their count, and the bytes of their tensors, whole within each group."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Holding:
    """Bytes of ``tensor`` that a device holds from program point ``begin`` to ``end`` (included).

    ``what`` is ``weight``, ``state``, ``input`` or ``output`` for tensors that are held during the whole run,
    ``activation`` for an operator's result, ``converted`` for a tensor in another spec, and ``buffer`` for a
    conversion's buffers.
    """

    tensor: str
    what: str
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class StepTaken:
    """A step of the search within a memory budget (:data:`hidet_dist.search.steps.STEPS`).

    Attributes
    ----------
    name: the name of the step.
    gap_before, gap_after: (seconds - bound) / seconds of the best plan, before and after; None if no plan fitted yet.
    seconds: what it took; None in artifacts, which do not depend on the machine that searched.
    """

    name: str
    gap_before: float | None
    gap_after: float | None
    seconds: float | None


@dataclass(frozen=True)
class SearchCourse:
    """The course of a search.

    Attributes
    ----------
    mode: ``search`` or ``propagate``.
    bound_seconds: a lower bound on the sum of seconds of all plans; 0 if none was proven.
    gap: (seconds - bound) / seconds, the most that a better plan could save, for the plan of the least sum of seconds
        that the search found. A plan chosen for its makespan may have a greater sum; of makespans nothing is proven.
    time_limit_reached: whether the time limit cut the search short, so that its result depends on the machine's speed.
    incumbents: the successive best plans; the last one is the plan. Its sum of seconds may exceed the previous one's if
        it was chosen for its makespan.
    steps: the steps of the search for the least sum of seconds, in order.
    """

    mode: str
    bound_seconds: Signed
    gap: Signed
    time_limit_reached: bool
    incumbents: tuple[IncumbentTimes, ...]
    steps: tuple[StepTaken, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SearchReport(SearchCourse):
    """The report of a search: its course, and what it found.

    Attributes
    ----------
    mem_budget: bytes of memory allowed per device.
    live_bytes: peak bytes of a device during each operator, then for the graph outputs.
    traffic: by kind of collective.
    runner_ups: one per operator; None if it has only one choice.
    weights: for each weight, its other choices.
    savings: for each conversion and reduction of the plan that another choice avoids, the cheapest such choice.
    device: where parts are unequal, the coordinate of the device of ``mem_budget`` and ``live_bytes``: the one that has
        the least room left. Empty for a device with the largest shards.
    """

    incumbents: tuple[Incumbent, ...]
    mem_budget: int
    live_bytes: tuple[int, ...]
    traffic: dict[str, Traffic]
    runner_ups: tuple[RunnerUp | None, ...]
    weights: tuple[tuple[RunnerUp, ...], ...] = ()
    savings: tuple[Saving, ...] = ()
    device: Annotated[tuple[int, ...], OMITTED] = ()

    def course(self) -> SearchCourse:
        """Return the course of the search alone, without the tables of its plans."""
        times = tuple(IncumbentTimes(one.seconds, one.bound_seconds, one.elapsed_seconds) for one in self.incumbents)
        return SearchCourse(self.mode, self.bound_seconds, self.gap, self.time_limit_reached, times, self.steps)

    def without_times(self) -> SearchReport:
        """Return the report without measured times, so that equal input gives an equal report."""
        incumbents = tuple(replace(incumbent, elapsed_seconds=None) for incumbent in self.incumbents)
        steps = tuple(replace(step, seconds=None) for step in self.steps)
        return replace(self, incumbents=incumbents, steps=steps)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_json(cls, data: Any) -> SearchReport:
        """Read the JSON values that :meth:`to_json` makes. Raises PlanError for others."""
        try:
            return decode(cls, data, "the report")
        except SpecError as error:
            raise PlanError(f"Not a report of a search: {error}") from error
