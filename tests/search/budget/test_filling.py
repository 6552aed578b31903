"""The room that plans of equal layers leave in the budget is used by another choice of one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hidet_dist.search import tuning
from hidet_dist.search.budget import filling, optimum
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.budget.state import State
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, Edge, LiveInterval, Problem, evaluate
from hidet_dist.search.steps import STEPS

LAYERS = 60
BYTES = (10, 5, 0)
SECONDS = (1.0, 1.55, 2.0)  # the second choice is never the best one at a price, but half of the first one's bytes
OTHERS = frozenset(name for name, step in STEPS.items() if not step.needed) - {"joining", "filling"}


def layers(budget: int) -> Problem:
    """A chain of equal layers, each with a weight; changing the layout between two layers takes 0.01 s."""
    count = 2 * LAYERS  # layers, then their weights
    cost = [[0.0, 0.0, 0.0]] * LAYERS + [list(SECONDS)] * LAYERS
    memory = [[0, 0, 0]] * LAYERS + [list(BYTES)] * LAYERS
    specs = (0, 1, 2)
    change = tuple(tuple(0.0 if a == b else 0.01 for b in specs) for a in specs)
    fixed = tuple(tuple(0.0 if a == b else 9.0 for b in specs) for a in specs)
    edges = [Edge(n, n, n + 1, specs, specs, change, n + 1, n + 1) for n in range(LAYERS - 1)]
    edges += [Edge(LAYERS + n, LAYERS + n, n, specs, specs, fixed, n, n) for n in range(LAYERS)]
    return Problem(cost, memory, budget, edges, Activations(count, (), {}))


@pytest.mark.parametrize("budget", [205, 305, 439])
def test_one_layer_of_another_kind_takes_the_room_that_is_left(budget: int) -> None:
    problem = layers(budget)
    joined = optimize(problem, SolveOptions(solver_gap=1e-6, without=OTHERS | {"filling"}))
    filled = optimize(problem, SolveOptions(solver_gap=1e-6, without=OTHERS))
    whole, rest = divmod(budget, 10)
    half = rest >= 5
    best = whole * SECONDS[0] + half * SECONDS[1] + (LAYERS - whole - half) * SECONDS[2] + 0.01 * (1 + half)
    assert filled.seconds == pytest.approx(best, rel=1e-9)
    assert joined.seconds > filled.seconds + 0.4
    assert evaluate(problem, filled.choices) == filled.seconds
    assert sum(problem.memory[e][k] for e, k in enumerate(filled.choices)) <= budget
    assert filled.seconds * (1 - filled.gap) <= best * (1 + 1e-9)
    assert "filling" in [step.name for step in filled.steps]


def with_buffer(operator: int, budget: int) -> Problem:
    """Layers of which one has a buffer of 4 bytes while it runs, or does without, which takes 0.05 s."""
    problem = layers(budget)
    cost, memory = [*problem.cost], [*problem.memory]
    cost[operator], memory[operator] = [0.0] * 3 + [0.05] * 3, [0] * 6

    def doubled(edge: Edge) -> Edge:
        produced, consumed = (
            specs * 2 if end == operator else specs
            for end, specs in ((edge.producer, edge.produced), (edge.consumer, edge.consumed))
        )
        return replace(edge, produced=produced, consumed=consumed)

    buffer = LiveInterval(operator, operator, operator, (4, 4, 4, 0, 0, 0))
    activations = replace(problem.activations, intervals=(buffer,))
    return replace(problem, cost=cost, memory=memory, edges=[*map(doubled, problem.edges)], activations=activations)


@pytest.mark.parametrize("places", [1, 2])
def test_a_point_elsewhere_that_a_better_plan_exceeds_is_planned_along(
    monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    """Half a layer more has room if another layer, far away, does without its buffer."""
    monkeypatch.setattr(tuning, "FILLED_PLACES", places)
    monkeypatch.setattr(tuning, "FILLED_WIDTH", 5)
    whole, buffered, budget = 20, 45, 207
    problem = with_buffer(buffered, budget)
    plan = tuple(0 if e % LAYERS < whole else 2 for e in range(2 * LAYERS))
    state = State(problem, SolveOptions(solver_gap=1e-6), [list(range(len(costs))) for costs in problem.cost])
    assert state.record(plan).peak == 10 * whole + 4
    before = state.seconds
    prices = [0.0] * problem.activations.points
    prices[whole] = 0.1
    filling.fill_room(state, prices, (whole,))
    gained = (SECONDS[2] - SECONDS[1]) - 0.01 - 0.05
    assert state.seconds == pytest.approx(before - (gained if places == 2 else 0.0))
    assert max(problem.totals.nbytes(state.best)) <= budget


def test_points_of_windows_are_none_of_the_frontiers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points at which plans of windows exceed the budget would give the whole graph's frontiers too many labels."""
    seen: list[list[int]] = []
    listed: list[list[int]] = []

    def noting(state: State, *_: object) -> None:
        seen.append(list(state.frontier_points))
        state.frontier_points.append(7)

    monkeypatch.setattr(filling, "try_plans_below", noting)
    monkeypatch.setattr(optimum, "search_below_limits", lambda state, *_: listed.append(list(state.frontier_points)))
    optimize(layers(205), SolveOptions(solver_gap=1e-6, without=OTHERS))
    assert seen[0] == [] and seen[1], "windows share theirs"
    assert listed and not any(listed)
