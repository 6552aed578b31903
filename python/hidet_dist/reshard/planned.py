"""Conversions listed in a plan, with the check that they lead from their source spec to their target spec."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.errors import PlanError, SpecError
from hidet_dist.reshard.steps import Step, walk
from hidet_dist.spec import StagePlan, TensorShardSpec
from hidet_dist.spec.plan import ConversionPlan


class PlannedSteps:
    """The steps of each conversion of a stage, as the plan lists them.

    Raises
    ------
    PlanError
        When the plan lists a conversion twice.
    """

    def __init__(self, stage: StagePlan):
        self._mesh = stage.mesh
        self._listed: dict[tuple[str, TensorShardSpec], ConversionPlan] = {}
        for plan in (*(c for operator in stage.operators for c in operator.conversions), *stage.output_conversions):
            if self._listed.setdefault((plan.tensor, plan.target), plan) is not plan:
                raise PlanError(f"The plan converts {plan.tensor} to {plan.target} twice. Remove one of the two.")
        self._taken: set[tuple[str, TensorShardSpec]] = set()

    def take(
        self,
        name: str,
        shape: Sequence[int],
        source: TensorShardSpec,
        target: TensorShardSpec,
    ) -> tuple[Step, ...]:
        """Take the steps that convert a tensor of ``shape`` (whole) from ``source`` to ``target``.

        Raises PlanError when the plan lists no steps, or steps that do not apply or do not lead to the target.
        """
        listed = self._listed.get((name, target))
        if listed is None:
            raise PlanError(f"The plan lists no conversion of {name} from {source} to {target}.")
        self._taken.add((name, target))
        try:
            if listed.source != source:
                raise PlanError(f"The plan converts {name} from {listed.source} to {target}, but its spec is {source}.")
            steps = tuple(map(Step.parse, listed.steps))
            end = [source, *walk(steps, source, shape, self._mesh)][-1]
        except SpecError as error:
            raise PlanError(f"The plan's conversion of {name} to {target} does not fit: {error}") from error
        if end != target:
            raise PlanError(f"The plan's conversion of {name} from {source} leads to {end}, not to {target}.")
        return steps

    def check_all_taken(self) -> None:
        """Raise PlanError when the plan lists a conversion that no operator or output required."""
        for name, target in self._listed:
            if (name, target) not in self._taken:
                raise PlanError(
                    f"The plan converts {name} to {target}, but nothing requires it. Remove the conversion."
                )
