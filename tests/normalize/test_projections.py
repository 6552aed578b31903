"""A product that is only ever cut along its columns becomes one product a part, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from hidet.graph.ops.matmul.matmul import matmul_nt

from hidet_dist.errors import ConfigError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import search
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import models
from hidet_dist.view import GraphView

BATCH, LENGTH, HEADS, SIZE = 2, 3, 4, 2
WIDTH = HEADS * SIZE


def weight(*shape: int) -> Tensor:
    values = np.random.default_rng(sum(shape)).uniform(-1, 1, shape)
    return hidet.asarray(values.astype(np.float32))


def heads(x: Tensor) -> Tensor:
    return ops.transpose(ops.reshape(x, [BATCH, LENGTH, HEADS, SIZE]), [0, 2, 1, 3])


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.matmul(ops.softmax(ops.matmul(q, ops.transpose(k, [0, 1, 3, 2])), -1), v)


def biased_split(x: Tensor) -> Tensor:
    """GPT-2: columns [q | k | v], a bias, a split."""
    fused = ops.add(ops.matmul(x, weight(WIDTH, 3 * WIDTH)), weight(3 * WIDTH))
    return mixed(*map(heads, ops.split(fused, 3, axis=2)))


def unbound(x: Tensor) -> Tensor:
    """As vision transformers write it: columns [3, heads, size], permuted, unbound; the weight as PyTorch has it."""
    fused = ops.reshape(matmul_nt(x, weight(3 * WIDTH, WIDTH)), [BATCH, LENGTH, 3, HEADS, SIZE])
    fused = ops.transpose(fused, [2, 0, 3, 1, 4])
    return mixed(*(ops.squeeze(part, [0]) for part in ops.split(fused, 3, axis=0)))


def grouped(x: Tensor) -> Tensor:
    """Parts of different sizes: four heads of queries on one of keys and values."""
    q, k, v = ops.split(ops.matmul(x, weight(WIDTH, WIDTH + 2 * SIZE)), [WIDTH, SIZE, SIZE], axis=2)
    return mixed(heads(q), ops.unsqueeze(k, 1), ops.unsqueeze(v, 1))


def gated(x: Tensor) -> Tensor:
    """Two halves of one projection, scaled by a factor for each token before they are cut."""
    scale = ops.sum(x, [2], keep_dim=True)
    left, right = ops.split(ops.multiply(ops.cast(ops.matmul(x, weight(WIDTH, 12)), "float32"), scale), 2, axis=2)
    return ops.multiply(ops.silu(left), right)


def one_part(x: Tensor) -> Tensor:
    """Columns that nobody reads are not computed."""
    return ops.exp(ops.matmul(x, weight(WIDTH, 12))[:, :, 2:8])


def interleaved(x: Tensor) -> Tensor:
    """Two projections, whose columns take turns."""
    y = ops.matmul(x, weight(WIDTH, 12))
    return ops.add(y[:, :, ::2], y[:, :, 1::2])


REWRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "biased_split": (biased_split, 5),
    "unbound": (unbound, 5),
    "grouped": (grouped, 5),
    "gated": (gated, 2),
    "one_part": (one_part, 1),
    "interleaved": (interleaved, 2),
}


def graph_of(build: Callable[[Tensor], Tensor]) -> FlowGraph:
    x = hidet.symbol([BATCH, LENGTH, WIDTH], "float32", "cpu")
    return hidet.trace_from(build(x), [x])


def names(graph: FlowGraph) -> list[str]:
    return [op.name for op in graph.nodes]


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_parts_are_what_the_slices_were(name):
    build, products = REWRITTEN[name]
    graph = graph_of(build)
    found = normalize(graph)
    assert names(found).count("Matmul") == products
    assert "StridedSlice" not in names(found)
    inputs = graph_inputs(graph, np.random.default_rng(0))
    for got, want in zip(evaluate_graph(found, inputs), evaluate_graph(graph, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("name", REWRITTEN)
def test_random_plans_of_the_parts_compute_what_the_traced_graph_does(name):
    traced, mesh, rng = graph_of(REWRITTEN[name][0]), DeviceMesh((2,)), np.random.default_rng(1)
    inputs = graph_inputs(traced, rng)
    whole, table = evaluate_graph(traced, inputs), RuleTable(mesh)
    graph = normalize(traced)
    for _ in range(6):
        assert check_stage(graph, random_stage(GraphView(graph), mesh, table, rng), inputs, whole) == ""


@pytest.mark.parametrize("build", [biased_split, unbound])
def test_heads_stay_sharded_from_the_weight_to_the_output(build):
    """In some plan nothing is communicated on the way from a replicated input to an output split by heads."""
    view, table = GraphView(normalize(graph_of(build))), RuleTable(DeviceMesh((4,)))
    reached: dict[str, set[str]] = {name: {"(R, R, R)"} for name in view.inputs}
    for op in view.operators:
        found = reached.setdefault(view.names[op.outputs[0]], set())
        for choice in table(op)[1]:
            pairs = [(view.names[x], str(spec)) for x, spec in zip(op.inputs, choice.spec.in_specs, strict=True)]
            fits = all(name in view.weights or spec in reached[name] for name, spec in pairs)
            if fits and not any(choice.spec.reduce_fns):
                found.add(str(choice.spec.out_specs[0]))
    assert "(R, S0, R, R)" in reached[view.outputs[0]]


def overlapping(x: Tensor) -> Tensor:
    y = ops.matmul(x, weight(WIDTH, 12))
    return ops.add(y[:, :, :8], y[:, :, 4:])


def read_whole(x: Tensor) -> Tensor:
    y = ops.matmul(x, weight(WIDTH, 12))
    return ops.concat([ops.add(*ops.split(y, 2, axis=2)), y], 2)


def by_rows(x: Tensor) -> Tensor:
    y = ops.matmul(x, weight(WIDTH, 12))
    return ops.add(y[:, :1], y[:, 1:2])


def of_activations(x: Tensor) -> Tensor:
    return ops.add(*ops.split(ops.matmul(x, ops.transpose(x, [0, 2, 1])), [1, 1, 1], axis=2)[:2])


def inside_heads(x: Tensor) -> Tensor:
    """The halves of a rotary embedding: a cut below the heads is none of the weight's."""
    q = heads(ops.matmul(x, weight(WIDTH, WIDTH)))
    left, right = ops.split(q, 2, axis=3)
    return ops.concat([ops.negative(right), left], 3)


