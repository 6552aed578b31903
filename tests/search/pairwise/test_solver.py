"""The pairwise solver against all assignments of small problems, and its promises on larger ones."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import ConfigError, InfeasibleError, ProblemError, SolverError
from hidet_dist.search.pairwise import PairwiseProblem, TooManyEntriesError, solve
from hidet_dist.search.pairwise.problem import FORBIDDEN

ROUNDS = 8


def random_problem(seed: int, nodes: int, edges: int, most: int, limit: float, forbidden: float) -> PairwiseProblem:
    """A problem whose limit is a part of the way from the least to the most bytes of any assignment."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, most + 1, nodes)
    begin = np.concatenate([[0], np.cumsum(sizes)])
    ends = [random.choice(nodes, 2, replace=False) for _ in range(edges)] if nodes > 1 else []
    matrices, starts, size = [], [], 0
    for u, v in ends:
        matrix = random.integers(0, 50, sizes[u] * sizes[v]).astype(float)
        matrix[random.random(len(matrix)) < forbidden] = FORBIDDEN * 10
        matrices.append(matrix)
        starts.append(size)
        size += len(matrix)
    intervals = np.sort(random.integers(0, 12, (nodes, 2)), axis=1)
    problem = PairwiseProblem(
        begin,
        random.integers(0, 50, begin[-1]).astype(float),
        random.integers(0, 20, begin[-1]).astype(float),
        intervals,
        np.array(ends, dtype=np.int64).reshape(-1, 2),
        np.arange(len(ends)),
        np.array(starts, dtype=np.int64),
        np.concatenate([*matrices, np.zeros(0)]),
        math.inf,
    )
    peaks = [problem.peak_of(assignment) for assignment in assignments(problem)]
    bytes_ = min(peaks) + limit * (max(peaks) - min(peaks))
    return PairwiseProblem(**{**vars(problem), "byte_limit": bytes_})


def assignments(problem: PairwiseProblem) -> itertools.product:
    return itertools.product(*(range(size) for size in problem.sizes))


def least_cost(problem: PairwiseProblem) -> float:
    return min(
        (problem.cost_of(one) for one in assignments(problem) if problem.peak_of(one) <= problem.byte_limit),
        default=math.inf,
    )


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 6),
    edges=st.integers(0, 9),
    limit=st.floats(0, 1),
    forbidden=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_solutions_fit_and_no_assignment_undercuts_the_bound(seed, nodes, edges, limit, forbidden):
    problem = random_problem(seed, nodes, edges, 3, limit, forbidden)
    least = least_cost(problem)
    try:
        found = solve(problem, rounds=ROUNDS)
    except InfeasibleError:
        assert least >= FORBIDDEN
        return
    except SolverError:  # nothing found in these rounds, which says nothing of what there is
        return
    assert problem.peak_of(found.assignment) <= problem.byte_limit
    assert found.cost == problem.cost_of(found.assignment) >= least
    assert found.bound <= least * (1 + 1e-12)


def test_nearly_all_small_problems_are_solved_exactly():
    """With the rounds and the seed given, what the search finds is always the same, and branch and bound proves it."""
    exact = proven = possible = 0
    for seed in range(100):
        problem = random_problem(seed, 2 + seed % 5, seed % 9, 3, (seed % 7) / 7, (seed % 3) / 5)
        least = least_cost(problem)
        if least < FORBIDDEN:
            found = solve(problem, rounds=ROUNDS)
            possible += 1
            exact += found.cost == least
            proven += found.gap <= 1e-8
    assert possible >= 60
    assert exact == possible
    assert proven >= 0.95 * possible


def test_a_chain_without_a_limit_is_proven_optimal_at_once():
    """Messages are exact on trees."""
    size, nodes = 4, 300
    random = np.random.default_rng(5)
    matrices = random.integers(0, 1000, (nodes - 1) * size * size).astype(float)
    cost = random.integers(0, 1000, nodes * size).astype(float)
    problem = PairwiseProblem(
        np.arange(nodes + 1) * size,
        cost,
        np.zeros(nodes * size),
        np.zeros((nodes, 2)),
        np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1),
        np.arange(nodes - 1),
        np.arange(nodes - 1) * size * size,
        matrices,
        0.0,
    )
    best = cost[:size]
    for node in range(1, nodes):
        table = matrices[(node - 1) * size * size : node * size * size].reshape(size, size)
        best = (best[:, None] + table).min(axis=0) + cost[node * size : (node + 1) * size]
    found = solve(problem, rounds=1)
    assert found.cost == best.min()
    assert found.gap <= 1e-8


