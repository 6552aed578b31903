"""The plan of least peak memory, and the refusal of budgets that no plan fits.

Prices on the bytes of program points bound the least peak, as they bound the cost of plans within a budget. Where they
make little progress, targets between the bound and the least peak known are tried: choices that need more are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hidet_dist.errors import HidetDistError, InfeasibleError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.capacity import Capacity
from hidet_dist.search.ilp import StoppedError, solve_peak
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.master import Master, solve_master
from hidet_dist.search.network import Tables, TooWide
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Problem
from hidet_dist.search.state import Probe, State, bound_choices


@dataclass(frozen=True)
class LeastMemory:
    """The plan of least peak memory so far: its choices, its peak in bytes, and a lower bound of all plans' peaks."""

    choices: tuple[int, ...]
    nbytes: int
    bound_bytes: int


def least_memory(problem: Problem, options: SolveOptions, enough: int = 0) -> LeastMemory:
    """Find the plan of least peak memory, until the time limit.

    The search ends with the first plan that holds at most ``enough`` bytes. The bound of a large graph may lie below
    the least peak.
    """
    gratis = replace(problem.without_costs, budget=0)
    every = [list(range(len(costs))) for costs in problem.cost]
    state = State(gratis, replace(options, on_incumbent=None), every)
    best = state.record(tuple(m.index(min(m)) for m in problem.memory))
    bound = float(sum(map(min, problem.memory)))
    state.known_plans.append(best)
    try:
        try:
            best, bound = _probe_peaks(state, best, bound, enough)
        except TooWide:
            best, bound = min(state.known_plans, key=lambda p: p.peak), max(bound, state.bound)
        if best.peak > max(enough, bound + 0.5) and state.open_choices() <= tuning.PEAK_CHOICES:
            try:
                choices, proven = solve_peak(gratis, options)
                best, bound = min(best, state.record(choices), key=lambda p: p.peak), max(bound, proven)
            except StoppedError:
                pass  # the plan so far is the answer
    except OutOfTimeError:
        best, bound = min(state.known_plans, key=lambda p: p.peak), max(bound, state.bound)
    return LeastMemory(best.choices, best.peak, math.ceil(bound - 1e-6))


def _probe_peaks(state: State, best: Probe, bound: float, enough: int) -> tuple[Probe, float]:
    """Price the points at which the plans so far hold most, until a plan is good enough or no price helps."""
    tables = Tables(state.limits)
    count = len(best.nbytes)
    weights, spread = [1.0 / count] * count, tuning.PEAK_SPREAD
    seen: set[tuple[int, ...]] = set()
    coarse = True
    gaps: list[float] = []
    # What refuses a budget need not be exact, if the graph is large.
    near = tuning.PEAK_NEAR if state.open_choices() > tuning.FEW_CHOICES else 0.0
    for _ in range(tuning.PROBES):
        if best.peak <= max(enough, bound + 0.5) or (bound > enough and best.peak <= bound * (1 + near)):
            break
        gaps.append(best.peak / max(bound, 1.0) - 1)
        stalled = gaps[-1] > max(tuning.PEAK_GAP, tuning.PEAK_PROGRESS * gaps[-tuning.PEAK_STALL :][0])
        if stalled and len(gaps) > tuning.PEAK_STALL:
            break  # prices alone make little progress
        prices = _spread(weights, spread)
        probe = state.probe(tables, prices, coarse=coarse)
        state.known_plans.append(probe)
        bound = state.bound = max(bound, probe.bound / prices.total)
        best = min(best, probe, key=lambda p: p.peak)
        nbytes = [plan.nbytes for plan in state.known_plans]
        byte = float(max(1, *map(max, nbytes)))
        master = solve_master(nbytes, [0.0] * len(nbytes), 1.0, 0, byte, state.limits)
        if master.slack * byte <= bound * (1 + tuning.EQUAL):
            break
        if probe.choices in seen:
            # These prices give no new plan. With less spread they are nearer to the best prices.
            if not spread:
                if not coarse or best.peak <= bound * (1 + tuning.PEAK_GAP):
                    break
                coarse = False
            spread = spread / 8 if spread > tuning.PEAK_SPREAD / 100 else 0.0
        seen.add(probe.choices)
        weights = _weights(master)
    return _halve(state, best, bound, enough)


def _halve(state: State, best: Probe, bound: float, enough: int) -> tuple[Probe, float]:
    """Halve the interval between the least peak so far and its bound, until the two are near."""
    capacity = Capacity(state.problem)
    for _ in range(tuning.PEAK_TARGETS):
        if best.peak <= max(enough, bound * (1 + tuning.PEAK_GAP)):
            break
        # What is enough decides first; then the least is looked for.
        target = enough if bound <= enough else int(bound + best.peak) // 2
        reached = _reach(state, capacity, target)
        if reached is None:
            bound = target + 1
        elif reached.peak < best.peak:
            best = reached
        if reached is not None and reached.peak > target:
            break
        state.bound = max(state.bound, bound)
    return best, bound


def _reach(state: State, capacity: Capacity, target: int) -> Probe | None:
    """Find a plan that holds at most ``target`` bytes; None if there is none, another plan if the search ends.

    Choices that need more are dropped, which makes the rest a smaller problem with a greater bound.
    """
    count = state.problem.activations.points
    kept, weights, plans = state.kept, [1.0 / count] * count, list[Probe]()
    for _ in range(tuning.TARGET_REDUCTIONS):
        fitting = capacity.fitting(kept, target, tuning.FORBIDDEN_PEAKS * max(1, target), limits=state.limits)
        if fitting is None:
            return None
        reduced = State(fitting.problem, state.options, fitting.kept)
        tables = Tables(state.limits)
        most = target * (1 + tuning.ROUNDING)
        for _ in range(tuning.TARGET_PROBES):
            prices = _spread(weights, tuning.PEAK_SPREAD)
            probe = reduced.probe(tables, prices, coarse=True)
            if probe.bound > most - prices.total * target:  # the priced bytes of every plan left exceed the target
                return None
            plans.append(probe)
            state.known_plans.append(probe)
            if probe.peak <= target:
                return probe
            nbytes = [plan.nbytes for plan in plans]
            master = solve_master(nbytes, [0.0] * len(nbytes), 1.0, 0, float(max(map(max, nbytes))), state.limits)
            weights = _weights(master)
        bounds = bound_choices(reduced, tables, prices)
        if bounds is None:
            break
        before, limit = sum(map(len, fitting.kept)), prices.total * most
        kept = [[k for k in choices if line[k] <= limit] for choices, line in zip(fitting.kept, bounds, strict=True)]
        if not all(kept):
            return None
        if sum(map(len, kept)) > tuning.TARGET_SHRINK * before:
            break
    return min(plans, key=lambda p: p.peak)


def _spread(weights: Sequence[float], share: float) -> Prices:
    """Make prices of sum 1 from weights of sum 1, with a share that is spread over all program points."""
    return Prices([(weight + share / len(weights)) / (1 + share) for weight in weights])


def _weights(master: Master) -> list[float]:
    """Scale the duals of program points to a sum of 1."""
    total = sum(master.duals)
    return [dual / total for dual in master.duals]


def find_fitting(state: State, limits: Limits | None = None) -> Probe:
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
