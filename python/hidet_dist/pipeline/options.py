"""The options of a search for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.options.option import check_options, one_of, option
from hidet_dist.options.planning import StageOptions
from hidet_dist.pipeline.constraints import StageConstraints
from hidet_dist.spec.objectives import DEFAULT, OBJECTIVES, Objective


@dataclass(frozen=True)
class PipelineOptions(StageOptions):
    """The options of a search for a pipeline: :class:`hidet_dist.options.planning.StageOptions`, and its own.

    Attributes
    ----------
    stages: None to search for the stages, of which there may be one; their number; or a constraint for each.
    searches_shares: whether slices of unequal devices may split dims by shares, which are searched with the rest. See
        :mod:`hidet_dist.search.shares`.
    """

    objective: str = option(
        DEFAULT,
        "str",
        "The seconds to minimise. " + " ".join(f"``{name}``: {one.meaning}." for name, one in OBJECTIVES.items()),
        one_of(tuple(OBJECTIVES)),
    )
    stages: StageConstraints = None
    searches_shares: bool = False

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def value(self) -> Objective:
        """The objective."""
        return OBJECTIVES[self.objective]
