"""The search for the best plan within the memory budget: elimination, then an integer program for the remaining gap.

Without the budget, elimination solves the problem exactly. With it, any prices on the bytes of program points give a
lower bound and a plan (Lagrangian relaxation; Everett, Operations Research 11(3), 1963). The best prices are the duals
of a small linear program, which mixes the plans so far so that no point's mean exceeds the budget (Dantzig and Wolfe,
Operations Research 8(1), 1960): a plan that is cheaper at these prices joins the mixture, until there is none. Where a
gap remains between the bound and the best plan that fits, choices that no better plan can contain are dropped, and the
integer program decides among the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hidet_dist.errors import HidetDistError, InfeasibleError, SolverError
from hidet_dist.search import tuning, wide
from hidet_dist.search.capacity import Capacity
from hidet_dist.search.descent import descend
from hidet_dist.search.eliminate import Table, Tables, TooWide, eliminate, fix_required, marginals
from hidet_dist.search.frontier import Frontier
from hidet_dist.search.ilp import NothingFitsError, StoppedError, TooLargeError, solve, solve_peak
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.master import solve_master
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.presolve import Presolve, Reduction
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import (
    Activations,
    LiveInterval,
    Problem,
    Solution,
    evaluate,
    held_bytes,
    peaks,
    readers,
    restricted,
    without_costs,
)
from hidet_dist.search.ties import charge_collectives


@dataclass(frozen=True)
class _Probe:
    """A plan with its seconds, without the price of memory, and the bytes that a device holds at each program point.

    ``bound`` is the lower bound, in seconds, from the prices for which the plan is the best.
    """

    choices: tuple[int, ...]
    seconds: float
    nbytes: list[int]
    bound: float = -math.inf

    @property
    def peak(self) -> int:
        return max(self.nbytes)


@dataclass
class _State:
    """The best plan so far, the greatest lower bound, and the choices that a better plan can contain."""

    problem: Problem
    options: SolveOptions
    kept: list[list[int]]
    best: tuple[int, ...] = ()
    seconds: float = math.inf
    bound: float = 0.0
    known_plans: list[_Probe] = field(default_factory=list)
    second_per_byte: tuple[float, ...] = ()
    peaks: dict[int, None] = field(default_factory=dict)  # program points at which plans exceeded the budget
    refusal: HidetDistError | None = None  # the error to raise if no plan turns up
    narrowed: bool = False  # whether choices were dropped because plans with them reach the cutoff
    divided: bool = False  # whether the plans were divided into parts (_divide), as far as that is useful
    outer: _State | None = None  # the state of the whole problem, if this is the state of a part of its plans
    bounds: tuple[Prices, list[Table]] | None = None  # of each choice, for the last prices

    def __post_init__(self) -> None:
        self.groups = readers(self.problem)
        self.limits = self.options.limits
        self.presolve = Presolve(self.problem)
        self._bytes_only: tuple[Problem, Presolve, Tables] | None = None

    @property
    def bytes_only(self) -> tuple[Problem, Presolve, Tables]:
        """The problem without costs, with its presolve and its tables."""
        if self._bytes_only is None:
            gratis = without_costs(self.problem)
            self._bytes_only = gratis, Presolve(gratis), Tables(self.limits)
        return self._bytes_only

    def reduction(self, prices: Prices) -> Reduction:
        """Reduce the choices to those of at least one of the best plans for these prices."""
        return self.presolve.reduce(self.kept, prices, self.limits)

    def probe(self, tables: Tables, prices: Prices, reduced: bool = True, coarse: bool = False) -> _Probe:
        """Find the best plan for these prices, among the choices ``reduced`` for them.

        With ``coarse``, tensors of many readers stay relaxed.
        """
        self.limits.check()
        kept = self.reduction(prices).kept if reduced else self.kept
        solved = eliminate(self.problem, kept, tables, prices, self.options.gap / 4, coarse)
        return replace(self.record(solved.choices), bound=solved.bound - prices.total * self.problem.budget)

    def record(self, choices: tuple[int, ...]) -> _Probe:
        """Cost a plan, and keep it as the best one if it fits and takes less time."""
        probe = _Probe(choices, evaluate(self.problem, choices), held_bytes(self.problem, self.groups, choices))
        if self.outer is not None:
            self.outer.record(choices)
            self.best, self.seconds = self.outer.best, self.outer.seconds
        elif probe.peak <= self.problem.budget and probe.seconds < self.seconds:
            self.best, self.seconds = choices, probe.seconds
            self.tell()
        return probe

    def record_simple_plans(self) -> None:
        """Cost three plans that need no solver: every entity with its first, its cheapest or its smallest choice."""
        cost, memory = self.problem.cost, self.problem.memory
        self.record((0,) * len(cost))
        self.record(tuple(min(range(len(values)), key=values.__getitem__) for values in cost))
        self.record(tuple(min(range(len(values)), key=values.__getitem__) for values in memory))

    def raise_bound(self, bound: float) -> None:
        """Raise the lower bound of all plans to that of the choices that are kept."""
        if self.narrowed:
            bound = min(bound, self.cutoff())  # plans with dropped choices cost no less than that
        if bound > self.bound:
            self.bound = bound
            self.tell()

    def tell(self) -> None:
        """Report the best plan so far, and the bound."""
        if self.options.on_incumbent is not None and self.best:
            bound = min(self.bound, self.seconds)
            self.options.on_incumbent(self.best, self.seconds, bound, self.limits.elapsed_seconds())

    def keeps(self, choices: Sequence[int]) -> bool:
        """Tell whether none of a plan's choices was dropped."""
        return all(k in kept for k, kept in zip(choices, self.kept, strict=True))

    def open_choices(self) -> int:
        """Count the remaining choices of entities that have more than one."""
        return _count_open(self.kept)

    def cutoff(self) -> float:
        """Return the seconds below which a plan is better than the best one by more than the gap."""
        return self.seconds * (1 - self.options.gap)

    def done(self) -> bool:
        return math.isfinite(self.seconds) and self.seconds - self.bound <= self.options.gap * self.seconds + 1e-15


