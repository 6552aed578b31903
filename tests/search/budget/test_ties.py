"""Of plans that cost the same, the one with fewer collectives is taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import hidet
import pytest
from hidet import ops
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, Problem, evaluate, held_bytes, readers
from hidet_dist.search.problem.descent import descend
from hidet_dist.spec import DeviceMesh
from hidet_dist.weights import weight

SPECS = 3


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Chains and branches of entities whose choices and conversions cost whole seconds, so that many plans tie."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    seconds, count = st.integers(1, 3).map(float), st.integers(0, 2)
    cost = [draw(st.lists(seconds, min_size=n, max_size=n)) for n in sizes]
    edges, tensors = [], {}
    for tensor in range(draw(st.integers(1, 4))):
        producer = draw(st.integers(0, len(sizes) - 2))
        spec = st.integers(0, SPECS - 1)
        convert = tuple(tuple(0.0 if s == d else draw(seconds) for d in range(SPECS)) for s in range(SPECS))
        counts = tuple(tuple(0 if s == d else draw(count) for d in range(SPECS)) for s in range(SPECS))
        produced = tuple(draw(spec) for _ in range(sizes[producer]))
        for _ in range(draw(st.integers(1, 2))):
            consumer = draw(st.integers(producer + 1, len(sizes) - 1))
            consumed = tuple(draw(spec) for _ in range(sizes[consumer]))
            edges.append(Edge(tensor, producer, consumer, produced, consumed, convert, consumer, consumer, counts))
        nbytes = tuple(draw(st.integers(0, 9)) for _ in range(SPECS))
        tensors[tensor] = ConvertedTensor(tuple(range(SPECS)), nbytes, lambda: [[0] * SPECS] * SPECS)
    collectives = [draw(st.lists(count, min_size=n, max_size=n)) for n in sizes]
    memory = [[0] * n for n in sizes]
    return Problem(cost, memory, 10**6, edges, Activations(len(sizes), (), tensors), collectives)


def every_plan(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(costs)) for costs in problem.cost)))


def collectives(problem: Problem, choices: Sequence[int]) -> int:
    count = sum(own[k] for own, k in zip(problem.collectives, choices, strict=True))
    paid = {
        (edge.tensor, edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]): edge
        for edge in problem.edges
    }
    return count + sum(edge.collectives[s][d] for (_, s, d), edge in paid.items())


@settings(max_examples=40, deadline=None)
@given(problems())
def test_of_the_plans_of_least_cost_one_with_the_fewest_collectives_is_found(problem: Problem) -> None:
    found = optimize(problem, SolveOptions(solver_gap=1e-3))
    ranked = [(evaluate(problem, plan), collectives(problem, plan)) for plan in every_plan(problem)]
    assert (evaluate(problem, found.choices), collectives(problem, found.choices)) == min(ranked)
    # The charges for collectives are in neither the cost nor the bound.
    assert found.seconds == min(ranked)[0]
    assert found.seconds * (1 - found.gap) <= min(ranked)[0]
    assert found.gap <= 1e-3


@settings(max_examples=40, deadline=None)
@given(problems(), st.data())
def test_a_descent_ends_where_no_single_change_is_better(problem: Problem, data: st.DataObject) -> None:
    groups = readers(problem)

    def peak(plan: Sequence[int]) -> int:
        return max(held_bytes(problem, groups, plan))

    start = data.draw(st.sampled_from(every_plan(problem)))
    tight = replace(problem, budget=peak(start) + data.draw(st.integers(0, 9)))
    end = descend(tight, groups, start, Limits())
    assert evaluate(problem, end) <= evaluate(problem, start)
    assert peak(end) <= tight.budget
    end = descend(problem, groups, start, Limits())
    converted = {
        entity
        for edge in problem.edges
        if edge.convert[edge.produced[end[edge.producer]]][edge.consumed[end[edge.consumer]]]
        for entity in (edge.producer, edge.consumer)
    }
    for entity in converted:
        for k in range(len(problem.cost[entity])):
            assert evaluate(problem, (*end[:entity], k, *end[entity + 1 :])) >= evaluate(problem, end)


@pytest.mark.parametrize("machine", ["cpu", "dgx-h100"])
def test_a_partial_output_is_all_reduced_where_its_halves_cost_the_same(machine: str) -> None:
    x = hidet.symbol([8, 256], "float32", "cpu")
    y = ops.matmul(ops.relu(ops.matmul(x, weight("up", [256, 1024]))), weight("down", [1024, 256]))
    graph = normalize(hidet.trace_from(y, [x]))
    plan = search(graph, builtin(machine, DeviceMesh((2,))), mem_budget=1_200_000, report=False).plan
    assert plan.collectives() == {"all_reduce": 1}


def test_the_halves_are_taken_where_they_save_memory() -> None:
    x = hidet.symbol([4096, 256], "float32", "cpu")
    y = ops.matmul(ops.relu(ops.matmul(x, weight("up", [256, 256]))), weight("down", [256, 256]))
    y = ops.matmul(ops.layer_norm(y), weight("out", [256, 8]))
    graph, cluster = normalize(hidet.trace_from(y, [x])), builtin("dgx-h100", DeviceMesh((2,)))
    pins = {"up": "(R, S0)", "down": "(S0, R)", "op:Matmul#1": "?, (S0, R) -> ?", "op:Matmul#0": "?, (R, S0) -> ?"}
    with pytest.raises(InfeasibleError) as error:
        search(graph, cluster, mem_budget=1, pins=pins, report=False)
    plan = search(graph, cluster, mem_budget=error.value.least_budget, pins=pins, report=False).plan
    assert "reduce_scatter" in plan.collectives()
