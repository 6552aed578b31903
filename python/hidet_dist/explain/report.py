"""The search's report on a plan, as plain data: bounds, runner-ups, memory over time, incumbents."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hidet_dist.errors import PlanError


@dataclass(frozen=True)
class RunnerUp:
    """The next best choice of an operator.

    Attributes
    ----------
    spec: its operator sharding spec, as text.
    at_least_seconds: a lower bound of all plans with this choice. It is attained if no budget binds and no tensor has
        very many readers. None if the graph is too densely connected to compute it.
    alone_seconds: the seconds of the plan with this choice and all others unchanged, whatever memory that needs.
    """

    spec: str
    at_least_seconds: float | None
    alone_seconds: float


@dataclass(frozen=True)
class Row:
    """A line of a plan's table: an operator, a tensor that is converted for it (after ``|-``), or a graph output."""

    name: str
    in_spec: str
    out_spec: str
    seconds: float


@dataclass(frozen=True)
class Incumbent:
    """The best plan known at a point of the search, and the lower bound known then.

    ``rows`` are the parts of its table that differ from the previous incumbent's, by operator number; the graph outputs
    come last. ``elapsed_seconds`` is None in artifacts, which do not depend on the machine that searched.
    """

    seconds: float
    bound_seconds: float
    elapsed_seconds: float | None
    rows: dict[int, tuple[Row, ...]]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind: their count, and the bytes of their tensors, each whole within its group."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class SearchReport:
    """The report of a search.

    Attributes
    ----------
    mode: ``search`` or ``propagate``.
    bound_seconds: a lower bound of all plans; 0 if none was proven.
    gap: (seconds - bound) / seconds, the most that a better plan could save.
    mem_budget: bytes of memory allowed per device.
    live_bytes: peak bytes of a device during each operator, then for the graph outputs.
    traffic: by kind of collective.
    runner_ups: one an operator; None where it has one choice only.
    incumbents: the best plans known in turn; the last one is the plan. Its sum of seconds may exceed the previous
        one's if it was chosen for its makespan.
    time_limit_reached: whether the time limit cut the search short, so that its result depends on the machine's speed.
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

    def without_times(self) -> SearchReport:
        """The report without measured times, so that the same input gives the same report."""
        incumbents = tuple(replace(incumbent, elapsed_seconds=None) for incumbent in self.incumbents)
        return replace(self, incumbents=incumbents)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SearchReport:
        """The inverse of :meth:`to_json`. Raises PlanError for anything else."""
        try:
            incumbents = tuple(
                Incumbent(
                    one["seconds"],
                    one["bound_seconds"],
                    one["elapsed_seconds"],
                    {int(number): tuple(Row(**row) for row in rows) for number, rows in one["rows"].items()},
                )
                for one in data["incumbents"]
            )
            return cls(
                data["mode"],
                data["bound_seconds"],
                data["gap"],
                data["mem_budget"],
                tuple(data["live_bytes"]),
                {kind: Traffic(**own) for kind, own in data["traffic"].items()},
                tuple(None if own is None else RunnerUp(**own) for own in data["runner_ups"]),
                incumbents,
                data["time_limit_reached"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"Not a report of a search: {type(error).__name__}: {error}") from error
