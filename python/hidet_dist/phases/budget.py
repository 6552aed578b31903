"""Building within the memory budget, where a program may take more than was predicted of its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from hidet_dist.errors import InfeasibleError, OverBudgetError
from hidet_dist.machine import Cluster
from hidet_dist.progress import Progress
from hidet_dist.search.formulation.devices import memory_budget

Built = TypeVar("Built")
Plans = TypeVar("Plans")
Plans_co = TypeVar("Plans_co", covariant=True)

_MOST_TRIES = 3  # plans that are built before that of least memory


class Plannable(Protocol[Plans_co]):
    """What is planned for a memory budget: a graph, or several over one set of weights."""

    @property
    def cluster(self) -> Cluster:
        """The machine."""

    @property
    def mem_budget(self) -> int | None:
        """The configured memory budget of a device, in bytes; None for the device's memory."""

    def plan(self, progress: Progress | None = None) -> Plans_co:
        """Search the plan for the configured budget. Raises InfeasibleError."""

    def plan_within(self, nbytes: int, progress: Progress | None = None) -> Plans_co:
        """Search the plan that is predicted to hold at most ``nbytes``. Raises InfeasibleError."""


def build_within_budget(
    prepared: Plannable[Plans], build: Callable[[Plans], Built], progress: Progress | None = None
) -> Built:
    """Search plans and build them until a program fits the memory budget; return it.

    What the program of a plan holds beside what was predicted is left free by the next plan, and the last one is the
    plan of least memory. Its program decides where no plan is predicted to fit, too: programs differ from predictions
    by what kernels are fused. So a refusal names what this program holds, mostly less than was predicted of its plan.

    Parameters
    ----------
    prepared: Plannable
        The graph, or the graphs.
    build: callable
        Builds the program of a plan. Raises OverBudgetError, before kernels are compiled, when it holds too much.
    progress: Progress, optional
        The bars among which progress is shown.

    Raises
    ------
    InfeasibleError
        When no plan fits, or no program.
    """
    budget = allowed = tried = memory_budget(prepared.cluster, prepared.mem_budget)
    over: OverBudgetError | None = None
    tries = 0
    while True:
        tries += 1
        unfit: InfeasibleError | None = None
        try:
            planned = prepared.plan_within(allowed, progress) if over else prepared.plan(progress)
        except InfeasibleError as error:
            if over is not None and error.least_budget >= tried:
                raise over from error
            unfit, allowed = error, error.least_budget
            planned = prepared.plan_within(allowed, progress)
        tried = allowed
        try:
            return build(planned)
        except OverBudgetError as error:
            if unfit is not None:  # this was the plan of least memory
                raise error from None
            over = error
            allowed = max(1, budget - error.excess_bytes) if tries < _MOST_TRIES else 1
