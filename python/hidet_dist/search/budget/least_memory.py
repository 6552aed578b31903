"""The plan of least peak memory, and the refusal of budgets that no plan fits.

Prices on the bytes of program points bound the least peak, as they bound the cost of plans within a budget. Where the
first ones leave a gap, targets between the bound and the least peak known are tried: choices that need more go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hidet_dist.errors import HidetDistError, InfeasibleError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.budget.crowding import Crowding
from hidet_dist.search.budget.master import Master, solve_master
from hidet_dist.search.budget.state import ProbedPlan, State, bound_choices
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.ilp import StoppedError, solve_peak
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@dataclass(frozen=True)
class LeastMemory:
    """The plan of least peak memory so far: its choices, its peak in bytes, and a lower bound of all plans' peaks."""

    choices: tuple[int, ...]
    nbytes: int
    bound_bytes: int


@dataclass
class _Goal:
    """The bytes that are enough; ``steered`` is whether they were a target, so that others may lead to other plans."""

    enough: int
    steered: bool = False

    def is_settled(self, state: State, gap: float = tuning.PEAK_GAP) -> bool:
        """Tell whether a plan needs no more than is enough, or none does, and the least is known up to the gap.

        A search that was steered ends with the proof that none does: its plans depend on what is enough.
        """
        peak = _least(state).peak
        if peak <= max(self.enough, state.bound + 0.5):
            return True
        return state.bound > self.enough and (self.steered or peak * (1 - gap) <= state.bound)


def least_memory(problem: Problem, options: SolveOptions, enough: int = 0) -> LeastMemory:
    """Find a plan of nearly the least peak memory, until the time limit.

    The search ends with the first plan that holds at most ``enough`` bytes. Otherwise it ends with a plan whose peak is
    within ``tuning.PEAK_GAP`` of the bound, and mostly equals it if at most ``tuning.PEAK_CHOICES`` choices are left;
    the bound of a large graph may be further below. Without a time limit, this plan is the same whatever is enough, so
    that the number of bytes that a refusal names is found to be enough.
    """
    found, steered = _search(problem, options, _Goal(enough))
    if not steered or found.nbytes <= enough:
        return found
    least, _ = _search(problem, options, _Goal(0))
    bound = max(least.bound_bytes, found.bound_bytes)
    best = min(least, found, key=lambda one: one.nbytes) if options.limits.time_reached else least
    return replace(best, bound_bytes=bound)


def _search(problem: Problem, options: SolveOptions, goal: _Goal) -> tuple[LeastMemory, bool]:
    """Find a plan of nearly the least peak memory, or one that is enough; tell whether the search was steered."""
    gratis = replace(problem.without_costs, budget=0)
    every = [list(range(len(costs))) for costs in problem.cost]
    state = State(gratis, replace(options, on_incumbent=None), every)
    state.known_plans.append(state.record(tuple(m.index(min(m)) for m in problem.memory)))
    state.bound = float(sum(map(min, problem.memory)))
    with suppress(OutOfTimeError):
        with suppress(TooWide):
            _probe_peaks(state, goal)
            if state.open_choices() <= tuning.PEAK_CHOICES:
                _try_targets(state, goal, 0.0)
        if not goal.is_settled(state) and state.open_choices() <= tuning.PEAK_CHOICES:
            with suppress(StoppedError):  # the plan so far is the answer
                choices, proven = solve_peak(gratis, options)
                state.known_plans.append(state.record(choices))
                state.bound = max(state.bound, proven)
    best = _least(state)
    return LeastMemory(best.choices, best.peak, math.ceil(state.bound - 1e-6)), goal.steered


def _least(state: State) -> ProbedPlan:
    """Return the plan of the least peak so far."""
    return min(state.known_plans, key=lambda plan: plan.peak)


def _probe_peaks(state: State, goal: _Goal) -> None:
    """Price the points at which the plans so far hold most, until the search is settled or no price helps."""
    tables = Tables(state.limits)
    count = state.problem.activations.points
    weights, spread = [1.0 / count] * count, tuning.PEAK_SPREAD
    seen: set[tuple[int, ...]] = set()
    coarse = True
    for number in range(tuning.PROBES):
        if goal.is_settled(state):
            return
        if number and _least(state).peak > max(state.bound, 1.0) * (1 + tuning.PEAK_GAP):
            break  # prices alone make little progress
        prices = _spread(weights, spread)
        probe = state.probe(tables, prices, coarse=coarse)
        state.known_plans.append(probe)
        state.bound = max(state.bound, probe.bound / prices.total)
        master, nbytes = _mix(state, state.known_plans)
        if nbytes <= state.bound * (1 + tuning.EQUAL):
            break
        if probe.choices in seen:
            # These prices give no new plan. With less spread they are nearer to the best prices.
            if not spread:
                if not coarse or _least(state).peak <= state.bound * (1 + tuning.PEAK_GAP):
                    break
                coarse = False
            spread = spread / 8 if spread > tuning.PEAK_SPREAD / 100 else 0.0
        seen.add(probe.choices)
        weights = _weights(master)
    _try_targets(state, goal)


