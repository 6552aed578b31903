"""The search for the best plan within the memory budget.

Without the budget, elimination solves the problem exactly. With it, these steps follow, each only as long as the gap
between the best plan and the bound is too large:

* prices on the bytes of program points give a bound, and plans (:mod:`hidet_dist.search.budget.relaxation`),
* prices of single points bound single choices (:mod:`hidet_dist.search.budget.choice_bounds`),
* the choices of known plans are combined, and all plans below a limit are listed
  (:mod:`hidet_dist.search.budget.combination`),
* plans are joined, and replanned in windows (:mod:`hidet_dist.search.budget.windows`),
* plans are divided into parts (:mod:`hidet_dist.search.budget.division`), on small wide graphs right after the prices,
* the integer program decides among the choices that are left (:mod:`hidet_dist.search.budget.programs`).

On the way, choices that no better plan can contain are dropped (:mod:`hidet_dist.search.budget.state`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.search import tuning
from hidet_dist.search.budget.choice_bounds import raise_choice_bounds
from hidet_dist.search.budget.combination import combine_plans, search_below_limits
from hidet_dist.search.budget.division import divide_plans
from hidet_dist.search.budget.least_memory import find_fitting
from hidet_dist.search.budget.programs import decide_by_program, is_worth_a_program, not_found_error, recombine_plans
from hidet_dist.search.budget.relaxation import Mixture, probe_without_activations, relax_budget
from hidet_dist.search.budget.state import Probe, State, is_wide, narrow_choices
from hidet_dist.search.budget.steps import step
from hidet_dist.search.budget.ties import charge_collectives
from hidet_dist.search.budget.windows import join_at_cut, replan_windows
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.ilp import StoppedError
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.pairwise import wide
from hidet_dist.search.problem import Problem, Solution, restricted
from hidet_dist.search.problem.descent import descend


def optimize(problem: Problem, options: SolveOptions | None = None, like: Solution | None = None) -> Solution:
    """Solve the problem to a relative gap, or until the time limit.

    Of plans of equal cost, one with few collectives is taken (:mod:`hidet_dist.search.budget.ties`). ``like`` is the
    solution of a problem that differs only in its costs: the search starts from its plans.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget.
    SolverError
        When the solver fails, or the time limit or the memory limit is reached before there is a plan.
    """
    options = SolveOptions() if options is None else options
    charged = charge_collectives(problem, options.solver_gap)
    return charged.solution(_optimize(charged.problem, charged.options(options), like))


def _optimize(problem: Problem, options: SolveOptions, like: Solution | None) -> Solution:
    limits = options.limits
    state = State(problem, options, [list(range(len(costs))) for costs in problem.cost])
    tables = Tables(limits)
    if like is not None:
        state.peaks = dict.fromkeys(like.points)
        state.known_plans = [state.record(choices) for choices in like.known]
    try:
        try:
            state.kept = state.presolve.reduce(state.kept, limits=limits).kept
            if sum(map(min, problem.memory)) > problem.budget:
                find_fitting(state, limits.part(tuning.REFUSAL_SHARE))  # raises: no plan fits
            # The bound without activations holds with them; if this plan fits with them, it is the best.
            try:
                probe_without_activations(state, tables)
            finally:
                state.kept = [list(range(len(costs))) for costs in problem.cost]
            if not state.done():
                plans, mixture = relax_budget(state, tables)
                state.second_per_byte = tuple(mixture.prices)
                state.known_plans = plans
                over = {probe.nbytes.index(probe.peak) for probe in plans if probe.peak > problem.budget}
                state.peaks |= dict.fromkeys(sorted(over))
                if not state.done():
                    _improve(state, tables, plans, mixture)
        except TooWide:
            if state.open_choices() > tuning.FEW_CHOICES:
                _search_wide(state)
        del tables
        if not state.done() and is_worth_a_program(state):
            decide_by_program(state)
    except OutOfTimeError:
        if not state.best:
            state.record_simple_plans()
    if not state.best:
        raise state.refusal or not_found_error(state)
    _descend(state)
    gap = max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0
    known = (*(probe.choices for probe in state.known_plans[-tuning.KNOWN_PLANS :]), state.best)
    return Solution(
        state.best,
        state.seconds,
        gap,
        state.second_per_byte,
        tuple(state.peaks),
        tuple(dict.fromkeys(known)),
        tuple(state.log.taken),
    )


@step("descent")
def _descend(state: State) -> None:
    state.record(descend(state.problem, state.groups, state.best, state.limits))


@step("wide-graph")
def _search_wide(state: State) -> None:
    """Search a graph that is too wide for elimination, and has too many choices for the integer program alone."""
    try:
        solution = wide.solve(restricted(state.problem, state.kept), state.options)
    except StoppedError as error:
        state.raise_bound(error.bound)
        return
    state.raise_bound(solution.seconds * (1 - solution.gap))
    state.record(tuple(choices[k] for choices, k in zip(state.kept, solution.choices, strict=True)))


def _improve(state: State, tables: Tables, plans: Sequence[Probe], mixture: Mixture) -> None:
    """Find better plans than those of the relaxation, as long as the integer program would have many choices."""
    prices = state.prices(mixture.prices)
    choices = sum(map(len, state.problem.cost))
    far = not state.best or state.seconds - state.bound > tuning.DIVIDED_GAP * state.seconds
    if far and choices <= tuning.DIVIDED_FIRST and is_wide(state, tables):
        # Opening the parts finds good plans sooner than combining those known.
        divide_plans(state, mixture, wide=True)
        if state.done():
            return
    known = [*(probe for _, probe in mixture.parts), *plans[-tuning.RECOMBINED_PLANS :]]
    if is_wide(state, tables) and not mixture.over:
        # Plans combined of known ones are often the best, and need no plan that fits to begin with.
        combine_plans(state, tables, prices, known)
        if search_below_limits(state, tables, prices):
            return
    if not state.best:
        # All plans so far exceed the budget, however little. One that fits is the other end of the mixtures below.
        state.known_plans.append(find_fitting(state))
    if not is_wide(state, tables):
        # Integer programs of wide graphs are slow; frontiers combine the plans of those.
        recombine_plans(state, plans, state.options.solver_gap, tuning.VERY_FEW_CHOICES)
    if state.done():
        return
    combined, more = mixture.over, list[Probe]()
    if state.options.prove and not is_wide(state, tables):
        raise_choice_bounds(state, tables, mixture)
    if state.done():
        return
    if not mixture.over:
        join_at_cut(state, mixture)
        if state.seconds - state.bound > tuning.ROUGH_GAP * state.seconds:
            # The plans below the best one are many. Those combined of known ones are few, and better.
            combine_plans(state, tables, prices, known)
            combined = True
        if not state.options.prove:
            return
    narrow_choices(state, tables, prices)
    if state.done():
        return
    if not search_below_limits(state, tables, prices) and not combined:
        best = state.seconds
        combine_plans(state, tables, prices, known)
        if state.seconds < best and not state.done():
            narrow_choices(state, tables, prices)
            search_below_limits(state, tables, prices)
    far = state.seconds - state.bound > tuning.NARROW_PARTS_GAP * state.options.solver_gap * state.seconds
    if far and state.open_choices() > tuning.VERY_FEW_CHOICES and not is_wide(state, tables):
        divide_plans(state, mixture, wide=False)
    if state.outer is None and not state.done():
        # Tensors of many readers, relaxed so far, are treated exactly where that is not too wide.
        more.append(state.probe(tables, prices))
        state.raise_bound(more[-1].bound)
    if state.done() or state.open_choices() <= tuning.VERY_FEW_CHOICES:
        return
    if is_wide(state, tables) and state.open_choices() > tuning.FEW_WIDE_CHOICES:
        if not state.divided:
            divide_plans(state, mixture, wide=True)
        return
    gap = tuning.ROUGH_GAP
    if state.open_choices() > tuning.FEW_CHOICES:
        gap = 0.0
        replan_windows(state, tables, prices)
        narrow_choices(state, tables, prices)
        for factor in tuning.PRICE_FACTORS:
            if state.done():
                return
            more.append(state.probe(tables, prices.scaled(factor), coarse=True))
    if not state.done():
        recombine_plans(state, [*plans, *more], max(gap, state.options.solver_gap))
        narrow_choices(state, tables, prices)