def test_nodes_that_others_determine_are_merged_with_their_bytes():
    """A ring of nodes whose neighbours must take equal strategies, but for one shift: only two strategies remain."""
    nodes, size = 12, 4
    equal = np.where(np.eye(size, dtype=bool), 0.0, FORBIDDEN)
    halves = np.where(np.arange(size)[:, None] % 2 == np.arange(size) % 2, 1.0, FORBIDDEN)
    cost = np.tile(np.array([7.0, 1.0, 2.0, 3.0]), nodes)
    nbytes = np.tile(np.array([1.0, 9.0, 2.0, 3.0]), nodes)
    ends = np.array([[node, (node + 1) % nodes] for node in range(nodes)] + [[0, 6]])
    matrices = np.concatenate([equal.ravel(), halves.ravel()])
    problem = PairwiseProblem(
        np.arange(nodes + 1) * size,
        cost,
        nbytes,
        np.array([[node, node + 2] for node in range(nodes)]),
        ends,
        np.array([0] * nodes + [1]),
        np.array([0, size * size]),
        matrices,
        5.0,
    )
    found = solve(problem, rounds=1)
    assert found.assignment.tolist() == [2] * nodes
    assert found.cost == 2 * nodes + 1
    assert found.gap <= 1e-8
    within = solve(PairwiseProblem(**{**vars(problem), "byte_limit": 2.0}), rounds=1)
    assert (within.assignment.tolist(), within.cost) == ([0] * nodes, 7 * nodes + 1)
    unequal = np.roll(equal, 1, axis=0)
    around = PairwiseProblem(
        **{**vars(problem), "edge_matrix": np.arange(nodes + 1) == 3, "entries": np.concatenate([equal, unequal], None)}
    )
    with pytest.raises(InfeasibleError):
        solve(around, rounds=1)


def grid_of_parallel_parts(seed: int, rows: int = 4, columns: int = 5) -> PairwiseProblem:
    """A ladder of nodes with branches of one and two neighbours, most of which hold no bytes at points that bind."""
    random = np.random.default_rng(seed)
    ends = [(r * columns + c, r * columns + c + 1) for r in range(rows) for c in range(columns - 1)]
    ends += [(r * columns, (r + 1) * columns + random.integers(columns)) for r in range(rows - 1)]
    ends += [(columns - 1, rows * columns - 1), (0, 2)]
    nodes = rows * columns
    sizes = random.integers(2, 4, nodes)
    starts = np.concatenate([[0], np.cumsum([sizes[u] * sizes[v] for u, v in ends])])
    nbytes = [random.integers(0, 20, size) if node % 3 == 0 else np.zeros(size) for node, size in enumerate(sizes)]
    begin = random.integers(0, 6, nodes)
    return PairwiseProblem(
        np.concatenate([[0], np.cumsum(sizes)]),
        random.integers(0, 50, sizes.sum()),
        np.concatenate(nbytes),
        np.stack([begin, begin + random.integers(1, 6, nodes)], axis=1),
        np.array(ends),
        np.arange(len(ends)),
        starts[:-1],
        random.integers(0, 50, starts[-1]),
        math.inf,
    )


