"""What a plan says of communication beside computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hidet_dist.spec.reading import read_field, read_list, read_number, read_object, read_text, read_whole


@dataclass(frozen=True)
class HiddenPlan:
    """One collective and how much of its time passes while something is computed.

    Attributes
    ----------
    operator: the operator whose conversions or results it belongs to; None for a graph output.
    tensor: what is communicated.
    step: the conversion step or reduce function, as text.
    seconds: the collective's own time, without the copies around it.
    hidden_seconds: how much of that the computation does not wait for.
    """

    operator: int | None
    tensor: str
    step: str
    seconds: float
    hidden_seconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> HiddenPlan:
        """The inverse of :meth:`to_json`. Raises SpecError."""
        data = read_object(data, "a hidden collective")
        operator = None if read_field(data, "operator") is None else read_whole(data, "operator")
        seconds, hidden_seconds = read_number(data, "seconds"), read_number(data, "hidden_seconds")
        return cls(operator, read_text(data, "tensor"), read_text(data, "step"), seconds, hidden_seconds)


@dataclass(frozen=True)
class OverlapPlan:
    """A stage on a device that communicates beside computing.

    ``seconds`` is the makespan of its schedule on two streams, ``held_bytes`` the most that a device holds at a time,
    weights, graph inputs and outputs included. ``communications`` are in the order in which they are launched.
    """

    seconds: float
    held_bytes: int
    communications: tuple[HiddenPlan, ...]

    @property
    def hidden_seconds(self) -> float:
        """The communication that the computation does not wait for."""
        return sum(own.hidden_seconds for own in self.communications)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        communications = [own.to_json() for own in self.communications]
        return {"seconds": self.seconds, "held_bytes": self.held_bytes, "communications": communications}

    @classmethod
    def from_json(cls, data: Any) -> OverlapPlan:
        """The inverse of :meth:`to_json`. Raises SpecError."""
        data = read_object(data, "the overlap")
        communications = tuple(map(HiddenPlan.from_json, read_list(data, "communications")))
        return cls(read_number(data, "seconds"), read_whole(data, "held_bytes"), communications)
