"""The overlap of communication and computation in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hidet_dist.spec.reading import read_field, read_list, read_number, read_object, read_text, read_whole


@dataclass(frozen=True)
class HiddenPlan:
    """One collective, and the part of its time that computation hides.

    Attributes
    ----------
    operator: the operator whose conversions or results it belongs to; None for a graph output.
    tensor: the name of the tensor that is communicated.
    step: the conversion step or reduce function, as text.
    seconds: the time of the collective, without the copies before and after it.
    hidden_seconds: the part of ``seconds`` that the computation does not wait for.
    """

    operator: int | None
    tensor: str
    step: str
    seconds: float
    hidden_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> HiddenPlan:
        """Read the JSON values that :meth:`to_json` makes. Raises SpecError for others."""
        data = read_object(data, "a hidden collective")
        operator = None if read_field(data, "operator") is None else read_whole(data, "operator")
        seconds, hidden_seconds = read_number(data, "seconds"), read_number(data, "hidden_seconds")
        return cls(operator, read_text(data, "tensor"), read_text(data, "step"), seconds, hidden_seconds)


@dataclass(frozen=True)
class OverlapPlan:
    """The schedule of a stage on devices that overlap communication with computation.

    ``seconds`` is the makespan of its schedule on two streams, ``held_bytes`` the peak memory of a device, including
    weights, graph inputs and graph outputs. ``communications`` are in launch order.
    """

    seconds: float
    held_bytes: int
    communications: tuple[HiddenPlan, ...]

    @property
    def hidden_seconds(self) -> float:
        """The seconds of communication that the computation does not wait for."""
        return sum(one.hidden_seconds for one in self.communications)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        communications = [one.to_json() for one in self.communications]
        return {"seconds": self.seconds, "held_bytes": self.held_bytes, "communications": communications}

    @classmethod
    def from_json(cls, data: Any) -> OverlapPlan:
        """Read the JSON values that :meth:`to_json` makes. Raises SpecError for others."""
        data = read_object(data, "the overlap")
        communications = tuple(map(HiddenPlan.from_json, read_list(data, "communications")))
        return cls(read_number(data, "seconds"), read_whole(data, "held_bytes"), communications)