def _count_open(kept: Sequence[Sequence[int]]) -> int:
    return sum(len(choices) for choices in kept if len(choices) > 1)


def optimize(problem: Problem, options: SolveOptions | None = None, like: Solution | None = None) -> Solution:
    """Solve the problem to a relative gap, or until the time limit.

    Of plans of equal cost, one with few collectives is taken (:mod:`hidet_dist.search.ties`). ``like`` is the solution
    of a problem that differs only in its costs: the search starts from its plans.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget.
    SolverError
        When the solver fails, or the time limit or the memory limit is reached before there is a plan.
    """
    options = SolveOptions() if options is None else options
    charged = charge_collectives(problem, options.gap)
    return charged.solution(_optimize(charged.problem, charged.options(options), like))


def _optimize(problem: Problem, options: SolveOptions, like: Solution | None) -> Solution:
    limits = options.limits
    state = _State(problem, options, [list(range(len(costs))) for costs in problem.cost])
    tables = Tables(limits)
    if like is not None:
        state.peaks = dict.fromkeys(like.points)
        state.known_plans = [state.record(choices) for choices in like.known]
    try:
        try:
            state.kept = state.presolve.reduce(state.kept, limits=limits).kept
            if sum(map(min, problem.memory)) > problem.budget:
                _any_plan(state, limits.part(tuning.REFUSAL_SHARE))  # raises: no plan fits
            # The bound without activations holds with them; if this plan fits with them, it is the best.
            try:
                _without_activations(state, tables)
            finally:
                state.kept = [list(range(len(costs))) for costs in problem.cost]
            if not state.done():
                plans, mixture = _relax(state, tables)
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
        if not state.done() and _is_worth_a_program(state):
            _integer_program(state)
    except OutOfTimeError:
        if not state.best:
            state.record_simple_plans()
    if not state.best:
        raise state.refusal or _not_found(state)
    state.record(descend(problem, state.groups, state.best, limits))
    gap = max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0
    known = (*(probe.choices for probe in state.known_plans[-tuning.KNOWN_PLANS :]), state.best)
    return Solution(
        state.best, state.seconds, gap, state.second_per_byte, tuple(state.peaks), tuple(dict.fromkeys(known))
    )


def _is_wide(state: _State, tables: Tables) -> bool:
    """Tell whether the graph is so wide that frontiers have too many labels, and not too large to be divided."""
    return tables.widest > tuning.WIDE_WORK and sum(map(len, state.problem.cost)) <= tuning.DIVIDED_CHOICES


def _is_worth_a_program(state: _State) -> bool:
    """Tell whether the integer program is likely to find a better plan, or a proof."""
    choices = state.open_choices()
    if not state.best or choices <= tuning.VERY_FEW_CHOICES:
        return True
    if state.divided:
        return False
    # Among many choices it takes longer to be presolved than all before took, and a gap this small seldom closes.
    near = state.seconds - state.bound <= tuning.ROUGH_GAP * state.seconds
    return state.options.prove and not (near and choices > tuning.FEW_CHOICES)


def _search_wide(state: _State) -> None:
    """Search a graph that is too wide for elimination, and has too many choices for the integer program alone."""
    try:
        solution = wide.solve(restricted(state.problem, state.kept), state.options)
    except StoppedError as error:
        state.raise_bound(error.bound)
        return
    state.raise_bound(solution.seconds * (1 - solution.gap))
    state.record(tuple(choices[k] for choices, k in zip(state.kept, solution.choices, strict=True)))


def _not_found(state: _State) -> SolverError:
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


def _at(point: int, price: float, count: int) -> Prices:
    return Prices([price if m == point else 0.0 for m in range(count)])


