"""The options of a search for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_MICRO_BATCHES
from hidet_dist.pipeline.constraints import StageConstraints
from hidet_dist.spec.pipeline import OBJECTIVES, RESULTS


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a search for a pipeline.

    Attributes
    ----------
    objective: the seconds to minimise. ``latency``: of one micro-batch through all stages, with messages.
        ``throughput``: of the slowest stage for a batch, with its messages, in a full pipeline. ``batch``: of one batch
        of N micro-batches, ``sum + (N - 1) * slowest``.
    micro_batches: the number of micro-batches of a batch; None to search for it, except that ``latency`` then uses one.
    outputs: the ranks that get the graph's outputs: ``all``, or those of the ``last`` stage.
    stages: None to search for the stages, of which there may be one; their number; or a constraint for each.
    shares: whether slices of unequal devices may split dims by shares, which are searched with the rest. See
        :mod:`hidet_dist.search.shares`.
    """

    objective: str = "latency"
    micro_batches: int | None = None
    outputs: str = "all"
    stages: StageConstraints = None
    shares: bool = False

    def __post_init__(self) -> None:
        check_pipeline_option("objective", self.objective, "objective")
        check_pipeline_option("micro_batches", self.micro_batches, "micro_batches")
        check_pipeline_option("outputs", self.outputs, "outputs")


def check_pipeline_option(name: str, value: Any, what: str) -> None:
    """Raise ConfigError for a value that the option ``name`` cannot have; ``what`` is the user's name of the option."""
    if name == "micro_batches":
        if value is not None and not is_whole(value, 1, MOST_MICRO_BATCHES):
            raise ConfigError(f"{what} must be a whole number from 1 to {MOST_MICRO_BATCHES}; got {shown(value)}.")
        return
    choices = OBJECTIVES if name == "objective" else RESULTS
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{what} must be one of {', '.join(choices)}; got {shown(value)}.")
