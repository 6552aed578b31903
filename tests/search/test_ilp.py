from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import ConfigError, SolverError
from hidet_dist.search.budget.master import solve_master
from hidet_dist.search.ilp import StoppedError, solve, solve_peak
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, Edge, LiveInterval, Problem, evaluate

prices = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn, exact_budget: bool = False) -> Problem:
    """Up to 5 entities of up to 3 choices, tensors of up to 3 consumers, and a budget that some choices break."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    cost = [draw(st.lists(prices, min_size=n, max_size=n)) for n in sizes]
    memory = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for n in sizes]
    edges = []
    for tensor in range(draw(st.integers(0, 4))):
        if len(sizes) < 2:
            break
        producer = draw(st.integers(0, len(sizes) - 2))
        specs = draw(st.integers(1, 3))
        spec = st.integers(0, specs - 1)
        row = st.tuples(*[prices] * specs)
        convert = tuple(tuple(0.0 if s == d else p for d, p in enumerate(draw(row))) for s in range(specs))
        produced = tuple(draw(spec) for _ in range(sizes[producer]))
        for _ in range(draw(st.integers(1, 3))):
            consumer = draw(st.integers(producer + 1, len(sizes) - 1))
            consumed = tuple(draw(spec) for _ in range(sizes[consumer]))
            edges.append(Edge(tensor, producer, consumer, produced, consumed, convert))
    least, most = sum(map(min, memory)), sum(map(max, memory))
    budget = draw(st.integers(least, most)) if not exact_budget else least
    return Problem(cost, memory, budget, edges)


def plans(problem: Problem) -> list[tuple[float, int]]:
    """(seconds, bytes) of every plan there is."""
    return [
        (evaluate(problem, picks), sum(m[k] for m, k in zip(problem.memory, picks, strict=True)))
        for picks in itertools.product(*(range(len(costs)) for costs in problem.cost))
    ]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_solution_is_the_best_of_all_plans(problem: Problem) -> None:
    best = min(seconds for seconds, nbytes in plans(problem) if nbytes <= problem.budget)
    solution = solve(problem)
    assert solution.seconds == pytest.approx(best, abs=1e-6)
    assert evaluate(problem, solution.choices) == solution.seconds
    assert sum(m[k] for m, k in zip(problem.memory, solution.choices, strict=True)) <= problem.budget


def uneven_chain(seed: int, dear: float) -> Problem:
    """A chain of 3 to 6 entities whose costs differ by up to 1; every choice of the first one costs ``dear``."""
    rng = random.Random(seed)
    sizes = [rng.randint(2, 4) for _ in range(rng.randint(3, 6))]
    cost = [[rng.random() for _ in range(n)] for n in sizes]
    cost[0] = [dear] * sizes[0]
    memory = [[rng.randint(1, 100) for _ in range(n)] for n in sizes]
    edges = []
    for t, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        convert = tuple(tuple(0.0 if s == d else rng.random() for d in range(columns)) for s in range(rows))
        edges.append(Edge(t, t, t + 1, tuple(range(rows)), tuple(range(columns)), convert))
    least, most = sum(map(min, memory)), sum(map(max, memory))
    return Problem(cost, memory, least + int((most - least) * rng.random() / 2), edges)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("seed", "dear"), [(3, 1e6), (5, 1e6), (7, 1e6), (145, 1.0)])
def test_the_gap_is_a_proof(seed: int, dear: float, solver: str) -> None:
    """Solvers stop at an absolute gap, too, and HiGHS 1.15.1 takes another plan of the last chain for the best one."""
    problem = uneven_chain(seed, dear)
    best = min(seconds for seconds, nbytes in plans(problem) if nbytes <= problem.budget)
    solution = solve(problem, SolveOptions(solver, solver_gap=0.0))
    assert solution.seconds * (1 - solution.gap) <= best * (1 + 1e-12)
    assert solution.gap < 1e-5


@settings(max_examples=15, deadline=None)
@given(problems())
def test_both_solvers_find_the_same_optimum(problem: Problem) -> None:
    assert solve(problem, SolveOptions("cbc")).seconds == pytest.approx(solve(problem).seconds, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(problems(exact_budget=True))
def test_the_least_budget_is_feasible_and_less_is_not(problem: Problem) -> None:
    best = min(seconds for seconds, nbytes in plans(problem) if nbytes <= problem.budget)
    assert solve(problem).seconds == pytest.approx(best, abs=1e-6)
    if sum(map(min, problem.memory)):
        short = Problem(problem.cost, problem.memory, problem.budget - 1, problem.edges)
        with pytest.raises(SolverError, match="no plan fits"):
            solve(short)


def test_a_conversion_is_paid_once_for_all_consumers() -> None:
    # Spec 0 is made for free, spec 1 wanted by both consumers at 4 s: 4 s in all, less than the 5 s of making spec 1.
    convert = ((0.0, 4.0), (4.0, 0.0))
    edges = [Edge(0, 0, consumer, (0, 1), (1,), convert) for consumer in (1, 2)]
    solution = solve(Problem([[0.0, 5.0], [0.0], [0.0]], [[0, 0], [0], [0]], 0, edges))
    assert (solution.choices, solution.seconds) == ((0, 0, 0), 4.0)
    # Two tensors of the same producer are paid one by one, so that the 5 s are the better way.
    apart = [edges[0], Edge(1, 0, 2, (0, 1), (1,), convert)]
    solution = solve(Problem([[0.0, 5.0], [0.0], [0.0]], [[0, 0], [0], [0]], 0, apart))
    assert (solution.choices, solution.seconds) == ((1, 0, 0), 5.0)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose 'highs' or 'cbc'"):
        solve(Problem([[1.0, 2.0]], [[0, 0]], 0, []), SolveOptions("gurobi"))


def long_chain(count: int = 80) -> Problem:
    """A chain whose optimum takes HiGHS many nodes."""
    rng, choices = random.Random(0), 8
    cost = [sorted(float(n) for n in rng.sample(range(100, 1000), choices)) for _ in range(count)]
    memory = [sorted(rng.sample(range(1000, 9000), choices), reverse=True) for _ in cost]
    specs = tuple(range(choices))

    def conversions() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if s == d else float(rng.randint(50, 500)) for d in specs) for s in specs)

    edges = [Edge(n, n, n + 1, specs, specs, conversions()) for n in range(count - 1)]
    return Problem(cost, memory, int(0.8 * sum(sum(own) / choices for own in memory)), edges)


def test_a_search_that_is_cut_off_returns_its_best_plan() -> None:
    problem = long_chain()
    cut_off, best = (solve(problem, SolveOptions(solver_gap=0.0), nodes) for nodes in (1, 5000))
    assert cut_off.gap > 1e-6 > best.gap
    assert best.seconds <= cut_off.seconds <= best.seconds / (1 - cut_off.gap) * (1 + 1e-9)
    assert sum(m[k] for m, k in zip(problem.memory, cut_off.choices, strict=True)) <= problem.budget
    with pytest.raises(StoppedError):
        solve(problem, SolveOptions(solver_gap=0.0), 0)


def test_a_limit_of_cpu_time_is_none_of_the_walls_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS measures its limit by the wall's clock; a process that waits for its turn still has all its CPU time."""
    readings = itertools.count()
    rng = random.Random(0)
    seconds = [rng.random() for _ in range(40)]
    plans = [[rng.randint(0, 100) for _ in range(60)] for _ in seconds]
    unlimited = solve_master(plans, seconds, 1.0, 50, 1.0, Limits())
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    limits = Limits(1e-6, clock=time.process_time)
    assert solve(long_chain(8), SolveOptions(solver_gap=0.0, limits=limits)).gap < 1e-6
    assert solve_master(plans, seconds, 1.0, 50, 1.0, limits) == unlimited
    assert not limits.time_reached
    monkeypatch.setattr(time, "process_time", lambda: 0.0 if next(readings) < 100 else 100.0)
    limits = Limits(10.0, clock=time.process_time)
    with suppress(StoppedError):
        assert solve(long_chain(40), SolveOptions(solver_gap=0.0, limits=limits)).gap > 0
    assert limits.time_reached


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_the_peak_holds_although_much_more_is_held_over_time(seed: int) -> None:
    """Twelve tensors live at one of two moments, beside others that live alone and hold a thousand times as much."""
    rng = random.Random(seed)
    sizes, others = [rng.randrange(10**5, 2 * 10**5) for _ in range(12)], 1500
    first = [LiveInterval(n, 0, 0, (size, 0)) for n, size in enumerate(sizes)]
    second = [LiveInterval(n, 1, 1, (0, size)) for n, size in enumerate(sizes)]
    alone = [LiveInterval(12 + n, 2 + n, 2 + n, (sum(sizes) // 3,)) for n in range(others)]
    zeros = [[0.0, 0.0]] * len(sizes) + [[0.0]] * others
    memory = [[0] * len(own) for own in zeros]
    problem = Problem(zeros, memory, 0, [], Activations(2 + others, (*first, *second, *alone), {}))
    sums = {sum(chosen) for count in range(13) for chosen in itertools.combinations(sizes, count)}
    least = min(max(one, sum(sizes) - one) for one in sums)
    choices, proven = solve_peak(problem, SolveOptions())
    peak = max(problem.totals.nbytes(choices))
    assert least * (1 - 1e-5) <= proven <= least <= peak <= least * (1 + 1e-5)