def _without_activations(state: _State, tables: Tables) -> None:
    """Find the best plan for a negligible price, then for none: of plans of equal time, the one that holds less."""
    problem = state.problem
    trifle = state.options.gap * tuning.TIE_SHARE * sum(map(min, problem.cost)) / max(1, sum(map(max, problem.memory)))
    count = problem.activations.points
    # Before the first operator a device holds little but what it holds during the whole run.
    for price in (trifle, 0.0):
        probe = state.probe(tables, _at(0, price, count), reduced=False)
        state.known_plans.append(probe)
        state.raise_bound(probe.bound)
        if probe.peak > problem.budget or state.done():
            return


@dataclass(frozen=True)
class _Mixture:
    """The best mixture of plans whose mean fits the budget.

    Attributes
    ----------
    seconds: the objective of the master program.
    parts: the plans with their shares, greatest first.
    prices: seconds per byte at each program point.
    over: whether the mean exceeds the budget after all.
    """

    seconds: float
    parts: list[tuple[float, _Probe]]
    prices: list[float]
    over: bool


def _relax(state: _State, tables: Tables) -> tuple[list[_Probe], _Mixture]:
    """Find the prices of the greatest lower bound; return the plans on the way and the mixture with these prices.

    Raises
    ------
    InfeasibleError
        When no plan fits.
    """
    budget = state.problem.budget
    plans, bound, raises = list(state.known_plans), state.bound, 0
    low = plans[-1]
    # Near the best price where the budget costs a few per cent of the time, as it mostly does. The fewer bytes there
    # are, the more each is worth.
    limit = low.seconds / max(1, min(low.peak - budget, budget)) / tuning.FIRST_PRICE_PARTS or 1.0
    mixture = _mixture(state, plans, limit)
    coarse, narrow_at = True, tuning.NARROW_GAP
    tested: set[int] = set()
    for _ in range(tuning.PROBES):
        if bound >= state.cutoff():
            break
        over = _untested_peak(state, plans[-1], tested)
        if over is not None and _drop_unfit(state, over):
            plans = [one for one in plans if state.keeps(one.choices)]
            plans = plans or [state.probe(tables, Prices(mixture.prices), coarse=coarse)]
            mixture = _mixture(state, plans, limit)
        if not state.best and state.limits.spent(tuning.PLAN_BY_SHARE):
            plans.append(_any_plan(state))
            mixture = _mixture(state, plans, limit)
        known = {probe.choices for probe in plans}
        prices = Prices(mixture.prices)
        probe = state.probe(tables, prices, coarse=coarse)
        bound = max(bound, probe.bound)
        state.raise_bound(bound)
        plans.append(probe)
        near = tuning.ROUGH_GAP if mixture.over else state.options.gap * tuning.BOUND_SHARE
        if probe.choices in known or probe.bound >= mixture.seconds * (1 - near):
            if not mixture.over:
                if not coarse or state.outer is not None:
                    break
                coarse = False
                continue
            raises += 1
            if raises > tuning.PRICE_RAISES and not state.best:
                plans.append(_any_plan(state))
            limit *= tuning.PRICE_RAISE
        gap = 1 - probe.bound / state.seconds if state.seconds else 0.0
        if gap < narrow_at and state.open_choices() > tuning.VERY_FEW_CHOICES and not state.done():
            # The rest is a smaller problem, whose relaxation is cheaper, and tighter.
            _narrow(state, tables, prices)
            narrow_at = gap * tuning.NARROW_AGAIN
            plans = [one for one in plans if state.keeps(one.choices)] or [probe]
        mixture = _mixture(state, plans, limit)
    return plans, mixture


def _untested_peak(state: _State, plan: _Probe, tested: set[int]) -> int | None:
    """Return the peak of a plan that exceeds the budget, if plans with each choice are still to be tested there."""
    point = plan.nbytes.index(plan.peak)
    if plan.peak <= state.problem.budget or point in tested or len(tested) == tuning.UNFIT_POINTS:
        return None
    tested.add(point)
    return point


def _drop_unfit(state: _State, point: int) -> bool:
    """Drop the choices with which every plan exceeds the budget at a program point; tell whether there are any."""
    gratis, presolve, tables = state.bytes_only
    prices = _at(point, 1.0, gratis.activations.points)
    reduction = presolve.reduce(state.kept, prices, state.limits)
    left = marginals(gratis, reduction.kept, tables, prices)
    if left is None:
        return False
    limit = gratis.budget * (1 + tuning.ROUNDING)
    fitting = [
        [k for k in choices if line[k] <= limit]
        for choices, line in zip(state.kept, reduction.extend(gratis, left), strict=True)
    ]
    if not all(fitting) or fitting == state.kept:
        return False  # if no plan fits at all, the search for the plan of least memory says so
    state.kept = fitting
    return True


def _mixture(state: _State, plans: Sequence[_Probe], limit: float) -> _Mixture:
    """Mix plans by the master program; a byte above the budget costs ``limit`` seconds."""
    budget = state.problem.budget
    unit = max(probe.seconds for probe in plans) or 1.0
    byte = float(max(1, budget))
    master = solve_master(
        [probe.nbytes for probe in plans],
        [probe.seconds / unit for probe in plans],
        limit * byte / unit,
        budget,
        byte,
        state.limits,
    )
    parts = sorted(enumerate(master.shares), key=lambda part: (-part[1], part[0]))
    return _Mixture(
        master.objective * unit,
        [(share, plans[i]) for i, share in parts if share > 1e-9],
        [dual * unit / byte for dual in master.duals],
        master.slack > 1e-9,
    )


