"""Plans of real graphs against all choices there are, against a search that looks nothing up, and against experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import hidet
import pytest
from hidet import ops
from hidet.graph import FlowGraph

from hidet_dist.cost.model import PredictedCost
from hidet_dist.machine import Cluster, builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import SearchOptions, search
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.elimination.eliminate import Tables, eliminate
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.formulation.formulate import formulate
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import Pins
from hidet_dist.search.ilp import solve
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Edge, Problem, evaluate, held_bytes, readers
from hidet_dist.search.problem.prices import Prices
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

GAP = 1e-6
ROUNDING = 1e-12  # relative, of sums in another order


def mlp() -> FlowGraph:
    """Linear, ReLU, linear: 3 operators."""
    x = hidet.symbol([8192, 1024], "float16", "cpu")
    y = ops.relu(ops.matmul(x, weight("up", [1024, 4096], "float16")))
    return normalize(hidet.trace_from(ops.matmul(y, weight("down", [4096, 1024], "float16")), [x]))


def residual(hidden: int = 1024, layers: int = 1) -> FlowGraph:
    """A GPT's norm, linear, GELU, linear with biases, and the residual around them: 9 operators a layer."""
    x = y = hidet.symbol([8, 128, hidden], "float16", "cpu")
    for number in range(layers):

        def own(name: str, *shape: int, number: int = number) -> hidet.Tensor:
            return weight(f"{number}.{name}", list(shape), "float16")

        z = ops.layer_norm(y) * own("norm.weight", hidden) + own("norm.bias", hidden)
        z = ops.gelu(ops.matmul(z, own("up", hidden, 4 * hidden)) + own("up.bias", 4 * hidden))
        y = y + ops.matmul(z, own("down", 4 * hidden, hidden)) + own("down.bias", hidden)
    return normalize(hidet.trace_from(y, [x]))


def attention() -> FlowGraph:
    """One head: three matrices read the input, the keys are transposed, and the scores are normalised; 7 operators."""
    hidden = 512
    x = hidet.symbol([4096, hidden], "float16", "cpu")
    query, key, value = (ops.matmul(x, weight(name, [hidden, hidden], "float16")) for name in ("q", "k", "v"))
    scores = ops.softmax(ops.matmul(query, ops.permute_dims(key, [1, 0])), axis=-1)
    return normalize(hidet.trace_from(ops.matmul(scores, value), [x]))


def stated(graph: FlowGraph, cluster: Cluster) -> Problem:
    view = GraphView(graph)
    pins = Pins(view, cluster.mesh, (), {})
    return formulate(view, cluster, PredictedCost(cluster), SearchOptions(), pins).problem


def least_of_all(problem: Problem, most: float) -> float:
    """The least seconds of all choices that fit the budget; branches that cost more than ``most`` are not followed."""
    into: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        into.setdefault(edge.consumer, []).append(edge)
    order: dict[int, None] = {}

    def place(entity: int) -> None:
        for edge in into.get(entity, []):
            if edge.producer not in order:
                place(edge.producer)
        order.setdefault(entity)

    for entity in range(len(problem.cost)):
        if entity not in order:
            place(entity)
    entities, groups, picks = list(order), readers(problem), [0] * len(order)
    to_go = [sum(min(problem.cost[entity]) for entity in entities[n:]) for n in range(len(entities) + 1)]
    best = math.inf

    def follow(n: int, seconds: float, paid: frozenset[tuple[int, int]]) -> None:
        nonlocal best
        if seconds + to_go[n] > min(best, most) * (1 + ROUNDING):
            return
        if n == len(entities):
            if max(held_bytes(problem, groups, picks)) <= problem.budget:
                best = min(best, evaluate(problem, picks))
            return
        entity = entities[n]
        for k, cost in enumerate(problem.cost[entity]):
            picks[entity] = k
            now, more = seconds + cost, set()
            for edge in into.get(entity, []):
                wish = edge.consumed[k]
                if (edge.tensor, wish) not in paid and (edge.tensor, wish) not in more:
                    more.add((edge.tensor, wish))
                    now += edge.convert[edge.produced[picks[edge.producer]]][wish]
            follow(n + 1, now, paid | more)

    follow(0, 0.0, frozenset())
    return best


