"""The best plan within the memory budget: elimination where it suffices, the integer program for what it leaves.

Without the budget the problem is solved exactly by elimination. With it, prices on the bytes of moments give a lower
bound whatever they are (Lagrangian relaxation; Everett, Operations Research 11(3), 1963), and a plan each. The best
prices are the duals of a small linear program, which mixes the plans found so far so that no moment's mean exceeds the
budget (Dantzig and Wolfe, Operations Research 8(1), 1960): a plan that is cheaper at these prices joins the mixture,
until there is none. Where a gap is left between the bound and the best plan that fits, choices that no plan better than
that one can contain are dropped, and the integer program decides among the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pulp

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.search.activations import held
from hidet_dist.search.eliminate import Tables, TooWide, eliminate, marginals
from hidet_dist.search.ilp import (
    NothingFitsError,
    Problem,
    Solution,
    StoppedError,
    evaluate,
    restricted,
    solve,
    solve_peak,
    summits,
)
from hidet_dist.search.presolve import readers, undominated
from hidet_dist.search.prices import Prices

_PROBES = 60  # prices tried at most; a dozen is usual
_RAISES = 4  # times that the limit on prices is raised before plans that hold less are looked for, whatever they cost
_RECOMBINED = 16  # plans whose choices are recombined
_RECOMBINATION_NODES = 200
_NEAR = 0.95  # of the budget: moments at which a plan better than the best one known may exceed it
_ROUGH = 0.01  # the gap of a recombination that only drops choices before the integer program decides on the others
_KNOWN = 40  # plans that a like problem is begun with
_REPLANS = 24  # windows that are planned anew to make a plan better
_FACTORS = (0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0)  # of the best prices, for more plans to recombine
_FEW = 2500  # choices that the integer program decides on within a minute
_VERY_FEW = 300  # choices that it decides on at once
_WINDOW = 80  # operators around a cut that are planned anew
_EQUAL = 1e-6  # relative, of seconds at prices of so many digits
_PEAK_ENTITIES = 400  # of a graph whose least memory the integer program is asked for

OnIncumbent = Callable[[Sequence[int], float, float, float], None]


@dataclass(frozen=True)
class Options:
    """How to solve: solver, seconds until the best plan known is taken, relative gap, threads.

    Without ``prove`` the best plan known is also taken when it would take long to come near a bound.
    ``on_incumbent`` is called with the choices of the best plan known, its seconds, the lower bound, and the seconds
    gone by, whenever one of these changes but the last.
    """

    solver: str = "highs"
    time_limit_seconds: float | None = None
    gap: float = 1e-3
    threads: int = 1
    on_incumbent: OnIncumbent | None = None
    prove: bool = True


@dataclass(frozen=True)
class _Probe:
    """A plan, its seconds without the price of memory, and the bytes that a device holds at each moment.

    ``bound``: what no plan that fits costs less than, by the prices that this one was found at.
    """

    choices: tuple[int, ...]
    seconds: float
    nbytes: list[int]
    bound: float = -math.inf

    @property
    def peak(self) -> int:
        return max(self.nbytes)


@dataclass
class _Search:
    """The best plan known, and the greatest lower bound."""

    problem: Problem
    options: Options
    kept: list[list[int]]
    begin: float
    best: tuple[int, ...] = ()
    seconds: float = math.inf
    bound: float = 0.0
    found: list[_Probe] = field(default_factory=list)
    second_per_byte: tuple[float, ...] = ()
    summits: dict[int, None] = field(default_factory=dict)  # the moments that plans considered hold too much at

    def __post_init__(self) -> None:
        self.groups = readers(self.problem)

    def probe(self, tables: Tables, prices: Prices) -> _Probe:
        """The best plan at given prices."""
        self.check_time()
        found = eliminate(self.problem, self.kept, tables, prices, self.options.gap / 4)
        return replace(self.record(found.choices), bound=found.bound - prices.total * self.problem.budget)

    def record(self, choices: tuple[int, ...]) -> _Probe:
        """What a plan costs; it is the best from now on if it fits and no better one is known."""
        probe = _Probe(choices, evaluate(self.problem, choices), held(self.problem, self.groups, choices))
        if probe.peak <= self.problem.budget and probe.seconds < self.seconds:
            self.best, self.seconds = choices, probe.seconds
            self.tell()
        return probe

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            self.tell()

    def tell(self) -> None:
        """Say which plan is the best known, and the bound."""
        if self.options.on_incumbent is not None and self.best:
            bound, elapsed = min(self.bound, self.seconds), time.perf_counter() - self.begin
            self.options.on_incumbent(self.best, self.seconds, bound, elapsed)

    def open_choices(self) -> int:
        """How many choices are left of the entities that have more than one."""
        return sum(len(own) for own in self.kept if len(own) > 1)

    def seconds_left(self) -> float | None:
        limit = self.options.time_limit_seconds
        return None if limit is None else limit - (time.perf_counter() - self.begin)

    def check_time(self) -> None:
        left = self.seconds_left()
        if left is not None and left <= 0:
            raise _OutOfTime

    def cutoff(self) -> float:
        """Seconds from which on a plan is not better than the best one known, by the gap."""
        return self.seconds * (1 - self.options.gap)

    def done(self) -> bool:
        return math.isfinite(self.seconds) and self.seconds - self.bound <= self.options.gap * self.seconds + 1e-15


class _OutOfTime(Exception):
    """The time limit is reached."""


def optimize(problem: Problem, options: Options = Options(), like: Solution | None = None) -> Solution:
    """Solve the problem to a relative gap, or as far as the time goes.

    ``like`` is the solution of a problem that differs in its costs, where there is one: its plans are begun with.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget.
    SolverError
        When the solver fails, or the time limit is reached before a plan is known.
    """
    state = _Search(problem, options, undominated(problem), time.perf_counter())
    tables = Tables()
    if like is not None:
        state.summits = dict.fromkeys(like.moments)
        state.found = [state.record(choices) for choices in like.known]
    try:
        try:
            if sum(map(min, problem.memory)) > problem.budget:
                _any_plan(state)
            # A bound without activations is a bound; if this plan fits with them too, all is done.
            _without_activations(state, tables)
            if not state.done():
                state.kept = [list(range(len(costs))) for costs in problem.cost]
                found, mixture = _relax(state, tables)
                state.second_per_byte = tuple(mixture.prices)
                state.found = found
                over = {probe.nbytes.index(probe.peak) for probe in found if probe.peak > problem.budget}
                state.summits |= dict.fromkeys(sorted(over))
                if not state.done():
                    _improve(state, tables, found, mixture)
        except TooWide:
            pass
        if not state.done() and (options.prove or not state.best or state.open_choices() <= _VERY_FEW):
            _integer_program(state)
    except _OutOfTime:
        if not state.best:
            limit = options.time_limit_seconds
            raise SolverError(f"No plan was found within the time limit of {limit} s; allow more.") from None
    gap = max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0
    known = tuple(dict.fromkeys((*(probe.choices for probe in state.found[-_KNOWN:]), state.best)))
    return Solution(state.best, state.seconds, gap, state.second_per_byte, tuple(state.summits), known)


def _at(moment: int, price: float, count: int) -> Prices:
    return Prices([price if m == moment else 0.0 for m in range(count)])


def _without_activations(state: _Search, tables: Tables) -> None:
    """The best plan at no price, or next to none: among plans of the same time the one that holds less."""
    problem = state.problem
    trifle = state.options.gap / 1000 * sum(map(min, problem.cost)) / max(1, sum(map(max, problem.memory)))
    count = problem.activations.moments
    # Before the first operator a device holds what it holds throughout, and little else.
    for price in (trifle, 0.0):
        probe = state.probe(tables, _at(0, price, count))
        state.found.append(probe)
        state.raise_bound(probe.bound)
        if probe.peak > problem.budget or state.done():
            return


def _relax(state: _Search, tables: Tables) -> tuple[list[_Probe], _Mixture]:
    """The plans found on the way to the prices of the greatest lower bound, and the mixture that has these prices.

    Raises
    ------
    InfeasibleError
        When there is no plan that fits.
    """
    budget, count = state.problem.budget, state.problem.activations.moments
    found, bound, raises = list(state.found), state.bound, 0
    low = found[-1]
    # Where the budget asks for a few per cent of the time, as it mostly does, this is near the best price.
    limit = low.seconds / max(1, low.peak - budget) / 20 or 1.0
    mixture = _mixture(found, budget, limit, count)
    for _ in range(_PROBES):
        if bound >= state.cutoff():
            break
        known = {probe.choices for probe in found}
        probe = state.probe(tables, Prices(mixture.prices))
        bound = max(bound, probe.bound)
        state.raise_bound(bound)
        found.append(probe)
        if probe.choices in known or probe.bound >= mixture.seconds * (1 - _EQUAL):
            if not mixture.over:
                break
            raises += 1
            if raises > _RAISES and not state.best:
                found.append(_any_plan(state))
            limit *= 8
        mixture = _mixture(found, budget, limit, count)
    return found, mixture


def _improve(state: _Search, tables: Tables, found: Sequence[_Probe], mixture: _Mixture) -> None:
    """Better plans than those of the relaxation, while many choices are left for the integer program to decide on."""
    prices = Prices(mixture.prices)
    if not mixture.over:
        _mix(state, tables, mixture)
    _narrow(state, tables, prices)
    if state.done() or state.open_choices() <= _VERY_FEW:
        return
    more, gap = [], _ROUGH
    if state.open_choices() > _FEW:
        gap = 0.0
        _polish(state, tables, prices)
        for factor in _FACTORS:
            if state.done():
                return
            more.append(state.probe(tables, Prices([price * factor for price in mixture.prices])))
    if not state.done():
        _recombine(state, [*found, *more], max(gap, state.options.gap))
        _narrow(state, tables, prices)


@dataclass(frozen=True)
class _Mixture:
    """The best mixture of plans whose mean fits: its seconds, parts, prices of moments; whether it exceeds the budget.

    ``parts`` are the shares of the plans, most first.
    """

    seconds: float
    parts: list[tuple[float, _Probe]]
    prices: list[float]
    over: bool


def _mixture(found: Sequence[_Probe], budget: int, limit: float, count: int) -> _Mixture:
    """The linear program over the shares of the plans; exceeding the budget by a byte costs ``limit`` seconds."""
    if not found:
        return _Mixture(math.inf, [], [0.0] * count, True)
    rows: dict[tuple[int, ...], list[int]] = {}
    for moment in range(count):
        row = tuple(probe.nbytes[moment] for probe in found)
        if max(row) > budget:
            rows.setdefault(row, []).append(moment)
    # A row that another one exceeds for every plan is not needed.
    needed: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in needed):
            needed.append(row)
    unit = max(probe.seconds for probe in found) or 1.0
    byte = float(max(1, budget))
    model = pulp.LpProblem("mixture", pulp.LpMinimize)
    shares = [pulp.LpVariable(f"share_{i}", lowBound=0) for i in range(len(found))]
    over = pulp.LpVariable("over", lowBound=0)
    model.setObjective(
        pulp.lpSum(probe.seconds / unit * share for probe, share in zip(found, shares, strict=True))
        + limit * byte / unit * over
    )
    model += pulp.lpSum(shares) == 1, "one"
    for number, row in enumerate(needed):
        excess = pulp.lpSum((n - budget) / byte * share for n, share in zip(row, shares, strict=True))
        model += excess - over <= 0, f"row_{number}"
    model.solve(pulp.HiGHS(msg=False, threads=1))
    prices = [0.0] * count
    for number, row in enumerate(needed):
        dual = _dual(model, f"row_{number}") * unit / byte
        for moment in rows[row]:  # equal layers share their price
            prices[moment] = dual / len(rows[row])
    parts = sorted(((float(s.value() or 0.0), i) for i, s in enumerate(shares)), key=lambda part: (-part[0], part[1]))
    return _Mixture(
        float(pulp.value(model.objective)) * unit,
        [(share, found[i]) for share, i in parts if share > 1e-9],
        prices,
        float(over.value() or 0.0) > 1e-9,
    )


def _dual(model: pulp.LpProblem, name: str) -> float:
    return max(0.0, -float(model.get_constraint_by_name(name).pi or 0.0))


def _mix(state: _Search, tables: Tables, mixture: _Mixture) -> None:
    """Plans that are as one that does not fit on one side of a cut in execution order, and as one that does beyond it.

    Equal layers all change their plan at the same prices, though the budget may ask only some of them to.
    """
    problem, prices = state.problem, Prices(mixture.prices)
    budget = problem.budget
    parts = [probe for _, probe in mixture.parts]
    lows = [probe for probe in parts if probe.peak > budget]
    highs = [probe for probe in parts if probe.peak <= budget] or [p for p in state.found if p.choices == state.best]
    if not lows or not highs:
        return
    low, high = lows[0], highs[0]
    count = len(problem.cost)
    place = _places(problem)

    for first, second in ((low, high), (high, low)):

        def cut(at: int, first: _Probe = first, second: _Probe = second) -> tuple[int, ...]:
            pairs = zip(place, first.choices, second.choices, strict=True)
            return tuple(a if where < at else b for where, a, b in pairs)

        # The cut with as much of ``low`` as fits.
        fits, over = (0, count) if first is low else (count, 0)
        while abs(over - fits) > 1:
            middle = (fits + over) // 2
            if state.record(cut(middle)).peak <= budget:
                fits = middle
            else:
                over = middle
        if state.done():
            return
        for shift in (0, _WINDOW // 4, _WINDOW):
            at = fits - shift if first is low else fits + shift
            if _replan(state, tables, prices, place, cut(at), at).peak <= budget:
                break
        if state.done():
            return


def _places(problem: Problem) -> list[int]:
    """Where in the order of execution each entity is: a weight where the first operator reads it."""
    place = list(range(len(problem.cost)))
    consumers = {edge.consumer for edge in problem.edges}
    for edge in reversed(problem.edges):
        if edge.producer not in consumers:
            place[edge.producer] = edge.consumer
    return place


def _polish(state: _Search, tables: Tables, prices: Prices) -> None:
    """Plan one window after the other of the best plan anew, at lower prices where there is room."""
    if not state.best:
        return
    place = _places(state.problem)
    last = max(place)
    windows = max(1, min(_REPLANS // 3, last // _WINDOW + 1))
    for window in range(windows):
        at = (2 * window + 1) * last // (2 * windows)
        for factor in (1.0, 0.7, 0.4):
            if state.done():
                return
            own = Prices([price * factor for price in prices.at])
            _replan(state, tables, own, place, state.best, at)


def _replan(
    state: _Search, tables: Tables, prices: Prices, place: Sequence[int], fixed: Sequence[int], at: int
) -> _Probe:
    """Plan the operators around one anew at given prices; all others keep their choices."""
    state.check_time()
    kept = [own if abs(where - at) <= _WINDOW else [k] for own, where, k in zip(state.kept, place, fixed, strict=True)]
    return state.record(eliminate(state.problem, kept, tables, prices, state.options.gap / 4).choices)


def least_memory(problem: Problem, options: Options, enough: int = 0) -> tuple[tuple[int, ...], int, int]:
    """The plan that holds least at its worst moment: its choices, its bytes, and bytes below which there is none.

    The search ends with the first plan that holds no more than ``enough`` bytes. Large graphs get a bound that may be
    below what is attained.

    Raises
    ------
    SolverError
        When the time limit is reached.
    """
    free: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {}
    edges = []
    for edge in problem.edges:
        size = len(edge.convert), len(edge.convert[0])
        nothing = free.setdefault(size, ((0.0,) * size[1],) * size[0])
        edges.append(replace(edge, convert=nothing))
    gratis = replace(problem, cost=[[0.0] * len(costs) for costs in problem.cost], edges=edges, budget=0)
    state = _Search(gratis, replace(options, on_incumbent=None), undominated(gratis), time.perf_counter())
    state.kept = [list(range(len(costs))) for costs in problem.cost]
    tables = Tables()
    best, bound = state.record(tuple(m.index(min(m)) for m in problem.memory)), float(sum(map(min, problem.memory)))
    state.found.append(best)
    weights = [float(n == best.peak) for n in best.nbytes]
    try:
        for _ in range(_PROBES):
            if best.peak <= max(enough, bound + 0.5):
                break
            prices = Prices([weight / sum(weights) for weight in weights])
            probe = state.probe(tables, prices)
            state.found.append(probe)
            bound = max(bound, probe.bound / prices.total)
            best = min(best, probe, key=lambda p: p.peak)
            weights, mean = _worst_mixture(state.found)
            if mean <= bound * (1 + _EQUAL):
                break
    except TooWide:
        pass
    except _OutOfTime:
        raise SolverError(f"No plan was found within the time limit of {options.time_limit_seconds} s.") from None
    if best.peak > max(enough, bound + 0.5) and len(problem.cost) <= _PEAK_ENTITIES:
        try:
            choices, proven = solve_peak(gratis, options.solver, state.seconds_left(), options.threads)
            best, bound = min(best, state.record(choices), key=lambda p: p.peak), max(bound, proven)
        except StoppedError:
            pass  # the plan known is what can be said to do
    return best.choices, best.peak, math.ceil(bound - 1e-6)


def _worst_mixture(found: Sequence[_Probe]) -> tuple[list[float], float]:
    """Weights of moments by which the plans known differ least in what they hold, and that mean, in bytes."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for moment in range(len(found[0].nbytes)):
        rows.setdefault(tuple(probe.nbytes[moment] for probe in found), []).append(moment)
    needed: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in needed):
            needed.append(row)
    byte = float(max(1, *map(max, needed)))
    model = pulp.LpProblem("peak", pulp.LpMinimize)
    shares = [pulp.LpVariable(f"share_{i}", lowBound=0) for i in range(len(found))]
    peak = pulp.LpVariable("peak", lowBound=0)
    model.setObjective(peak + 0)
    model += pulp.lpSum(shares) == 1, "one"
    for number, row in enumerate(needed):
        mean = pulp.lpSum(n / byte * share for n, share in zip(row, shares, strict=True))
        model += mean - peak <= 0, f"row_{number}"
    model.solve(pulp.HiGHS(msg=False, threads=1))
    weights = [0.0] * len(found[0].nbytes)
    for number, row in enumerate(needed):
        dual = _dual(model, f"row_{number}")
        for moment in rows[row]:
            weights[moment] = dual / len(rows[row])
    return weights, float(peak.value() or 0.0) * byte


