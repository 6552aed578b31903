"""Plans within a time limit: those of simpler problems, or of least memory, where time is short for all choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.choice_sets import ChoiceSet
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Problem, Solution


class HasProblem(Protocol):
    """A formulation: a problem, and what its numbers mean."""

    @property
    def problem(self) -> Problem:
        """The problem."""


Formulated = TypeVar("Formulated", bound=HasProblem)


def plan_in_time(
    formulated: Callable[[Limits | None, ChoiceSet], Formulated],
    solve: Callable[[Formulated, SolveOptions], Solution],
    options: Callable[[Formulated], SolveOptions],
    limits: Limits,
    operators: int,
    kinds: int,
    few: ChoiceSet = ChoiceSet.FEW,
) -> tuple[Formulated, Solution]:
    """Formulate a problem and solve it; where time is too short for that, find a plan in other ways.

    Where time is short to begin with, the first plan is one of replicated operators, and the second one of few choices.
    All choices follow in the time that is left, and the best plan is returned. Few choices may take as much time again
    as there was: their plans are many times better than replicated ones.

    Otherwise few choices follow where time is up while the problem is formulated, or before anything is known of its
    plans. They take the time that they need. So does the plan that holds least, for which all choices are formulated:
    it is taken where all others exceed a budget that some plan fits.

    Parameters
    ----------
    formulated: callable
        Formulates the problem of a set of choices within limits, or without any.
    solve: callable
        Solves the problem of all choices.
    options: callable
        Makes the options for solving one: what is told of plans are choices of that problem alone.
    limits: Limits
        The limits of all that is done, which the options have too.
    operators, kinds: int
        The number of operators, and of unlike ones.
    few: ChoiceSet
        The few choices, proven or not.

    Raises
    ------
    InfeasibleError, SolverError
        As ``solve``.
    OutOfTimeError
        When no plan is found that fits.
    """
    known: list[tuple[Formulated, Solution]] = []

    def solve_few(choice_set: ChoiceSet, formulating: Limits | None, improving: Limits) -> None:
        try:
            simple = formulated(formulating, choice_set)
            known.append((simple, solve_simple(simple.problem, replace(options(simple), limits=improving))))
        except OutOfTimeError:
            pass

    is_short = limits.seconds is not None and limits.seconds < tuning.SHORT_KIND_SECONDS * kinds
    if is_short:
        solve_few(ChoiceSet.REPLICATED, None, limits.trial(tuning.REPLICATED_FRACTION))
        solve_few(few, limits.trial(tuning.FEW_OVERRUN) if known else None, limits.trial(tuning.FEW_FRACTION))
    whole: Formulated | None = None
    try:
        part = limits.part(tuning.FORMULATION_FRACTION)
        if part.seconds is not None and part.seconds < tuning.LEAST_FORMULATION_SECONDS * operators:
            limits.reach()
            raise OutOfTimeError
        whole = formulated(part, ChoiceSet.ALL)
        solution = solve(whole, options(whole))
        if solution.gap < 1.0 or not limits.time_reached:
            return whole, solution
        known.append((whole, solution))
    except (OutOfTimeError, SolverError):
        if not limits.time_reached:
            raise
    if not is_short:
        solve_few(few, None, limits)
    if known:
        return min(known, key=lambda one: one[1].seconds)
    if whole is None:
        whole = formulated(None, ChoiceSet.ALL)
    return whole, solve_least(whole.problem, options(whole))


def solve_simple(problem: Problem, solver: SolveOptions) -> Solution:
    """Solve a simple problem, whose bound is none of the whole problem's.

    A plan that fits is found however little time is left, and improved until the time limit. Once that has passed, the
    first one is returned.

    Raises
    ------
    OutOfTimeError
        When no plan of it is found that fits. Others may.
    """
    tell = solver.on_incumbent
    if tell is not None:
        solver = replace(solver, on_incumbent=lambda choices, seconds, _, elapsed: tell(choices, seconds, 0.0, elapsed))
    try:
        # With a gap of 1, the search ends with the first plan that fits.
        solution = optimize(problem, replace(solver, limits=Limits(None, solver.limits.nbytes), solver_gap=1.0))
    except (InfeasibleError, SolverError):
        raise OutOfTimeError from None
    if not solver.limits.expired():
        solution = optimize(problem, solver, solution)
    return replace(solution, gap=1.0)


def solve_least(problem: Problem, solver: SolveOptions) -> Solution:
    """Find a plan that fits the budget of a whole problem, whatever it costs, however little time is left.

    Raises
    ------
    OutOfTimeError
        When the plan of least memory does not fit.
    """
    if sum(map(min, problem.memory)) > problem.budget:
        raise OutOfTimeError
    least = least_memory(problem, replace(solver, limits=Limits(None, solver.limits.nbytes)), problem.budget)
    if least.nbytes > problem.budget:
        raise OutOfTimeError
    seconds = problem.totals.seconds(least.choices)
    if solver.on_incumbent is not None:
        solver.on_incumbent(least.choices, seconds, 0.0, solver.limits.elapsed_seconds())
    return Solution(least.choices, seconds, 1.0, known=(least.choices,))