def least_by_dynamic_programming(problem: PairwiseProblem) -> float:
    """The least cost within the limit: partial assignments, node by node, that no other one undercuts in all respects.

    Two partial assignments compare if they agree on the nodes that have edges to later ones; bytes count at each point.
    """
    points = int(problem.interval.max())
    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(problem.nodes)]
    last = np.arange(problem.nodes)
    for edge, (u, v) in enumerate(problem.edge_nodes):
        neighbours[max(u, v)].append((edge, int(min(u, v))))
        last[min(u, v)] = max(last[min(u, v)], u, v)
    partial = {(): [(0.0, np.zeros(points))]}
    open_nodes: tuple[int, ...] = ()
    for node in range(problem.nodes):
        stays = tuple(one for one in (*open_nodes, node) if last[one] > node)
        following: dict[tuple[int, ...], list[tuple[float, np.ndarray]]] = {}
        for key, labels in partial.items():
            taken = dict(zip(open_nodes, key, strict=True))
            for strategy in range(problem.sizes[node]):
                taken[node] = strategy
                cost = problem.cost[problem.strategy_begin[node] + strategy]
                for edge, other in neighbours[node]:
                    u, v = problem.edge_nodes[edge]
                    begin = problem.matrix_begin[problem.edge_matrix[edge]]
                    cost += problem.entries[begin + taken[int(u)] * problem.sizes[v] + taken[int(v)]]
                    assert other in taken
                held = np.zeros(points)
                held[slice(*problem.interval[node])] = problem.nbytes[problem.strategy_begin[node] + strategy]
                kept = following.setdefault(tuple(taken[one] for one in stays), [])
                for before, bytes_before in labels:
                    sum_, profile = before + cost, bytes_before + held
                    if profile.max() > problem.byte_limit:
                        continue
                    if any(c <= sum_ and (b <= profile).all() for c, b in kept):
                        continue
                    kept[:] = [(c, b) for c, b in kept if not (sum_ <= c and (profile <= b).all())]
                    kept.append((sum_, profile))
        partial, open_nodes = following, stays
    return min((cost for labels in partial.values() for cost, _ in labels), default=math.inf)


@pytest.mark.parametrize("limit", [40.0, 50.0, 70.0, 1000.0])
@pytest.mark.parametrize("seed", range(4))
def test_eliminated_nodes_and_points_without_use_leave_the_optimum(seed, limit):
    """Twenty nodes, of which most have two neighbours and no bytes; the limit binds at few points or at none."""
    problem = PairwiseProblem(**{**vars(grid_of_parallel_parts(seed)), "byte_limit": limit})
    least = least_by_dynamic_programming(problem)
    if least == math.inf:
        with pytest.raises(SolverError):
            solve(problem, rounds=ROUNDS)
        return
    found = solve(problem, rounds=60)
    assert problem.peak_of(found.assignment) <= limit
    assert found.cost == problem.cost_of(found.assignment) == least
    assert found.gap <= 1e-8


@pytest.mark.parametrize("ratio", [1.0, 1.2, 2.0])
def test_nodes_are_merged_and_eliminated_only_as_far_as_their_matrices_fit(ratio):
    problem = PairwiseProblem(**{**vars(grid_of_parallel_parts(1)), "byte_limit": 70.0})
    found = solve(problem, rounds=200, entries=int(ratio * len(problem.entries)))
    assert found.cost == problem.cost_of(found.assignment) == least_by_dynamic_programming(problem)
    assert problem.peak_of(found.assignment) <= 70.0
    with pytest.raises(TooManyEntriesError, match="too large for 1 entries"):
        solve(problem, rounds=1, entries=1)


def test_the_time_may_be_over_before_a_problem_is_reduced():
    with pytest.raises(SolverError, match="and 0 rounds"):
        solve(grid_of_parallel_parts(1), seconds=1e-12)


def test_memory_is_traded_where_it_is_cheapest():
    """Of ten nodes alive at once, each saves 1 byte for its number in cost; the limit asks for four of them."""
    nodes = 10
    problem = PairwiseProblem(
        np.arange(nodes + 1) * 2,
        np.array([[0, node] for node in range(nodes)], dtype=float),
        np.array([[1, 0]] * nodes, dtype=float),
        np.array([[0, 1]] * nodes),
        np.zeros((0, 2)),
        np.zeros(0),
        np.zeros(0),
        np.zeros(0),
        6.0,
    )
    found = solve(problem, rounds=20)
    assert found.cost == 0 + 1 + 2 + 3
    assert found.assignment.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert found.bound <= 6


def test_the_same_rounds_and_seed_give_the_same_solution():
    problem = random_problem(3, 7, 12, 4, 0.3, 0.0)
    first, second = (solve(problem, rounds=3, gap=-1.0, seed=11, threads=threads) for threads in (1, 2))
    assert (first.cost, first.bound, first.rounds) == (second.cost, second.bound, second.rounds)
    assert first.assignment.tolist() == second.assignment.tolist()
    assert first.rounds == 3