@pytest.mark.parametrize("build", [overlapping, read_whole, by_rows, of_activations, inside_heads])
def test_cuts_that_would_compute_twice_or_are_not_of_columns_are_kept(build):
    graph = graph_of(build)
    assert normalize(graph).nodes == graph.nodes


def test_a_graph_has_one_normal_form():
    graph = graph_of(biased_split)
    normal = normalize(graph)
    assert normal is not graph
    assert normalize(normal) is normal
    assert normal.inputs == graph.inputs
    for other in (graph, graph_of(biased_split)):
        assert GraphView(normalize(other)).fingerprint() == GraphView(normal).fingerprint()


def test_a_traced_graph_is_not_planned_as_it_is():
    """The caller normalises a graph, once, before planning: a view rewrites nothing."""
    graph = graph_of(biased_split)
    with pytest.raises(ConfigError, match=r"FlowGraph is not known to be in normal form.*normalize\(graph\)"):
        GraphView(graph)
    with pytest.raises(ConfigError, match="normal form"):
        search(graph, builtin("cpu", DeviceMesh((2,))))


def test_a_part_of_a_normal_graph_is_normal():
    view = GraphView(normalize(graph_of(biased_split)))
    part = view.subgraph(range(2, 5))
    names_of_part = [op.name for op in view.operators[2:5]]
    assert names(part.graph) == names(normalize(part.graph)) == names_of_part
    plan = search(part.graph, builtin("cpu", DeviceMesh((2,)))).plan
    assert [op.operator for op in plan.stages[0].operators] == names_of_part


def test_hidets_gpt2_projects_queries_keys_and_values_apart():
    graph, _ = models.gpt2(layers=2)
    before, after = names(graph).count("Matmul"), names(normalize(graph)).count("Matmul")
    assert after - before == 2 * 2