def _improve(state: _State, tables: Tables, plans: Sequence[_Probe], mixture: _Mixture) -> None:
    """Find better plans than those of the relaxation, as long as the integer program would have many choices."""
    prices = Prices(mixture.prices)
    if not state.best:
        # All plans so far exceed the budget, however little. One that fits is the other end of the mixtures below.
        state.known_plans.append(_any_plan(state))
    _recombine(state, plans, state.options.gap, tuning.VERY_FEW_CHOICES)
    if state.done():
        return
    far = state.seconds - state.bound > tuning.ROUGH_GAP * state.seconds
    if far and not mixture.over:
        # The plans below the best one are many. Those combined of known ones are few, and better.
        _combine(state, tables, prices, mixture)
    _narrow(state, tables, prices)
    if state.done() or state.open_choices() <= tuning.VERY_FEW_CHOICES:
        return
    if not _exhaust(state, tables, prices) and not mixture.over:
        best = state.seconds
        if not far:
            _combine(state, tables, prices, mixture)
        if state.seconds == best:
            _mix(state, tables, mixture)
        if state.seconds < best:
            _narrow(state, tables, prices)
            _exhaust(state, tables, prices)
    if state.done() or state.open_choices() <= tuning.VERY_FEW_CHOICES:
        return
    if _is_wide(state, tables) and state.open_choices() > tuning.FEW_WIDE_CHOICES:
        _divide(state, mixture.prices)
        return
    more, gap = [], tuning.ROUGH_GAP
    if state.open_choices() > tuning.FEW_CHOICES:
        if state.seconds - state.bound <= tuning.WINDOWS_GAP * state.options.gap * state.seconds:
            return
        gap = 0.0
        _polish(state, tables, prices)
        _narrow(state, tables, prices)
        for factor in tuning.PRICE_FACTORS:
            if state.done():
                return
            factored = Prices([price * factor for price in mixture.prices])
            more.append(state.probe(tables, factored, coarse=True))
    if not state.done():
        _recombine(state, [*plans, *more], max(gap, state.options.gap))
        _narrow(state, tables, prices)


