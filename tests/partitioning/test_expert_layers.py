"""Layers of experts: split by experts alone, with and without the dispatch of tokens."""

from __future__ import annotations

import math

import hidet
import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist import operators
from hidet_dist.cost.dispatch import wanted_share
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.normalize.expert_layers import join_expert_layers
from hidet_dist.operators.expert_layers import ExpertLayerOp
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.rules.rule import derive
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program
from hidet_dist.spec import DeviceMesh, OpShardSpec, OpSpecPattern, Plan
from hidet_dist.spec.collectives import ALL_GATHER, REDUCE_SCATTER
from hidet_dist.testing.expert_layers import COLUMNS, INNER, SIZE, expert_layer, layer_of


def kinds(graph):
    return [type(op) for op in graph.nodes]


@pytest.mark.parametrize(
    "case", [{}, {"gated": False}, {"biased": True}, {"transposed": True}, {"choices": 1}], ids=str
)
def test_every_choice_of_a_layer_computes_what_its_products_do(case):
    graph, inputs = expert_layer(**case)
    (want,) = evaluate_graph(graph, inputs)
    normal = join_expert_layers(normalize(graph))
    assert sum(kind is ExpertLayerOp for kind in kinds(normal)) == 1
    assert ExpertProductOp not in kinds(normal)
    place, op = layer_of(normal)
    for mesh in (DeviceMesh((2,)), DeviceMesh((2, 2))):
        choices = derive(op).choices(mesh)
        assert {choice.spec.dispatch is None for choice in choices} == {True, False}
        dispatched = [choice for choice in choices if choice.spec.dispatch is not None]
        others = [choice for choice in choices if choice.spec.dispatch is None]
        for choice in (*dispatched, *others) if mesh.ndim == 1 else dispatched[::3]:
            assert OpShardSpec.parse(str(choice.spec)) == choice.spec
            pins = {f"op:{place}": str(OpSpecPattern.of(choice.spec))}
            plan = hidet_dist.make_plan(graph, {"mesh_shape": list(mesh.shape)}, {"pins": pins, "experts": "joined"})
            assert Plan.from_json(plan.to_json()) == plan
            spec = plan.stages[0].operators[place].spec
            assert (spec.in_specs, spec.dispatch) == (choice.spec.in_specs, choice.spec.dispatch)
            program = hidet_dist.partition(graph, plan)
            assert ExpertLayerOp not in kinds(program.graph)
            (output,) = plan.stages[0].outputs
            for rank, (y,) in enumerate(evaluate_program(program, inputs)):
                part = want[output.spec.slices(want.shape, mesh, mesh.coordinate(rank))]
                np.testing.assert_allclose(y, part, rtol=1e-6, atol=1e-9)


def test_the_padding_of_a_layer_changes_nothing():
    """Three devices divide neither the experts nor what an expert computes."""
    graph, inputs = expert_layer(experts=5, biased=True)
    (want,) = evaluate_graph(graph, inputs)
    mesh = DeviceMesh((3,))
    place, op = next(
        (n, op) for n, op in enumerate(join_expert_layers(normalize(graph)).nodes) if isinstance(op, ExpertLayerOp)
    )
    for choice in derive(op).choices(mesh):
        pins = {f"op:{place}": str(OpSpecPattern.of(choice.spec))}
        plan = hidet_dist.make_plan(graph, {"mesh_shape": [3]}, {"pins": pins, "experts": "joined"})
        (output,) = plan.stages[0].outputs
        for rank, (y,) in enumerate(evaluate_program(hidet_dist.partition(graph, plan), inputs)):
            part = want[output.spec.slices(want.shape, mesh, mesh.coordinate(rank))]
            np.testing.assert_allclose(y, part, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_number_of_tokens_may_be_symbolic(ranks):
    tokens = hidet.symbol_var("tokens")
    x, scales = hidet.symbol([tokens, SIZE]), hidet.symbol([tokens, 2])
    chosen = hidet.symbol([tokens, 2], "int32")
    up, down = (hidet.from_torch(torch.randn(6, *shape)) for shape in ((SIZE, INNER), (INNER, COLUMNS)))
    hidden = hidet.ops.silu(operators.expert_product(x, up, chosen))
    graph = hidet.trace_from(operators.expert_product(hidden, down, chosen, scales), [x, chosen, scales])
    dispatched = {"op:ExpertLayer": "(S0, R), (S0), (S0, R), (S0, R, R), (S0, R), (S0, R, R) -> (S0, R)"}
    sizes = {"tokens": {"expected": 12, "multiple_of": 6}}
    options = {"experts": "joined", "pins": dispatched, "symbols": sizes}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [ranks]}, options)
    assert plan.stages[0].operators[0].spec.dispatch is not None
    program = hidet_dist.partition(graph, plan)
    for count in (6, 18):
        generator = np.random.default_rng(count)
        choices = np.stack([generator.permutation(6)[:2] for _ in range(count)])
        inputs = generator.standard_normal((count, SIZE)), choices, generator.random((count, 2))
        (want,) = evaluate_graph(graph, inputs)
        (output,) = plan.stages[0].outputs
        for rank, (y,) in enumerate(evaluate_program(program, inputs)):
            part = want[output.spec.slices(want.shape, program.mesh, program.mesh.coordinate(rank))]
            np.testing.assert_allclose(y, part, rtol=1e-6, atol=1e-9)