def _any_plan(state: _Search) -> _Probe:
    """The plan that holds least. Raises InfeasibleError when it does not fit."""
    budget = state.problem.budget
    options = replace(state.options, time_limit_seconds=state.seconds_left())
    choices, attained, bound = least_memory(state.problem, options, budget)
    if attained <= budget:
        return state.record(choices)
    if bound >= attained:
        known = f"the least that would do is {attained} bytes"
    else:
        known = f"{attained} bytes would do, and no plan does with less than {bound}"
    what = "No plan fits" if bound > budget else "No plan was found that fits"
    raise InfeasibleError(
        f"{what} mem_budget = {budget} bytes a device: {known}. Give at least {attained} bytes, or more devices.",
        attained,
    )


def _narrow(state: _Search, tables: Tables, prices: Prices) -> None:
    """Keep only the choices that a plan better than the best one known could contain."""
    if state.done() or not state.best:
        return
    state.check_time()
    bounds = marginals(state.problem, state.kept, tables, prices)
    if bounds is None:
        return
    limit = state.cutoff() + prices.total * state.problem.budget
    for entity, line in enumerate(bounds):
        left = [k for k, least in zip(state.kept[entity], line, strict=True) if least < limit]
        state.kept[entity] = left or [state.best[entity]]


def _recombine(state: _Search, found: Sequence[_Probe], gap: float) -> None:
    """The best plan, to a gap, made of choices of the plans known; they are few, so that is soon solved."""
    if not state.best:
        return
    plans = [probe.choices for probe in found[-_RECOMBINED:]] + [state.best]
    made = [{plan[entity] for plan in plans} for entity in range(len(state.problem.cost))]
    kept = [[k for k in own if k in some] or own for own, some in zip(state.kept, made, strict=True)]
    left = state.seconds_left()
    if left is not None and left <= 0:
        raise _OutOfTime
    try:
        solution = solve(
            restricted(state.problem, kept),
            state.options.solver,
            left,
            gap,
            state.options.threads,
            _RECOMBINATION_NODES,
            _tight(state),
        )
    except (StoppedError, NothingFitsError):
        return
    state.summits |= dict.fromkeys(solution.moments)
    state.record(tuple(own[k] for own, k in zip(kept, solution.choices, strict=True)))


