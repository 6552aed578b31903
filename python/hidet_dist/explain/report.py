"""What only the search knows of a plan, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hidet_dist.errors import PlanError, SpecError
from hidet_dist.spec.reading import (
    LARGEST,
    read_field,
    read_list,
    read_number,
    read_object,
    read_text,
    read_whole,
    read_wholes,
)

_MOST_DIGITS = 18  # of the number of an operator


@dataclass(frozen=True)
class RunnerUp:
    """The next best choice of an operator.

    Attributes
    ----------
    spec: its operator sharding spec, as text.
    at_least_seconds: no plan with it takes less, all else planned anew; without a budget that binds, and without
        tensors that very many operators read, a plan with it takes just that. None where the graph is too densely
        connected to say.
    alone_seconds: what the plan takes with this choice and everything else as it is, whatever memory that needs.
    """

    spec: str
    at_least_seconds: float | None
    alone_seconds: float


@dataclass(frozen=True)
class Row:
    """A line of a plan's table: an operator, ``|-`` and a tensor that is converted for it, or a graph output."""

    name: str
    in_spec: str
    out_spec: str
    seconds: float


@dataclass(frozen=True)
class Incumbent:
    """A plan that was the best known for a while, and the lower bound known by then.

    ``rows`` are the parts of its table, by operator number (the last is that of the graph outputs), that differ from
    those of the incumbent before. ``elapsed_seconds`` is None where times of the machine at work must not be kept.
    """

    seconds: float
    bound_seconds: float
    elapsed_seconds: float | None
    rows: dict[int, tuple[Row, ...]]


@dataclass(frozen=True)
class Traffic:
    """Collectives of a kind: how many, and the bytes of the tensors, each whole within its group."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class SearchReport:
    """How a plan was found.

    Attributes
    ----------
    mode: ``search`` or ``propagate``.
    bound_seconds: no plan takes less; 0 where nothing was proven.
    gap: how far the plan can be from the best one, relative to its time.
    mem_budget: bytes that a device may hold.
    live_bytes: most bytes that a device holds while each operator is at work, and at the end for the graph outputs.
    traffic: by kind of collective.
    runner_ups: one an operator; None where it has one choice only.
    incumbents: the best plans known in turn, the last is the plan itself; its sum is greater than that of the one
        before where it was taken for its makespan.
    """

    mode: str
    bound_seconds: float
    gap: float
    mem_budget: int
    live_bytes: tuple[int, ...]
    traffic: dict[str, Traffic]
    runner_ups: tuple[RunnerUp | None, ...]
    incumbents: tuple[Incumbent, ...]

    def without_times(self) -> SearchReport:
        """The same, less the times of the machine that searched: it is the same for the same input."""
        incumbents = tuple(replace(incumbent, elapsed_seconds=None) for incumbent in self.incumbents)
        return replace(self, incumbents=incumbents)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> SearchReport:
        """The inverse of :meth:`to_json`. Raises PlanError for anything else."""
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
            )
        except SpecError as error:
            raise PlanError(f"Not a report of a search: {error}") from error


def _traffic(data: Any) -> Traffic:
    data = read_object(data, "traffic")
    return Traffic(read_whole(data, "count"), read_whole(data, "nbytes"))


def _runner_up(data: Any) -> RunnerUp:
    data = read_object(data, "a runner-up")
    known = read_field(data, "at_least_seconds") is not None
    at_least = read_number(data, "at_least_seconds", -LARGEST) if known else None
    return RunnerUp(read_text(data, "spec"), at_least, read_number(data, "alone_seconds", -LARGEST))


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
