"""What the search for a pipeline minimises. A new objective is an entry of :data:`OBJECTIVES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    """A sum of two times of a pipeline, each counted so many times.

    Attributes
    ----------
    meaning: for the user, after "the seconds".
    through: how often the seconds of one micro-batch through all stages count, with messages.
    slowest: how often those of the slowest stage in one micro-batch count, with its messages, by the number of
        micro-batches.
    """

    meaning: str
    through: int
    slowest: Callable[[int], int]

    @property
    def fills(self) -> bool:
        """True if stages work at the same time, on several micro-batches or on several calls."""
        return self.slowest(2) > 0

    def seconds(self, through: float, slowest: float, micro_batches: int) -> float:
        """Compute the objective's value of a pipeline from the two times."""
        waits = self.slowest(micro_batches)
        first = self.through * through if self.through else 0.0  # a time that does not count may be infinite
        return first + (waits * slowest if waits else 0.0)

    def is_buffered(self, micro_batches: int) -> bool:
        """Tell whether a device holds the inputs of the next micro-batch beside those of the present one."""
        return self.fills or micro_batches > 1


DEFAULT = "latency"

OBJECTIVES = {
    "latency": Objective("of one micro-batch through all stages, with messages", 1, lambda micro_batches: 0),
    "throughput": Objective(
        "of the slowest stage for a batch, with its messages, in a full pipeline",
        0,
        lambda micro_batches: micro_batches,
    ),
    "batch": Objective(
        "of one batch of N micro-batches, ``sum + (N - 1) * slowest``", 1, lambda micro_batches: micro_batches - 1
    ),
}
"""The objectives, by name."""
