"""The overlap of communication and computation in a plan."""

from __future__ import annotations

from dataclasses import dataclass


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