def _try_targets(state: State, goal: _Goal, gap: float = tuning.PEAK_GAP) -> None:
    """Look for plans within targets, of which each is a proof or a better plan, until the search is settled."""
    crowding = Crowding(state.problem)
    for _ in range(tuning.PEAK_TARGETS):
        if goal.is_settled(state, gap):
            break
        # What is enough decides first. Otherwise a proof that nothing fits this target ends the search.
        if state.bound <= goal.enough:
            target, goal.steered = goal.enough, True
        else:
            target = min(int(_least(state).peak * (1 - gap)), _least(state).peak - 1)
        if not _reach(state, crowding, target):
            if not goal.steered:
                _refute_below(state, crowding, target)
            break


def _reach(state: State, crowding: Crowding, target: int) -> bool:
    """Find a plan that holds at most ``target`` bytes, or prove that there is none; tell whether either was done.

    Choices that need more are dropped, which makes the rest a smaller problem with a greater bound.
    """
    # The prices of the plans so far are those at which this target is hard to reach.
    kept, plans = state.kept, list[ProbedPlan]()
    weights = _weights(_mix(state, state.known_plans)[0])
    for _ in range(tuning.TARGET_REDUCTIONS):
        fitting = crowding.fitting(kept, target, tuning.FORBIDDEN_PEAKS * max(1, target), limits=state.limits)
        if fitting is None:
            return _refute(state, target)
        reduced = State(fitting.problem, state.options, fitting.kept, similar=state)
        tables = Tables(state.limits)
        most = target * (1 + tuning.ROUNDING)
        for _ in range(tuning.TARGET_PROBES):
            prices = _spread(weights, tuning.PEAK_SPREAD)
            probe = reduced.probe(tables, prices, coarse=True)
            plans.append(probe)
            state.known_plans.append(probe)
            if probe.bound > most - prices.total * target:  # the priced bytes of every plan left exceed the target
                return _refute(state, target)
            if probe.peak <= target:
                return True
            weights = _weights(_mix(state, plans)[0])
        bounds = bound_choices(reduced, tables, prices)
        if bounds is None:
            break
        before, limit = sum(map(len, fitting.kept)), prices.total * most
        kept = [[k for k in choices if line[k] <= limit] for choices, line in zip(fitting.kept, bounds, strict=True)]
        if not all(kept):
            return _refute(state, target)
        if sum(map(len, kept)) > tuning.TARGET_SHRINK * before:
            break
    return False


def _refute_below(state: State, crowding: Crowding, target: int) -> None:
    """Raise the bound towards a target that is undecided, by bisection: the bytes around entities may refute others."""
    while target - state.bound > tuning.REFUTED_GAP * target:
        middle = int((state.bound + target) / 2)
        if crowding.fitting(state.kept, middle, math.inf, limits=state.limits) is None:
            _refute(state, middle)
        else:
            target = middle


def _refute(state: State, target: int) -> bool:
    """Raise the bound above a target that no plan reaches."""
    state.bound = max(state.bound, target + 1.0)
    return True


def _mix(state: State, plans: Sequence[ProbedPlan]) -> tuple[Master, float]:
    """Mix plans by the master program; return it, and the most bytes of the best mixture at any point."""
    nbytes = [plan.nbytes for plan in plans]
    byte = float(max(1, *map(max, nbytes)))
    master = solve_master(nbytes, [0.0] * len(nbytes), 1.0, 0, byte, state.limits)
    return master, master.slack * byte


def _spread(weights: Sequence[float], fraction: float) -> Prices:
    """Make prices of sum 1 from weights of sum 1, with a fraction that is spread over all program points."""
    return Prices([(weight + fraction / len(weights)) / (1 + fraction) for weight in weights])


def _weights(master: Master) -> list[float]:
    """Scale the duals of program points to a sum of 1."""
    total = sum(master.duals)
    return [dual / total for dual in master.duals]


@step("least-memory")
def find_fitting(state: State, limits: Limits | None = None) -> ProbedPlan:
    """Find the plan that holds least, and record it.

    Raises
    ------
    InfeasibleError
        When it does not fit.
    SolverError
        When the time limit was reached before that was proven.
    """
    budget = state.problem.budget
    options = state.options if limits is None else replace(state.options, limits=limits)
    least = least_memory(state.problem, options, budget)
    if least.nbytes > budget:
        raise refusal_error(state, least)
    return state.record(least.choices)


def refusal_error(state: State, least: LeastMemory) -> HidetDistError:
    """Make the error for a budget that the plan of least memory exceeds."""
    budget = state.problem.budget
    if least.bound_bytes >= least.nbytes:
        known = f"the least sufficient budget is {least.nbytes} bytes"
    else:
        known = f"{least.nbytes} bytes suffice, and fewer than {least.bound_bytes} do not"
    if state.limits.time_reached and least.bound_bytes <= budget:
        return SolverError(
            f"No plan that fits mem_budget = {budget} bytes a device was found within the time limit of "
            f"{state.limits.given_seconds} s: {known}. Allow more time (solver_time_limit_seconds), or give "
            f"{least.nbytes} bytes, or more devices."
        )
    what = "No plan fits" if least.bound_bytes > budget else "The search found no plan that fits"
    return InfeasibleError(
        f"{what} mem_budget = {budget} bytes a device: {known}. Give at least {least.nbytes} bytes, or more devices.",
        least.nbytes,
        least.bound_bytes,
    )
