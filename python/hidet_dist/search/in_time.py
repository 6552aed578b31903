"""Plans within a time limit: a simpler problem, or the plan of least memory, where time is short for all choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.budget.optimum import optimize
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
    formulated: Callable[[Limits | None, bool], Formulated],
    solve: Callable[[Formulated, SolveOptions], Solution],
    options: Callable[[Formulated], SolveOptions],
    limits: Limits,
    operators: int,
) -> tuple[Formulated, Solution]:
    """Formulate a problem and solve it; where time is too short for that, find a plan in other ways.

    Time is up while the problem is formulated, or before anything is known of its plans, or it is too short to begin
    with. Then a simple problem is solved, of few choices. Those may all exceed a budget that some plan fits. Then the
    plan that holds least is taken, for which all choices are formulated. These two take the time that they need.

    Parameters
    ----------
    formulated: callable
        Formulates the problem within limits, or without any, the simple one if so.
    solve: callable
        Solves it.
    options: callable
        Makes the options for solving one: what is told of plans are choices of that problem alone.
    limits: Limits
        The limits of all that is done, which the options have too.
    operators: int
        The number of operators.

    Raises
    ------
    InfeasibleError, SolverError
        As ``solve``.
    OutOfTimeError
        When no plan is found that fits.
    """
    whole: Formulated | None = None
    solution: Solution | None = None
    try:
        part = limits.part(tuning.FORMULATION_SHARE)
        if part.seconds is not None and part.seconds < tuning.LEAST_FORMULATION_SECONDS * operators:
            limits.reach()
            raise OutOfTimeError
        whole = formulated(part, False)
        solution = solve(whole, options(whole))
        if solution.gap < 1.0 or not limits.time_reached:
            return whole, solution
    except (OutOfTimeError, SolverError):
        if not limits.time_reached:
            raise
    simple = formulated(None, True)
    try:
        found = solve_simple(simple.problem, options(simple))
    except OutOfTimeError:
        if whole is None:
            whole = formulated(None, False)
        return whole, solution or solve_least(whole.problem, options(whole))
    if whole is not None and solution is not None and solution.seconds <= found.seconds:
        return whole, solution
    return simple, found


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
