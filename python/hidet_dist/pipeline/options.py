"""The options of a search for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_MICRO_BATCHES
from hidet_dist.pipeline.constraints import StageConstraints
from hidet_dist.spec.pipeline import RESULTS

OBJECTIVES = ("latency", "throughput", "batch")


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a search for a pipeline.

    Attributes
    ----------
    objective: what is minimised, in seconds: ``latency`` for the way of one micro-batch through all stages, what is
        sent included; ``throughput`` for what the slowest stage takes for a batch, with what it sends, the pipeline
        being kept full; ``batch`` for one batch of N micro-batches, ``sum + (N - 1) * slowest``.
    micro_batches: how many micro-batches a batch is divided into; None to search for it. For ``latency`` that is one.
    outputs: the ranks that get the graph's outputs: ``all``, or those of the ``last`` stage.
    stages: None for stages that are searched, one being among the candidates; their number; or what is given of each.
    """

    objective: str = "latency"
    micro_batches: int | None = None
    outputs: str = "all"
    stages: StageConstraints = None

    def __post_init__(self) -> None:
        check_pipeline_option("objective", self.objective, "objective")
        check_pipeline_option("micro_batches", self.micro_batches, "micro_batches")
        check_pipeline_option("outputs", self.outputs, "outputs")


def check_pipeline_option(name: str, value: Any, what: str) -> None:
    """Refuse what the option ``name`` cannot be; ``what`` is the user's name of it. Raises ConfigError."""
    if name == "micro_batches":
        if value is not None and not is_whole(value, 1, MOST_MICRO_BATCHES):
            raise ConfigError(f"{what} must be a whole number from 1 to {MOST_MICRO_BATCHES}; got {shown(value)}.")
        return
    choices = OBJECTIVES if name == "objective" else RESULTS
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{what} must be one of {', '.join(choices)}; got {shown(value)}.")
