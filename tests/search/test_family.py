"""Several graphs, one layout of the weights that they share."""

from __future__ import annotations

import itertools
import math

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist import validate_plan
from hidet_dist.api import search_family
from hidet_dist.errors import ConfigError, InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs
from hidet_dist.spec import DeviceMesh, TensorShardSpec

HIDDEN, INNER = 32, 128
LAYOUTS = ("(R, R)", "(S0, R)", "(R, S0)")


class Block:
    """The feed-forward half of a GPT's layer, with weights for graphs of any number of tokens."""

    def __init__(self) -> None:
        self.weights = {
            "norm": hidet.randn([HIDDEN], device="cpu"),
            "up": hidet.randn([HIDDEN, INNER], device="cpu"),
            "down": hidet.randn([INNER, HIDDEN], device="cpu"),
        }

    def graph(self, tokens: int) -> hidet.FlowGraph:
        x = hidet.symbol([tokens, HIDDEN], "float32", "cpu")
        y = ops.layer_norm(x) * self.weights["norm"]
        y = x + ops.matmul(ops.gelu(ops.matmul(y, self.weights["up"])), self.weights["down"])
        return normalize(hidet.trace_from(y, [x]))


def layout(norm: str, up: str, down: str) -> dict[str, TensorShardSpec]:
    return {n: TensorShardSpec.parse(s) for n, s in (("norm", norm), ("up", up), ("down", down))}


@pytest.mark.parametrize(
    ("sizes", "decodes", "fraction"),
    [((2048, 4), 1.0, 99.0), pytest.param((2048, 4), 50.0, 99.0, marks=pytest.mark.slow), ((8, 1), 9.0, 0.9)],
)
def test_the_family_optimum_is_that_of_all_layouts(sizes: tuple[int, int], decodes: float, fraction: float) -> None:
    """Prefill and decode of a block: as good as the best of all layouts, and as either graph's own for both."""
    block = Block()
    graphs = [block.graph(tokens) for tokens in sizes]
    weights = [1.0, decodes]
    cluster = builtin("cpu", DeviceMesh((2,)))
    budget = int(fraction * sum(int(w.nbytes) for w in block.weights.values()))
    family = search_family(graphs, cluster, weights, mem_budget=budget, names=block.weights, solver_gap=1e-6)

    def seconds(pins: dict[str, TensorShardSpec]) -> float:
        try:
            plans = [
                search(g, cluster, mem_budget=budget, solver_gap=1e-6, pins=pins, names=block.weights, report=False)
                for g in graphs
            ]
        except InfeasibleError:
            return math.inf
        return sum(w * result.plan.seconds for w, result in zip(weights, plans, strict=True))

    each = [seconds(layout(*own)) for own in itertools.product(("(R)", "(S0)"), LAYOUTS, LAYOUTS)]
    assert family.seconds == pytest.approx(min(each), rel=1e-5)
    assert family.seconds == pytest.approx(sum(w * p.seconds for w, p in zip(weights, family.plans, strict=True)))
    assert family.plans[0].param_specs == family.plans[1].param_specs == family.param_specs
    for graph in graphs:
        own = search(
            graph, cluster, mem_budget=budget, solver_gap=1e-6, names=block.weights, report=False
        ).plan.param_specs
        assert family.seconds <= seconds(own) * (1 + 1e-6)
    assert family.bound_seconds <= family.seconds * (1 + 1e-9)


def test_every_plan_of_a_family_computes_its_graph() -> None:
    block = Block()
    graphs = [block.graph(64), block.graph(2)]
    cluster = builtin("dgx-a100", DeviceMesh((2, 2)))
    pins = {"up": "(R, S1)"}
    family = search_family(graphs, cluster, names=block.weights, pins=[pins, None])
    assert {str(plan.param_specs["up"]) for plan in family.plans} == {"(R, S1)"}
    for graph, plan in zip(graphs, family.plans, strict=True):
        validate_plan(plan, graph)
        inputs = graph_inputs(graph, np.random.default_rng(0))
        assert check_stage(graph, plan.stages[0], inputs, evaluate_graph(graph, inputs)) == ""


def test_shared_weights_are_held_once() -> None:
    """By the same tensor or the same name; weights of other names are held beside each other."""
    block, other = Block(), Block()
    cluster = builtin("dgx-a100", DeviceMesh((2,)))
    whole = sum(int(w.nbytes) for w in block.weights.values())
    room = whole * 3 // 4
    pair = [block.graph(2), other.graph(1)]
    search_family([block.graph(2), block.graph(1)], cluster, mem_budget=room)
    named = search_family(pair, cluster, mem_budget=room, names=[block.weights, other.weights])
    assert named.plans[0].param_specs == named.plans[1].param_specs
    with pytest.raises(InfeasibleError):
        search_family(pair, cluster, mem_budget=room)


def test_arguments_that_do_not_fit_are_refused() -> None:
    block = Block()
    graphs = [block.graph(8), block.graph(2)]
    cluster = builtin("cpu", DeviceMesh((2,)))
    for weights in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ConfigError, match="number above 0 for each of the 2 graphs"):
            search_family(graphs, cluster, weights)
    with pytest.raises(ConfigError, match="at least one graph"):
        search_family([], cluster)
    with pytest.raises(ConfigError, match="entry for each of the 2 graphs"):
        search_family(graphs, cluster, pins=[None])
    with pytest.raises(ConfigError, match=r"w1 = \(R, S0\) of graph 0 and w1 = \(S0, R\) of graph 1 contradict"):
        search_family(graphs, cluster, pins=[{"w1": "(R, S0)"}, {"w1": "(S0, R)"}])
    small = {"norm": hidet.randn([HIDDEN // 2], device="cpu")}
    x = hidet.symbol([2, HIDDEN // 2], "float32", "cpu")
    odd = normalize(hidet.trace_from(x * small["norm"], [x]))
    with pytest.raises(ConfigError, match=r"float32\[32\] .* float32\[16\]"):
        search_family([graphs[0], odd], cluster, names=[block.weights, small])
