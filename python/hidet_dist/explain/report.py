"""What only the search knows of a plan, as plain data."""

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
        """The same, less the times of the machine that searched: it is the same for the same input."""
        incumbents = tuple(replace(incumbent, elapsed_seconds=None) for incumbent in self.incumbents)
        return replace(self, incumbents=incumbents)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
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