def _tight(state: _Search) -> tuple[int, ...]:
    """The moments that the budget is expected to bind at: of plans too large, and where the best one is nearly so."""
    best = state.record(state.best).nbytes if state.best else []
    near = [moment for moment, n in enumerate(best) if n >= _NEAR * state.problem.budget]
    return tuple(dict.fromkeys((*state.summits, *summits(best, near))))


def _integer_program(state: _Search) -> None:
    kept, options = state.kept, state.options
    state.check_time()
    if not state.best:
        _any_plan(state)
    left = state.seconds_left()
    limit = None if left is None else max(0.1, left)
    try:
        solution = solve(
            restricted(state.problem, kept),
            options.solver,
            limit,
            options.gap,
            options.threads,
            moments=_tight(state),
        )
    except NothingFitsError:
        state.raise_bound(state.cutoff())  # of what is left nothing fits: no plan is better than the one known
        return
    except StoppedError:
        return  # out of time: the plan known is the answer, with its gap
    state.summits |= dict.fromkeys(solution.moments)
    # What was dropped from the program costs no less than the known plan within the gap.
    bound = min(solution.seconds * (1 - solution.gap), state.seconds * (1 - options.gap))
    state.record(tuple(own[k] for own, k in zip(kept, solution.choices, strict=True)))
    state.raise_bound(min(bound, state.seconds))
