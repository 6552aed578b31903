"""Building within the memory budget, where a program may take more than was predicted of its plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hidet_dist.errors import InfeasibleError, OverBudgetError
from hidet_dist.phases.values import Planned, Prepared
from hidet_dist.progress import Progress
from hidet_dist.search.planner import memory_budget

Built = TypeVar("Built")

_MOST_TRIES = 3  # plans that are built before that of least memory


def build_within_budget(prepared: Prepared, build: Callable[[Planned], Built], progress: Progress) -> Built:
    """Search plans and build them until a program fits the memory budget; return it.

    What the program of a plan holds beside what was predicted is left free by the next plan, and the last one is the
    plan of least memory. Its program decides where no plan is predicted to fit, too: programs differ from predictions
    by the alignment of buffers and by what kernels are fused.

    Parameters
    ----------
    prepared: Prepared
        The graph.
    build: callable
        Builds the program of a plan. Raises OverBudgetError, before kernels are compiled, when it holds too much.
    progress: Progress
        Shows the searches.

    Raises
    ------
    InfeasibleError
        When no plan fits, or no program.
    """
    budget = allowed = tried = memory_budget(prepared.cluster, prepared.mem_budget)
    over: OverBudgetError | None = None
    for number in itertools.count(1):
        unfit: InfeasibleError | None = None
        try:
            planned = _plan_within(prepared, allowed, progress) if over else prepared.plan(progress)
        except InfeasibleError as error:
            if over is not None and error.least_budget >= tried:
                raise over from error
            unfit, allowed = error, error.least_budget
            planned = _plan_within(prepared, allowed, progress)
        tried = allowed
        try:
            return build(planned)
        except OverBudgetError as error:
            if unfit is not None:  # this was the plan of least memory
                raise unfit if error.least_budget <= unfit.least_budget else error from None
            over = error
            allowed = max(1, budget - error.excess_bytes) if number < _MOST_TRIES else 1
    raise AssertionError("there is always a next number")


def _plan_within(prepared: Prepared, nbytes: int, progress: Progress) -> Planned:
    """Search a plan that is predicted to hold at most ``nbytes``; its report has the memory budget nevertheless."""
    plan = prepared.with_budget(nbytes).plan(progress).plan
    budget = memory_budget(prepared.cluster, prepared.mem_budget)
    stages = [
        stage
        if stage.report is None
        else replace(stage, report=replace(stage.report, mem_budget=stage.report.mem_budget + budget - nbytes))
        for stage in plan.stages
    ]
    return Planned(prepared, replace(plan, stages=tuple(stages)))