def test_seconds_of_cpu_time_end_the_search():
    problem = random_problem(3, 7, 12, 4, 0.3, 0.0)
    begin = time.process_time()
    assert solve(problem, 0.2, gap=-1.0, clock="cpu").seconds >= 0.2
    assert time.process_time() - begin >= 0.2


def test_incumbents_improve_and_an_exception_from_them_ends_the_search():
    problem = random_problem(4, 7, 10, 4, 0.4, 0.0)
    seen: list[tuple[float, float, float]] = []
    found = solve(problem, rounds=4, gap=-1.0, on_incumbent=lambda *one: seen.append(one))
    costs, bounds = [cost for _, cost, _ in seen], [bound for _, _, bound in seen]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert costs[-1] == found.cost

    class Stop(Exception):
        pass

    def stop(*_: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        solve(problem, rounds=10**6, gap=-1.0, on_incumbent=stop)


def test_what_cannot_be_is_said():
    free = random_problem(1, 3, 2, 2, 1.0, 0.0)
    barred = PairwiseProblem(**{**vars(free), "entries": np.full(len(free.entries), FORBIDDEN)})
    with pytest.raises(InfeasibleError, match="leave no assignment"):
        solve(barred, rounds=1)
    alive = PairwiseProblem([0, 1], [1.0], [5.0], [[0, 1]], np.zeros((0, 2)), [], [], [], 4.0)
    with pytest.raises(SolverError, match="within 4 bytes"):
        solve(alive, rounds=2)
    with pytest.raises(ConfigError, match="when to stop"):
        solve(free)
    for limits in (
        {"seconds": 0.0},
        {"seconds": math.inf},
        {"rounds": 0},
        {"seconds": 1.0, "clock": "sun"},
        {"rounds": 1, "threads": 3},
    ):
        with pytest.raises(ConfigError):
            solve(free, **limits)


def test_large_costs_are_allowed_as_long_as_no_assignment_reaches_what_is_forbidden():
    """Each edge counts with its own greatest entry, not with that of all."""
    nodes = 400
    matrices = np.full(nodes - 1, 1.0)
    matrices[0] = FORBIDDEN / 200
    problem = PairwiseProblem(
        np.arange(nodes + 1),
        np.zeros(nodes),
        np.zeros(nodes),
        np.zeros((nodes, 2)),
        np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1),
        np.arange(nodes - 1),
        np.arange(nodes - 1),
        matrices,
        0.0,
    )
    assert solve(problem, rounds=1).cost == FORBIDDEN / 200 + nodes - 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy_begin": [0, 0, 2]}, "Node 0 has no strategy"),
        ({"cost": [1.0, -1.0]}, "Strategy 0 of node 1 has the cost -1.0"),
        ({"cost": [1.0, math.nan]}, "node 1 has the cost nan"),
        ({"nbytes": [1.0]}, "a cost and a number of bytes for each"),
        ({"edge_nodes": [[0, 2]]}, r"Edge 0 joins \[0, 2\], of 2 nodes"),
        ({"edge_nodes": [[1, 1]]}, "joins node 1 with itself"),
        ({"edge_matrix": [1]}, "outside the 1 matrices"),
        ({"matrix_begin": [1]}, "matrix of edge 0 lacks entries"),
        ({"entries": [-2.0]}, "Entry 0 of the matrices is -2.0"),
        ({"entries": [FORBIDDEN * 0.99], "cost": [FORBIDDEN * 0.5, 1.0]}, "must stay below"),
        ({"byte_limit": -1.0}, "0 bytes or more"),
        ({"byte_limit": math.nan}, "0 bytes or more"),
    ],
)
def test_arrays_that_contradict_one_another_are_refused(change, message):
    good = {
        "strategy_begin": [0, 1, 2],
        "cost": [1.0, 2.0],
        "nbytes": [1.0, 1.0],
        "interval": [[0, 1], [0, 1]],
        "edge_nodes": [[0, 1]],
        "edge_matrix": [0],
        "matrix_begin": [0],
        "entries": [3.0],
        "byte_limit": 2.0,
    }
    assert solve(PairwiseProblem(**good), rounds=1).cost == 6.0
    with pytest.raises(ProblemError, match=message):
        PairwiseProblem(**{**good, **change})