@pytest.mark.parametrize(
    ("build", "mesh"), [(mlp, (2, 2)), (residual, (2,)), (attention, (2,))], ids=["mlp", "residual", "attention"]
)
def test_the_plan_is_the_best_of_all_choices(build: Callable[[], FlowGraph], mesh: tuple[int, ...]) -> None:
    graph, cluster = build(), builtin("dgx-a100", DeviceMesh(mesh))
    assert len(GraphView(graph).operators) <= 12
    problem = stated(graph, cluster)
    found = search(graph, cluster, solver_gap=GAP, report=False, overlap=False)
    assert found.plan.seconds == pytest.approx(least_of_all(problem, found.plan.seconds), rel=GAP)
    # One byte less than this plan holds at its worst moment; what it holds throughout is less than that.
    budget = max(live_bytes(GraphView(graph), found.plan.stages[0])) - 1
    assert found.plan.stages[0].weight_bytes_per_device < budget
    # The least sum, not the least makespan.
    tight = search(graph, cluster, mem_budget=budget, solver_gap=GAP, report=False, overlap=False)
    assert max(live_bytes(GraphView(graph), tight.plan.stages[0])) <= budget
    assert tight.plan.seconds > found.plan.seconds
    least = least_of_all(replace(problem, budget=budget), tight.plan.seconds)
    assert tight.plan.seconds == pytest.approx(least, rel=GAP)
    assert tight.bound_seconds <= least * (1 + ROUNDING)


def test_the_integer_program_finds_no_better_plan_of_equal_layers() -> None:
    problem = stated(residual(layers=3), builtin("dgx-a100", DeviceMesh((2,))))
    free = optimize(problem, SolveOptions(solver_gap=GAP))
    assert free.seconds == pytest.approx(solve(problem, SolveOptions(solver_gap=GAP)).seconds, rel=2 * GAP)
    assert (
        free.seconds
        == eliminate(
            EliminationInstance(problem, [list(range(len(c))) for c in problem.cost], Tables(), Prices([0]))
        ).seconds
    )
    budget = int(0.8 * max(held_bytes(problem, readers(problem), free.choices)))
    tight = replace(problem, budget=budget)
    assert optimize(tight, SolveOptions(solver_gap=1e-3)).seconds == pytest.approx(solve(tight).seconds, rel=2e-3)


COLUMNS, ROWS = "(R, S0)", "(S0, R)"
MEGATRON = {"query": COLUMNS, "key": COLUMNS, "value": COLUMNS, "out": ROWS, "up": COLUMNS, "down": ROWS}


@pytest.mark.parametrize("expert", ["megatron", "data_parallel", "fsdp"])
def test_no_expert_is_better_in_the_memory_it_takes(expert: str) -> None:
    config = shapes.GPTConfig(layers=1, hidden=256, heads=4, vocabulary=1000, batch=8, sequence=64)
    graph, cluster = normalize(shapes.gpt(config)), builtin("dgx-a100", DeviceMesh((2,)))
    view = GraphView(graph)
    if expert == "megatron":
        pins = {f"layers.0.{name}.weight": spec for name, spec in MEGATRON.items()}
    else:
        first = "S0" if expert == "fsdp" else "R"
        pins = {name: f"({', '.join([first, *['R'] * (len(view.shape(name)) - 1)])})" for name in view.weights}
    theirs = search(graph, cluster, solver_gap=GAP, pins=pins, report=False).plan
    budget = max(live_bytes(view, theirs.stages[0]))
    ours = search(graph, cluster, mem_budget=budget, report=False)
    assert ours.bound_seconds <= ours.plan.seconds <= theirs.seconds * (1 + 1e-3)
