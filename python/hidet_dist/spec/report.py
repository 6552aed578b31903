"""Reports of searches as plain data: bounds, runner-ups, memory over time, incumbents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hidet_dist.errors import PlanError, SpecError
from hidet_dist.spec.reading import (
    LARGEST,
    read_field,
    read_flag,
    read_list,
    read_number,
    read_object,
    read_text,
    read_whole,
    read_wholes,
)

_MOST_DIGITS = 18  # the most digits of an operator's number


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
    at_least_seconds: float | None
    alone_seconds: float


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
    at_least_seconds: float | None
    alone_seconds: float


@dataclass(frozen=True)
class Row:
    """A line of a plan's table: an operator, a conversion for it (after ``|-``), or a graph output."""

    name: str
    in_spec: str
    out_spec: str
    seconds: float


@dataclass(frozen=True)
class Incumbent:
    """The best plan at some time of the search, and the lower bound at that time.

    ``rows`` are the parts of its table that differ from the previous incumbent's, by operator number; the graph outputs
    come last. ``elapsed_seconds`` is None in artifacts, which do not depend on the machine that searched.
    """

    seconds: float
    bound_seconds: float
    elapsed_seconds: float | None
    rows: dict[int, tuple[Row, ...]]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind: their count, and the bytes of their tensors, whole within each group."""

    count: int
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
class SearchReport:
    """The report of a search.

    Attributes
    ----------
    mode: ``search`` or ``propagate``.
    bound_seconds: a lower bound on the sum of seconds of all plans; 0 if none was proven.
    gap: (seconds - bound) / seconds, the most that a better plan could save, for the plan of the least sum of seconds
        that the search found. A plan chosen for its makespan may have a greater sum; of makespans nothing is proven.
    mem_budget: bytes of memory allowed per device.
    live_bytes: peak bytes of a device during each operator, then for the graph outputs.
    traffic: by kind of collective.
    runner_ups: one per operator; None if it has only one choice.
    incumbents: the successive best plans; the last one is the plan. Its sum of seconds may exceed the previous one's if
        it was chosen for its makespan.
    time_limit_reached: whether the time limit cut the search short, so that its result depends on the machine's speed.
    weights: for each weight, its other choices.
    savings: for each conversion and reduction of the plan that another choice avoids, the cheapest such choice.
    steps: the steps of the search for the least sum of seconds, in order.
    """

    mode: str
    bound_seconds: float
    gap: float
    mem_budget: int
    live_bytes: tuple[int, ...]
    traffic: dict[str, Traffic]
    runner_ups: tuple[RunnerUp | None, ...]
    incumbents: tuple[Incumbent, ...]
    time_limit_reached: bool = False
    weights: tuple[tuple[RunnerUp, ...], ...] = ()
    savings: tuple[Saving, ...] = ()
    steps: tuple[StepTaken, ...] = ()

    def without_times(self) -> SearchReport:
        """Return the report without measured times, so that equal input gives an equal report."""
        incumbents = tuple(replace(incumbent, elapsed_seconds=None) for incumbent in self.incumbents)
        steps = tuple(replace(step, seconds=None) for step in self.steps)
        return replace(self, incumbents=incumbents, steps=steps)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> SearchReport:
        """Read the JSON values that :meth:`to_json` makes. Raises PlanError for others."""
        try:
            data = read_object(data, "a report")
            runner_ups = (None if one is None else _runner_up(one) for one in read_list(data, "runner_ups"))
            traffic = read_object(read_field(data, "traffic"), "traffic")
            return cls(
                read_text(data, "mode"),
                read_number(data, "bound_seconds", -LARGEST),
                read_number(data, "gap", -LARGEST),
                read_whole(data, "mem_budget"),
                read_wholes(data, "live_bytes"),
                {kind: _traffic(one) for kind, one in traffic.items()},
                tuple(runner_ups),
                tuple(map(_incumbent, read_list(data, "incumbents"))),
                read_flag(data, "time_limit_reached"),
                tuple(tuple(map(_runner_up, choices)) for choices in _lists(data, "weights")),
                tuple(map(_saving, read_list(data, "savings"))),
                tuple(map(_step, read_list(data, "steps") if "steps" in data else ())),
            )
        except SpecError as error:
            raise PlanError(f"Not a report of a search: {error}") from error


def _step(data: Any) -> StepTaken:
    data = read_object(data, "a step")
    figures = ("gap_before", "gap_after", "seconds")
    given = (None if read_field(data, key) is None else read_number(data, key) for key in figures)
    return StepTaken(read_text(data, "name"), *given)


def _traffic(data: Any) -> Traffic:
    data = read_object(data, "traffic")
    return Traffic(read_whole(data, "count"), read_whole(data, "nbytes"))


def _runner_up(data: Any) -> RunnerUp:
    data = read_object(data, "a runner-up")
    known = read_field(data, "at_least_seconds") is not None
    at_least = read_number(data, "at_least_seconds", -LARGEST) if known else None
    return RunnerUp(read_text(data, "spec"), at_least, read_number(data, "alone_seconds", -LARGEST))


def _lists(data: Mapping[str, Any], key: str) -> Iterator[list[Any]]:
    for number, entry in enumerate(read_list(data, key)):
        yield read_list({f"{key}[{number}]": entry}, f"{key}[{number}]")


def _saving(data: Any) -> Saving:
    data = read_object(data, "a saving")
    choice = _runner_up(data)
    operator = None if read_field(data, "operator") is None else read_whole(data, "operator")
    tensor, target, changed = (read_text(data, key) for key in ("tensor", "target", "changed"))
    return Saving(operator, tensor, target, changed, choice.spec, choice.at_least_seconds, choice.alone_seconds)


def _incumbent(data: Any) -> Incumbent:
    data = read_object(data, "an incumbent")
    timed = read_field(data, "elapsed_seconds") is not None
    rows = read_object(read_field(data, "rows"), "rows")
    for number in rows:
        if not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise SpecError(f"rows has the key {ascii(number)[:_MOST_DIGITS]}; its keys are numbers of operators.")
    return Incumbent(
        read_number(data, "seconds"),
        read_number(data, "bound_seconds", -LARGEST),
        read_number(data, "elapsed_seconds") if timed else None,
        {int(number): tuple(map(_row, read_list(rows, number))) for number in rows},
    )


def _row(data: Any) -> Row:
    data = read_object(data, "a row")
    in_spec, out_spec = read_text(data, "in_spec"), read_text(data, "out_spec")
    return Row(read_text(data, "name"), in_spec, out_spec, read_number(data, "seconds"))