def test_experts_are_not_split_unequally():
    """Kernels need the numbers of experts as numbers: a part that differs from device to device is none."""
    graph, _ = expert_layer(experts=5)
    split = {"op:ExpertLayer": "?, (S0[3,2]), ?, ?, ?, ?, ? -> ?"}
    with pytest.raises(ConfigError, match="op:ExpertLayer"):
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"experts": "joined", "pins": split})


def test_padding_is_refused_where_it_would_not_be_zero():
    """What is computed between the products is not finite at zeros: splits with padding would add that up."""
    graph, _ = expert_layer(gated=False)
    x, chosen, scales = graph.inputs
    weights = [hidet.from_torch(torch.randn(5, *shape)) for shape in ((SIZE, INNER), (INNER, COLUMNS))]
    y = hidet.ops.reciprocal(operators.expert_product(x, weights[0], chosen))
    graph = hidet.trace_from(operators.expert_product(y, weights[1], chosen, scales), [x, chosen, scales])
    (op,) = join_expert_layers(normalize(graph)).nodes
    for size, even in ((2, True), (4, False)):  # INNER is 6
        splits = [choice for choice in derive(op).choices(DeviceMesh((size,))) if "(R, S0, R)" in str(choice.spec)]
        assert bool(splits) is even


def test_a_layer_whose_products_are_read_elsewhere_stays_apart():
    graph, _ = expert_layer()
    x, chosen, scales = graph.inputs
    first, last = (hidet.from_torch(torch.randn(5, *shape)) for shape in ((SIZE, INNER), (INNER, COLUMNS)))
    y = operators.expert_product(x, first, chosen)
    z = operators.expert_product(hidet.ops.silu(y), last, chosen, scales)
    both = join_expert_layers(normalize(hidet.trace_from([y, z], [x, chosen, scales])))
    assert kinds(both).count(ExpertProductOp) == 2
    alone = join_expert_layers(normalize(hidet.trace_from(z, [x, chosen, scales])))
    assert kinds(alone) == [ExpertLayerOp]


def test_the_search_dispatches_tokens_where_that_moves_fewer_bytes():
    """Tokens stay split, and each chooses one of many experts: gathering all of them would move more."""
    slow = Cluster(
        DeviceMesh((4,)), (Link(1e-6, 1e9),), Device("d", {"default": 1e13}, 1e12, 2**34, 1e-6, places_shards=True)
    )
    graph, _ = expert_layer(tokens=4096, experts=32, choices=1)
    config = {"mesh_shape": [4], "machine": slow}
    split = {"op:ExpertLayer": "?, (S0), ?, ?, ?, ?, ? -> ?"}  # by experts
    options = {"input_specs": ["(S0, R)"] * 3, "output_specs": ["(S0, R)"], "experts": "joined", "pins": split}
    plan = hidet_dist.make_plan(graph, config, options)
    (op,) = plan.stages[0].operators
    assert op.spec.dispatch is not None
    tokens, moved = 4096 * 4, wanted_share(4096, 1, 8, 32)  # bytes of a number of each token
    alone = [
        slow.collective_seconds(ALL_GATHER, tokens, (0,)),  # the chosen experts
        slow.collective_seconds(ALL_GATHER, tokens, (0,)),  # the scales
        slow.collective_seconds(ALL_GATHER, math.ceil(moved * tokens * SIZE), (0,)),
        slow.collective_seconds(REDUCE_SCATTER, math.ceil(moved * tokens * COLUMNS), (0,)),
        slow.device.operator_seconds(0, 2 * tokens, "default"),  # the mask
    ]
    assert op.reduce_seconds == pytest.approx(sum(alone))
    assert plan.collectives() == {"all_gather": 3, "reduce_scatter": 1}


def test_the_share_of_wanted_tokens_is_that_of_random_choices():
    generator = np.random.default_rng(0)
    for choices, experts, count in ((1, 2, 8), (2, 1, 8), (4, 16, 128), (8, 16, 128)):
        tokens = 20_000
        chosen = np.argsort(generator.random((tokens, count)), axis=1)[:, :choices]
        share = np.mean((chosen < experts).any(1))
        assert wanted_share(tokens, choices, experts, count) == pytest.approx(share, rel=0.05)
    assert wanted_share(64, 8, 8, 8) == 1.0