def _mix(state: _State, tables: Tables, mixture: _Mixture) -> None:
    """Join a plan that exceeds the budget and one that fits, at a cut in execution order.

    Equal layers all change their plan at the same prices, though the budget may require it of only some of them.
    """
    problem, prices = state.problem, Prices(mixture.prices)
    budget = problem.budget
    parts = [probe for _, probe in mixture.parts]
    lows = [probe for probe in parts if probe.peak > budget]
    highs = [probe for probe in parts if probe.peak <= budget]
    highs = highs or [probe for probe in state.known_plans if probe.choices == state.best]
    if not lows or not highs:
        return
    low, high = lows[0], highs[0]
    count = len(problem.cost)
    position = _positions(problem)

    for first, second in ((low, high), (high, low)):

        def cut(at: int, first: _Probe = first, second: _Probe = second) -> tuple[int, ...]:
            pairs = zip(position, first.choices, second.choices, strict=True)
            return tuple(a if entity_position < at else b for entity_position, a, b in pairs)

        # The cut with as much of ``low`` as fits.
        fits, over = (0, count) if first is low else (count, 0)
        while abs(over - fits) > 1:
            state.limits.check()
            middle = (fits + over) // 2
            if state.record(cut(middle)).peak <= budget:
                fits = middle
            else:
                over = middle
        if state.done():
            return
        for shift in (0, tuning.WINDOW // 4, tuning.WINDOW):
            at = fits - shift if first is low else fits + shift
            if _replan(state, tables, prices, position, cut(at), at).peak <= budget:
                break
        if state.done():
            return


def _positions(problem: Problem) -> list[int]:
    """Map each entity to its position in execution order; a weight has that of its first reader."""
    position = list(range(len(problem.cost)))
    consumers = {edge.consumer for edge in problem.edges}
    for edge in reversed(problem.edges):
        if edge.producer not in consumers:
            position[edge.producer] = edge.consumer
    return position


def _polish(state: _State, tables: Tables, prices: Prices) -> None:
    """Replan the best plan window by window, at lower prices where there is room."""
    if not state.best:
        return
    position = _positions(state.problem)
    last = max(position)
    windows = max(1, min(tuning.WINDOWS // len(tuning.WINDOW_PRICES), last // tuning.WINDOW + 1))
    for window in range(windows):
        at = (2 * window + 1) * last // (2 * windows)
        for factor in tuning.WINDOW_PRICES:
            if state.done():
                return
            lower = Prices([price * factor for price in prices.at])
            _replan(state, tables, lower, position, state.best, at)


def _replan(
    state: _State, tables: Tables, prices: Prices, position: Sequence[int], fixed: Sequence[int], at: int
) -> _Probe:
    """Replan a window of operators around one for these prices; all others keep the choices ``fixed``."""
    state.limits.check()
    kept = [
        choices if abs(entity_position - at) <= tuning.WINDOW else [k]
        for choices, entity_position, k in zip(state.kept, position, fixed, strict=True)
    ]
    return state.record(eliminate(state.problem, kept, tables, prices, state.options.gap / 4, True).choices)


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
    gratis = replace(without_costs(problem), budget=0)
    every = [list(range(len(costs))) for costs in problem.cost]
    state = _State(gratis, replace(options, on_incumbent=None), every)
    best = state.record(tuple(m.index(min(m)) for m in problem.memory))
    bound = float(sum(map(min, problem.memory)))
    state.known_plans.append(best)
    try:
        try:
            best, bound = _probe_peaks(state, best, bound, enough)
        except TooWide:
            best, bound = min(state.known_plans, key=lambda p: p.peak), max(bound, state.bound)
        if best.peak > max(enough, bound + 0.5) and state.open_choices() <= tuning.VERY_FEW_CHOICES:
            try:
                choices, proven = solve_peak(gratis, options)
                best, bound = min(best, state.record(choices), key=lambda p: p.peak), max(bound, proven)
            except StoppedError:
                pass  # the plan so far is the answer
    except OutOfTimeError:
        best, bound = min(state.known_plans, key=lambda p: p.peak), max(bound, state.bound)
    return LeastMemory(best.choices, best.peak, math.ceil(bound - 1e-6))


def _probe_peaks(state: _State, best: _Probe, bound: float, enough: int) -> tuple[_Probe, float]:
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
        prices = Prices([(weight + spread / count) / (1 + spread) for weight in weights])
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
        total = sum(master.duals)
        weights = [dual / total for dual in master.duals]
    return _halve(state, best, bound, enough)


def _halve(state: _State, best: _Probe, bound: float, enough: int) -> tuple[_Probe, float]:
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


def _reach(state: _State, capacity: Capacity, target: int) -> _Probe | None:
    """Find a plan that holds at most ``target`` bytes; None if there is none, another plan if the search ends.

    Choices that need more are dropped, which makes the rest a smaller problem with a greater bound.
    """
    count = state.problem.activations.points
    kept, weights, plans = state.kept, [1.0 / count] * count, list[_Probe]()
    for _ in range(tuning.TARGET_REDUCTIONS):
        fitting = capacity.fitting(kept, target, tuning.FORBIDDEN_PEAKS * max(1, target), limits=state.limits)
        if fitting is None:
            return None
        reduced = _State(fitting.problem, state.options, fitting.kept)
        tables = Tables(state.limits)
        most = target * (1 + tuning.ROUNDING)
        for _ in range(tuning.TARGET_PROBES):
            prices = Prices([(weight + tuning.PEAK_SPREAD / count) / (1 + tuning.PEAK_SPREAD) for weight in weights])
            probe = reduced.probe(tables, prices, coarse=True)
            if probe.bound > most - prices.total * target:  # the priced bytes of every plan left exceed the target
                return None
            plans.append(probe)
            state.known_plans.append(probe)
            if probe.peak <= target:
                return probe
            nbytes = [plan.nbytes for plan in plans]
            master = solve_master(nbytes, [0.0] * len(nbytes), 1.0, 0, float(max(map(max, nbytes))), state.limits)
            total = sum(master.duals)
            weights = [dual / total for dual in master.duals]
        bounds = _bounds(reduced, tables, prices)
        if bounds is None:
            break
        before, limit = sum(map(len, fitting.kept)), prices.total * most
        kept = [[k for k in choices if line[k] <= limit] for choices, line in zip(fitting.kept, bounds, strict=True)]
        if not all(kept):
            return None
        if sum(map(len, kept)) > tuning.TARGET_SHRINK * before:
            break
    return min(plans, key=lambda p: p.peak)


def _any_plan(state: _State, limits: Limits | None = None) -> _Probe:
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
        raise _refusal(state, least)
    return state.record(least.choices)


def _refusal(state: _State, least: LeastMemory) -> HidetDistError:
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


def _narrow(state: _State, tables: Tables, prices: Prices) -> None:
    """Keep only the choices that a plan better than the best one so far could contain."""
    if state.done() or not state.best:
        return
    # Bounds for earlier prices leave fewer choices to bound anew, if a better plan was found since.
    _drop_above_cutoff(state)
    if _bounds(state, tables, prices) is not None:
        _drop_above_cutoff(state)


def _drop_above_cutoff(state: _State) -> None:
    """Drop the choices whose last bounds reach the cutoff."""
    if state.bounds is not None:
        prices, bounds = state.bounds
        state.kept = _below(state, bounds, state.cutoff() + prices.total * state.problem.budget)
        state.narrowed = True


def _bounds(state: _State, tables: Tables, prices: Prices) -> list[Table] | None:
    """Bound the priced cost of plans with each choice of each entity from below; None if that would take long."""
    state.limits.check()
    reduction = state.reduction(prices)
    left = marginals(state.problem, reduction.kept, tables, prices)
    if left is None:
        return None
    bounds = reduction.extend(state.problem, left)
    state.bounds = prices, bounds
    return bounds


def _below(state: _State, bounds: Sequence[Table], limit: float) -> list[list[int]]:
    """Select the choices with bounds below a limit; an entity without any keeps that of the best plan."""
    return [
        [k for k in choices if line[k] < limit] or [best]
        for choices, line, best in zip(state.kept, bounds, state.best, strict=True)
    ]


def _exhaust(state: _State, tables: Tables, prices: Prices) -> bool:
    """Decide between bound and best plan by all plans that cost less than a limit, raised until the gap is small.

    Returns whether the gap is small enough.
    """
    if not state.best or not prices.total:
        return False
    if state.bounds is None or state.bounds[0] is not prices:
        _bounds(state, tables, prices)
    if state.bounds is None or state.bounds[0] is not prices:
        return False
    bounds = state.bounds[1]
    gap = state.options.gap
    for _ in range(tuning.FRONTIERS):
        limit = min(state.cutoff(), state.bound * (1 + gap))
        gap *= 2
        kept = _below(state, bounds, limit + prices.total * state.problem.budget)
        least = _try_plans_below(state, tables, prices, kept, limit)
        if least is None:
            break
        state.raise_bound(least)
        if state.done() or state.bound < limit * (1 - tuning.EQUAL):
            break
    return state.done()


def _combine(state: _State, tables: Tables, prices: Prices, mixture: _Mixture) -> None:
    """Find better plans among the combinations of the choices of the mixture's plans."""
    if not state.best or not prices.total:
        return
    plans = [*(probe.choices for _, probe in mixture.parts), state.best]
    used = [{plan[entity] for plan in plans} for entity in range(len(state.problem.cost))]
    kept = [[k for k in choices if k in some] or choices for choices, some in zip(state.kept, used, strict=True)]
    gap = state.options.gap
    for _ in range(tuning.FRONTIERS):
        gap *= 2
        limit = min(state.cutoff(), state.bound * (1 + gap))
        least = _try_plans_below(state, tables, prices, kept, limit)
        if least is None or state.done() or least < limit or limit == state.cutoff():
            return


def _try_plans_below(
    state: _State, tables: Tables, prices: Prices, kept: Sequence[Sequence[int]], limit: float
) -> float | None:
    """Record the plans among the choices ``kept`` that cost less than a limit.

    Returns a lower bound of all such plans within the budget, at most the limit; None if there are too many.
    """
    if _count_open(kept) > tuning.FEW_CHOICES:
        # Bounds of choices that others dominate are loose: those of what is left are not.
        left = marginals(state.problem, kept, tables, prices)
        if left is not None:
            most = limit + prices.total * state.problem.budget
            kept = [
                [k for k, bound in zip(choices, line, strict=True) if bound < most] or [choices[int(line.argmin())]]
                for choices, line in zip(kept, left, strict=True)
            ]
    if _count_open(kept) > tuning.FRONTIER_CHOICES:
        return None
    try:
        frontier = Frontier(state.problem, kept, tables, prices, limit)
    except TooWide:
        return None
    _record_frontier(state, frontier)
    if frontier.relaxed and len(frontier) and not state.done():
        narrowed = [list(choices) for choices in kept]
        for tensor in frontier.relaxed:
            fix_required(state.groups[tensor], state.best, narrowed, False)
        most = min(state.seconds, limit * (1 + state.options.gap))
        with suppress(TooWide):
            _record_frontier(state, Frontier(state.problem, narrowed, tables, prices, most, frontier.relaxed))
    return min(limit, float(frontier.seconds[0])) if len(frontier) else limit


def _record_frontier(state: _State, frontier: Frontier) -> None:
    """Record the plans of a frontier until one is the best so far; the others cost more, unless tensors are relaxed."""
    for seconds, choices in zip(frontier.seconds[: tuning.FRONTIER_PLANS], frontier.plans(), strict=False):
        if seconds >= state.seconds or state.record(choices).choices == state.best:
            return


@dataclass(frozen=True, order=True)
class _Part:
    """The plans whose resident bytes are within a range, among choices that are kept, and a lower bound of their cost.

    Parts are in the order of their bounds, then of their numbers. ``prices`` are those of the plans that it is a part
    of, the last one for the most resident bytes.
    """

    bound: float
    number: int
    resident: tuple[int, int] = field(compare=False)
    kept: list[list[int]] = field(compare=False)
    prices: Sequence[float] = field(compare=False)


def _divide(state: _State, second_per_byte: Sequence[float]) -> None:
    """Divide the plans into parts, the one of least bound first, until no part can have a better plan.

    Prices mix plans that exceed the budget at one point with plans that have room there. Where little is known to be
    left for transient bytes, because the resident ones are within a range, such plans are told apart: choices and
    conversions that do not fit are dropped. Where resident bytes differ little, parts differ in the choices of an
    entity.
    """
    capacity, number, left = Capacity(state.problem), 0, math.inf
    waiting = [_Part(state.bound, 0, (0, state.problem.budget), state.kept, (*second_per_byte, 0.0))]
    gap = math.inf
    most = min(tuning.PARTS, tuning.PART_CHOICES // sum(map(len, state.problem.cost)))
    for count in range(most):
        if not waiting or waiting[0].bound >= state.cutoff():
            break
        if not count % tuning.PARTS_STALL:
            if state.seconds - waiting[0].bound > tuning.PARTS_PROGRESS * gap:
                break
            gap = state.seconds - waiting[0].bound
        part = heapq.heappop(waiting)
        solved = _solve_part(state, capacity, part)
        if solved is None:
            continue
        bound, prices, halves = solved
        for resident, half in halves:
            number += 1
            heapq.heappush(waiting, _Part(bound, number, resident, half, prices))
        if not halves:
            left = min(left, bound)
    state.divided = True
    state.raise_bound(min([left, state.cutoff(), *(part.bound for part in waiting)]))


_Half = tuple[tuple[int, int], list[list[int]]]  # a range of resident bytes, and the choices kept


def _solve_part(state: _State, capacity: Capacity, part: _Part) -> tuple[float, list[float], list[_Half]] | None:
    """Bound the plans of a part, and record those found on the way; None if none of them is better than the best.

    Returns the bound, the prices for it, and the parts that the part is divided into, if it can be.
    """
    problem = state.problem
    forbidden = tuning.FORBIDDEN_COSTS * state.seconds
    fitting = capacity.fitting(part.kept, problem.budget, forbidden, part.resident, state.limits)
    if fitting is None:
        return None
    limited = _with_most_resident(fitting.problem, fitting.resident[1])
    inner = _State(limited, replace(state.options, on_incumbent=None), fitting.kept, state.best, state.seconds)
    inner.outer, inner.bound = state, part.bound
    tables = Tables(state.limits)
    first = inner.probe(tables, Prices(part.prices), coarse=True)
    inner.known_plans.append(first)
    inner.raise_bound(first.bound)
    if inner.done():
        return None
    _, mixture = _relax(inner, tables)
    prices = Prices(mixture.prices)
    _narrow(inner, tables, prices)
    if inner.seconds - inner.bound <= tuning.FRONTIER_GAP * inner.seconds:
        _exhaust(inner, tables, prices)
    if inner.done():
        return None
    divide = _halves if part.number else _ranges
    return inner.bound, mixture.prices, list(divide(inner, fitting.resident, mixture))


def _with_most_resident(problem: Problem, most: int) -> Problem:
    """Add a program point at which a plan holds its resident bytes alone, and what the budget exceeds ``most`` by."""
    activations = problem.activations
    point, beyond = activations.points, problem.budget - most
    interval = LiveInterval(0, point, point, (beyond,) * len(problem.cost[0]))
    intervals = (*activations.intervals, interval)
    return replace(problem, activations=Activations(point + 1, intervals, activations.tensors))


def _ranges(state: _State, resident: tuple[int, int], mixture: _Mixture) -> list[_Half]:
    """Divide the plans by their resident bytes alone: first those that hold about as much as the mixture's."""
    low, high = resident
    width = max(1, -(-(high + 1 - low) // tuning.RESIDENT_RANGES))
    ranges = [(begin, min(begin + width - 1, high)) for begin in range(low, high + 1, width)]
    memory = state.problem.memory
    mean = sum(share * sum(m[k] for m, k in zip(memory, p.choices, strict=True)) for share, p in mixture.parts)
    ranges.sort(key=lambda ends: abs((ends[0] + ends[1]) / 2 - mean))
    return [(ends, state.kept) for ends in ranges]


def _halves(state: _State, resident: tuple[int, int], mixture: _Mixture) -> Iterator[_Half]:
    """Divide the plans by what those of the mixture differ in most: their resident bytes, or those of an entity.

    The bytes of an entity are those at the point at which the mixture's plans exceed the budget most. Yields two
    halves, or nothing.
    """
    problem, plans = state.problem, [probe for _, probe in mixture.parts]
    shares = [share for share, _ in mixture.parts]
    budget = problem.budget

    def spread(values: Sequence[int]) -> tuple[float, float]:
        mean = sum(share * value for share, value in zip(shares, values, strict=True))
        return sum(share * abs(value - mean) for share, value in zip(shares, values, strict=True)), mean

    low, high = resident
    most, mean = spread([sum(m[k] for m, k in zip(problem.memory, plan.choices, strict=True)) for plan in plans])
    division: tuple[int, list[bool]] | None = None  # an entity, and for each of its choices whether it is in one half
    if not low <= int(mean) < high:
        most = 0.0
    excess = [
        sum(share * max(0, plan.nbytes[point] - budget) for share, plan in mixture.parts)
        for point in range(problem.activations.points)
    ]
    point = excess.index(max(excess))
    for entity, nbytes, chosen in _bytes_at(state, point, plans):
        own, middle = spread(chosen)
        above = [n > middle for n in nbytes]
        sides = {above[k] for k in state.kept[entity]}
        if own > most and len(sides) == 2:
            most, division = own, (entity, above)
    if division is not None:
        entity, above = division
        for side in (True, False):
            kept = list(state.kept)
            kept[entity] = [k for k in kept[entity] if above[k] is side]
            yield resident, kept
    elif most:
        yield (int(mean) + 1, high), state.kept
        yield (low, int(mean)), state.kept


def _bytes_at(state: _State, point: int, plans: Sequence[_Probe]) -> Iterator[tuple[int, Sequence[float], list[int]]]:
    """Yield entities with figures for the bytes of their choices at a program point, and the bytes in each plan.

    Conversions count for their reader, by the spec that it requires, if the plans' readers require different ones, or
    else for the producer, by the spec that it produces.
    """
    problem = state.problem
    for interval in problem.activations.intervals:
        if interval.begin <= point <= interval.end:
            yield interval.entity, interval.nbytes, [interval.nbytes[plan.choices[interval.entity]] for plan in plans]
    for tensor, memory in problem.activations.tensors.items():
        for edge in state.groups.get(tensor, ()):
            if not edge.begin <= point <= edge.end:
                continue
            pairs = [(edge.produced[p.choices[edge.producer]], edge.consumed[p.choices[edge.consumer]]) for p in plans]
            nbytes = [
                memory.nbytes[d] + (memory.working(s, d) if point == edge.begin else 0)
                if memory.layout[s] != memory.layout[d]
                else 0
                for s, d in pairs
            ]
            for side, entity, specs in ((1, edge.consumer, edge.consumed), (0, edge.producer, edge.produced)):
                if len({pair[side] for pair in pairs}) > 1:
                    dearest = pairs[nbytes.index(max(nbytes))][side]
                    yield entity, [math.inf if spec == dearest else -math.inf for spec in specs], nbytes
                    break


def _recombine(state: _State, plans: Sequence[_Probe], gap: float, most: int = tuning.FEW_CHOICES) -> None:
    """Find the best plan, to a gap, among combinations of the choices of the last plans that have at most so many."""
    if not state.best:
        return
    recombined = [probe.choices for probe in plans[-tuning.RECOMBINED_PLANS :]] + [state.best]
    kept: list[list[int]] = []
    while True:
        used = [set(chosen) for chosen in zip(*recombined, strict=True)]
        kept = [[k for k in choices if k in some] or choices for choices, some in zip(state.kept, used, strict=True)]
        if _count_open(kept) <= most:
            break
        del recombined[0]
        if len(recombined) == 1:
            return
    state.limits.check()
    try:
        solution = solve(
            restricted(state.problem, kept),
            replace(state.options, gap=gap),
            tuning.RECOMBINATION_NODES,
            _tight_points(state),
        )
    except (StoppedError, NothingFitsError):
        return
    state.peaks |= dict.fromkeys(solution.points)
    state.record(tuple(choices[k] for choices, k in zip(kept, solution.choices, strict=True)))


def _tight_points(state: _State) -> tuple[int, ...]:
    """List the points at which the budget is expected to bind: peaks of plans that exceed it, or nearly do."""
    best = state.record(state.best).nbytes if state.best else []
    near = [point for point, n in enumerate(best) if n >= tuning.NEAR_BUDGET * state.problem.budget]
    return tuple(dict.fromkeys((*state.peaks, *peaks(best, near))))


def _integer_program(state: _State) -> None:
    """Decide among the remaining choices by the integer program, after finding some plan that fits."""
    kept, options = state.kept, state.options
    state.limits.check()
    if not state.best:
        least = least_memory(state.problem, options, state.problem.budget)
        state.known_plans.append(state.record(least.choices))
        if not state.best:
            state.refusal = _refusal(state, least)
            if least.bound_bytes > state.problem.budget:
                raise state.refusal
    try:
        # A plan must be better by the gap to be of use.
        most = state.cutoff()
        solution = solve(restricted(state.problem, kept), options, points=_tight_points(state), most_seconds=most)
    except NothingFitsError:
        if state.best:
            state.raise_bound(state.cutoff())  # no plan that fits is better than the best one
        return
    except TooLargeError:
        state.refusal = _not_found(state)  # for the case that there is no plan so far
        return
    except StoppedError as error:
        state.raise_bound(min(error.bound, state.cutoff()))  # the solver ran out of time or of nodes
        return
    state.peaks |= dict.fromkeys(solution.points)
    # Plans with dropped choices cost at least as much as the best plan within the gap.
    bound = min(solution.seconds * (1 - solution.gap), state.seconds * (1 - options.gap))
    state.record(tuple(choices[k] for choices, k in zip(kept, solution.choices, strict=True)))
    state.raise_bound(min(bound, state.seconds))
