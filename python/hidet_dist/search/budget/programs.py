"""Integer programs: the recombination of known plans, and the decision among the choices that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hidet_dist.errors import SolverError
from hidet_dist.search import tuning
from hidet_dist.search.budget.least_memory import least_memory, refusal_error
from hidet_dist.search.budget.state import ProbedPlan, State, count_open
from hidet_dist.search.ilp import NothingFitsError, StoppedError, TooLargeError, solve
from hidet_dist.search.problem import peaks, restricted
from hidet_dist.search.steps import step


def is_worth_a_program(state: State) -> bool:
    """Tell whether the integer program is likely to find a better plan, or a proof."""
    choices = state.open_choices()
    if not state.best or choices <= tuning.VERY_FEW_CHOICES:
        return True
    if state.divided:
        return False
    # Among many choices it takes longer to be presolved than all before took, and a gap this small seldom closes.
    near = state.seconds - state.bound <= tuning.ROUGH_GAP * state.seconds
    return state.options.prove and not (near and choices > tuning.FEW_CHOICES)


def not_found_error(state: State) -> SolverError:
    """Make the error for a search that reached its time or memory limit before it had a plan that fits."""
    limits, budget = state.limits, state.problem.budget
    least = min((probe.peak for probe in state.known_plans), default=None)
    known = "" if least is None else f" The plan of least memory so far holds {least} bytes."
    if limits.time_reached:
        return SolverError(
            f"No plan that fits mem_budget = {budget} bytes a device was found within the time limit of "
            f"{limits.given_seconds} s.{known} Allow more time (solver_time_limit_seconds), give more memory, "
            "or pin specs."
        )
    return SolverError(
        f"No plan that fits mem_budget = {budget} bytes a device was found: the graph is too densely connected for "
        f"the memory that planning may take, {limits.nbytes} bytes.{known} Allow more (solver_memory_limit_bytes), "
        "plan for a mesh of fewer axes, or pin specs."
    )


@step("recombination")
def recombine_plans(state: State, plans: Sequence[ProbedPlan], gap: float, most: int = tuning.FEW_CHOICES) -> None:
    """Find the best plan, to a gap, among combinations of the choices of the last plans that have at most so many."""
    if not state.best:
        return
    recombined = [probe.choices for probe in plans[-tuning.RECOMBINED_PLANS :]] + [state.best]
    kept: list[list[int]] = []
    while True:
        used = [set(chosen) for chosen in zip(*recombined, strict=True)]
        kept = [[k for k in choices if k in some] or choices for choices, some in zip(state.kept, used, strict=True)]
        if count_open(kept) <= most:
            break
        del recombined[0]
        if len(recombined) == 1:
            return
    state.limits.check()
    try:
        solution = solve(
            restricted(state.problem, kept),
            replace(state.options, solver_gap=gap),
            tuning.RECOMBINATION_NODES,
            _tight_points(state),
        )
    except (StoppedError, NothingFitsError):
        return
    state.peaks |= dict.fromkeys(solution.points)
    state.record(tuple(choices[k] for choices, k in zip(kept, solution.choices, strict=True)))


def _tight_points(state: State) -> tuple[int, ...]:
    """List the points at which the budget is expected to bind: peaks of plans that exceed it, or nearly do."""
    best = state.record(state.best).nbytes if state.best else []
    near = [point for point, n in enumerate(best) if n >= tuning.NEAR_BUDGET * state.problem.budget]
    return tuple(dict.fromkeys((*state.peaks, *peaks(best, near))))


def decide_by_program(state: State) -> None:
    """Decide among the remaining choices by the integer program, after finding some plan that fits."""
    state.limits.check()
    if not state.best:
        least = least_memory(state.problem, state.options, state.problem.budget)
        state.known_plans.append(state.record(least.choices))
        if not state.best:
            state.refusal = refusal_error(state, least)
            if least.bound_bytes > state.problem.budget:
                raise state.refusal
    _decide(state)


@step("integer-program")
def _decide(state: State) -> None:
    kept, options = state.kept, state.options
    try:
        # A plan must be better by the gap to be of use.
        most = state.cutoff()
        solution = solve(restricted(state.problem, kept), options, points=_tight_points(state), most_seconds=most)
    except NothingFitsError:
        if state.best:
            state.raise_bound(state.cutoff())  # no plan that fits is better than the best one
        return
    except TooLargeError:
        state.refusal = not_found_error(state)  # for the case that there is no plan so far
        return
    except StoppedError as error:
        state.raise_bound(min(error.bound, state.cutoff()))  # the solver ran out of time or of nodes
        return
    state.peaks |= dict.fromkeys(solution.points)
    # Plans with dropped choices cost at least as much as the best plan within the gap.
    bound = min(solution.seconds * (1 - solution.gap), state.seconds * (1 - options.solver_gap))
    state.record(tuple(choices[k] for choices, k in zip(kept, solution.choices, strict=True)))
    state.raise_bound(min(bound, state.seconds))
