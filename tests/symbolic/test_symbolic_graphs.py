"""Graphs with symbolic dims: what of them is sharded, and that every plan computes the graph at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph, Tensor

from hidet_dist.errors import ConfigError, InputError, PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.operators.row_attention import RowAttentionOp
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import check_stage, evaluate_graph, random_stage
from hidet_dist.spec import DeviceMesh, Plan, TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.symbolic.planning import planning_view, rule_table
from hidet_dist.testing import models

S3, S4 = TensorShardSpec.parse("(S0, R, R)"), TensorShardSpec.parse("(S0, R, R, R)")


def weight(*shape: int, seed: int = 0) -> Tensor:
    return hidet.asarray(np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32))


def symbol(*shape: int | str, dtype: str = "float32") -> Tensor:
    return hidet.symbol(list(shape), dtype, "cpu")


def encoder_plan(mesh: DeviceMesh, batch: SymbolSize, specs=(None, None), outputs=(None,)) -> Plan:
    graph = normalize(models.encoder_block("batch", "seq"))
    pins = {} if specs[0] else {f"w{number}": "(R, S0)" for number in range(3)}  # by heads
    symbols = {"batch": batch, "seq": SymbolSize(128)}
    return search(graph, builtin("cpu", mesh), input_specs=specs, output_specs=outputs, pins=pins, symbols=symbols).plan


@pytest.mark.parametrize("mesh", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_concrete_dims_shard_as_ever(mesh):
    mesh = DeviceMesh(mesh)
    plan = encoder_plan(mesh, SymbolSize(16))
    softmax = next(op for op in plan.stages[0].operators if op.operator == "Exp")
    assert softmax.spec.in_specs[0].mesh_axes_per_dim[1], "heads are split"
    for op in plan.stages[0].operators:
        for spec in (*op.spec.in_specs, *op.spec.out_specs):
            # batch and seq are the sizes of the dims 0 and -1 or 1 and 2 of all activations of this rank
            if spec.ndim == 3:
                assert not spec.mesh_axes_per_dim[0] and not spec.mesh_axes_per_dim[1]
            if spec.ndim == 4:
                assert not spec.mesh_axes_per_dim[0]
    graph = normalize(models.encoder_block("batch", "seq"))
    for batch, seq in ((1, 7), (3, 4)):
        inputs = models.encoder_inputs(batch, seq)
        assert check_stage(graph, plan.stages[0], inputs, evaluate_graph(graph, inputs)) == ""


@pytest.mark.parametrize("mesh", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_a_declared_multiple_is_sharded(mesh):
    mesh = DeviceMesh(mesh)
    plan = encoder_plan(mesh, SymbolSize(16, 2), (S3, S4), (S3,))
    assert all(tensor.spec.mesh_axes_per_dim[0] == (0,) for tensor in (*plan.stages[0].inputs, *plan.stages[0].outputs))
    graph = normalize(models.encoder_block("batch", "seq"))
    for batch, seq in ((2, 5), (6, 3)):
        inputs = models.encoder_inputs(batch, seq)
        assert check_stage(graph, plan.stages[0], inputs, evaluate_graph(graph, inputs)) == ""


def test_a_symbol_that_is_expected_to_divide_is_not_sharded_unless_it_is_declared():
    with pytest.raises(ConfigError, match=r"splits the symbolic dim batch into 2.*'multiple_of': 2"):
        encoder_plan(DeviceMesh((2,)), SymbolSize(16), (S3, S4))
    view = planning_view(normalize(models.encoder_block(16, "seq")), {"seq": SymbolSize(128)}, DeviceMesh((2,)))
    table = rule_table(view, DeviceMesh((2,)))
    scores = next(op for op in view.operators if op.name == "Exp")
    specs = {str(choice.spec.in_specs[0]) for choice in table(scores)[1]}
    assert specs == {"(R, R, R, R)", "(S0, R, R, R)", "(R, S0, R, R)"}


def pooled() -> FlowGraph:
    x, mask = symbol("batch", "seq", 8), symbol("batch", "seq", 1)
    return hidet.trace_from(ops.sum(x * mask, dims=[1]) / ops.sum(mask, dims=[1]), [x, mask])


def averaged() -> FlowGraph:
    x = symbol("batch", "seq", 8)
    return hidet.trace_from(ops.mean(x, dims=[1]), [x])


def embedded() -> FlowGraph:
    """A vocabulary of 13, which is padded, beside symbolic dims, which never are."""
    words, places, table = symbol("batch", "seq", dtype="int32"), symbol("batch", "seq", dtype="int32"), weight(13, 8)
    x = ops.take(table, words, axis=0) + ops.take(weight(20, 8, seed=1), places, axis=0)
    return hidet.trace_from(ops.matmul(x, ops.transpose(table, [1, 0])), [words, places])


def flattened() -> FlowGraph:
    x = symbol("batch", "seq", 8)
    rows = ops.reshape(x, [x.shape[0] * x.shape[1], 8])
    y = ops.reshape(ops.relu(ops.matmul(rows, weight(8, 4))), [x.shape[0], x.shape[1], 4])
    return hidet.trace_from(y, [x])


def continued() -> FlowGraph:
    """A sum of symbols, as keys of the past and the present: never split, but everything else is."""
    past, x = symbol("batch", "past", 8), symbol("batch", "seq", 8)
    return hidet.trace_from(ops.matmul(ops.concat([past, x], axis=1), weight(8, 4)), [past, x])


def convolved() -> FlowGraph:
    x = symbol("batch", 4, "height", 6)
    return hidet.trace_from(ops.relu(ops.conv2d(ops.pad(x, [1, 1, 1, 1]), weight(8, 4, 3, 3), stride=2)), [x])


def last_token() -> FlowGraph:
    x = symbol("batch", "seq", 8)
    return hidet.trace_from(ops.matmul(x[:, -1, :], weight(8, 4)), [x])


def fused_projection() -> FlowGraph:
    x = symbol("batch", "seq", 8)
    q, k, v = ops.split(ops.matmul(x, weight(8, 24)), 3, axis=2)
    return hidet.trace_from(q * k + v, [x])


def masked() -> FlowGraph:
    """Absolute indices: a triangle, positions counted from zero, a cumulative sum."""
    x = symbol("seq", "seq")
    places = ops.reshape(ops.arange(0, x.shape[0], 1, dtype="float32", device="cpu"), [x.shape[0], 1])
    return hidet.trace_from(ops.cumsum(ops.tril(x) + places, 1), [x])


def attended() -> FlowGraph:
    """Attention over rows: the rows that a token may see are a number of symbolic dims."""
    q, keys, values = symbol("tokens", 4, 8), symbol(24, 2, 8), symbol(24, 2, 8)
    table, tokens = symbol("sequences", "pages", dtype="int32"), [symbol("tokens", dtype="int32") for _ in range(3)]
    y = RowAttentionOp(q, keys, values, table, *tokens, scale=0.5, page=2).outputs[0]
    return hidet.trace_from(y, [q, keys, values, table, *tokens])


GRAPHS: dict[str, tuple[Callable[[], FlowGraph], list[dict[str, int]]]] = {
    "pooled": (pooled, [{"batch": 4, "seq": 8}, {"batch": 12, "seq": 4}]),
    "averaged": (averaged, [{"batch": 4, "seq": 8}]),
    "embedded": (embedded, [{"batch": 4, "seq": 8}]),
    "flattened": (flattened, [{"batch": 8, "seq": 4}]),
    "continued": (continued, [{"batch": 4, "past": 8, "seq": 4}, {"batch": 8, "past": 4, "seq": 12}]),
    "convolved": (convolved, [{"batch": 4, "height": 4}, {"batch": 4, "height": 12}]),
    "last_token": (last_token, [{"batch": 4, "seq": 4}, {"batch": 4, "seq": 12}]),
    "fused_projection": (fused_projection, [{"batch": 8, "seq": 4}]),
    "masked": (masked, [{"seq": 4}, {"seq": 12}]),
    "attended": (attended, [{"tokens": 4, "sequences": 12, "pages": 4}, {"tokens": 8, "sequences": 16, "pages": 8}]),
}


def data(graph: FlowGraph, sizes: dict[str, int], rng: np.random.Generator) -> list[np.ndarray]:
    arrays = []
    for x in graph.inputs:
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in x.shape]
        if x.dtype.is_integer():
            arrays.append(rng.integers(0, 12, shape).astype(np.int32))
        else:
            arrays.append(rng.uniform(0.5, 1.5, shape).astype(np.float32))
    return arrays


def test_fixed_dims_are_padded_and_symbolic_ones_are_not():
    mesh = DeviceMesh((2,))
    view = planning_view(normalize(embedded()), {"batch": SymbolSize(5), "seq": SymbolSize(7)}, mesh)
    choices = rule_table(view, mesh)(view.operators[-1])[1]
    splits = {choice.spec.out_specs[0].mesh_axes_per_dim for choice in choices}
    assert splits == {((), (), ()), ((), (), (0,))}


def test_attention_over_rows_of_symbolic_dims_is_split_by_heads():
    mesh, sizes = DeviceMesh((2,)), dict.fromkeys(("tokens", "sequences", "pages"), SymbolSize(5))
    view = planning_view(normalize(attended()), sizes, mesh)
    specs = [str(choice.spec.out_specs[0]) for choice in rule_table(view, mesh)(view.operators[-1])[1]]
    assert specs == ["(R, R, R)", "(R, S0, R)", "(R, R, S0)"]


def test_views_of_other_expected_sizes_share_proofs_and_not_what_multiples_allow():
    mesh, graph = DeviceMesh((2,)), normalize(models.encoder_block("batch", "seq"))

    def choices(batch: SymbolSize, like: RuleTable | None) -> tuple[RuleTable, list[list[str]]]:
        view = planning_view(graph, {"batch": batch, "seq": SymbolSize(8)}, mesh)
        table = rule_table(view, mesh, like)
        return table, [[str(choice.spec) for choice in table(op)[1]] for op in view.operators]

    table, few = choices(SymbolSize(4), None)
    table, many = choices(SymbolSize(64), table)
    _, even = choices(SymbolSize(4, 2), table)
    assert many == few
    assert even == choices(SymbolSize(4, 2), None)[1]
    assert even != few, "a batch of even size is split"


def test_a_gathered_result_of_symbolic_dims_is_packed_at_the_most():
    """Rows are many, though they are not declared to be a multiple: the memory of their gathering is foreseen."""
    x = symbol("rows", 16)
    graph = normalize(hidet.trace_from(ops.relu(ops.matmul(x, weight(16, 4096))), [x]))
    cluster = builtin("dgx-h100", DeviceMesh((2,)))
    plan = search(graph, cluster, pins={"w0": "(R, S0)"}, symbols={"rows": SymbolSize(16)}).plan
    held = max(live_bytes(planning_view(graph, {"rows": SymbolSize(16)}, cluster.mesh), plan.stages[0]))
    result, shard = 16 * 4096 * 4, 16 * 2048 * 4
    # The weight's shard, the input, the result, its shard before, and what is received of both before it is joined.
    assert held == 16 * 2048 * 4 + 16 * 16 * 4 + result + shard + result


@pytest.mark.parametrize("mesh", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_random_plans_hold_for_every_size(name, mesh):
    make, all_sizes = GRAPHS[name]
    mesh, traced, rng = DeviceMesh(mesh), make(), np.random.default_rng(0)
    graph = normalize(traced)
    declared = {symbol: SymbolSize(12, 4) for symbol in all_sizes[0]}
    view = planning_view(graph, declared, mesh)
    table = rule_table(view, mesh)
    assert any(len(table(op)[1]) > 1 for op in view.operators)
    cases = [data(graph, sizes, rng) for sizes in all_sizes]
    wholes = [evaluate_graph(traced, inputs) for inputs in cases]
    for _ in range(2):
        stage = random_stage(view, mesh, table, rng)
        for inputs, whole in zip(cases, wholes, strict=True):
            assert check_stage(graph, stage, inputs, whole) == ""


def test_a_graph_for_particular_sizes_only_is_refused():
    x, y = symbol("batch", 8), symbol("rows", 8)
    graph = normalize(hidet.trace_from(x + y, [x, y]))
    with pytest.raises(ConfigError, match=r"Operator 0, Add, does not take all sizes"):
        search(graph, builtin("cpu", DeviceMesh((2,))), symbols={"batch": SymbolSize(8), "rows": SymbolSize(8)})


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ({}, "symbolic dim batch: say what size to plan for"),
        ({"batch": SymbolSize(8), "seq": SymbolSize(8), "words": SymbolSize(8)}, "declares 'words'"),
    ],
)
def test_symbols_that_do_not_fit_the_graph_are_refused(symbols, message):
    with pytest.raises(ConfigError, match=message):
        search(normalize(pooled()), builtin("cpu", DeviceMesh((2,))), symbols=symbols)


def test_a_plan_is_saved_edited_and_costed_anew(tmp_path):
    graph, mesh = normalize(flattened()), DeviceMesh((2,))
    declared = {"batch": SymbolSize(16, 2), "seq": SymbolSize(128)}
    plan = search(graph, builtin("cpu", mesh), input_specs=[S3], symbols=declared).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert [symbol.name for symbol in loaded.stages[0].symbols] == ["batch", "seq"]
    assert loaded.stages[0].inputs[0].written == ("batch", "seq", 8)
    assert loaded.stages[0].inputs[0].shape == (16, 128, 8)
    hidet.distributed.validate_plan(loaded, graph)
    assert hidet.distributed.recost(loaded, graph, builtin("cpu", mesh)) == plan


def test_a_plan_that_splits_what_is_not_declared_is_refused():
    graph, mesh = normalize(flattened()), DeviceMesh((2,))
    declared = {"batch": SymbolSize(16, 2), "seq": SymbolSize(128)}
    plan = search(graph, builtin("cpu", mesh), input_specs=[S3], symbols=declared).plan
    text = plan.to_json().replace('"multiple_of": 2', '"multiple_of": 1')
    with pytest.raises(PlanError, match="splits dim 0"):
        hidet.distributed.validate_plan(Plan.from_json(text), graph)
    with pytest.raises(PlanError, match="does not fit"):
        partition_graph(graph, Plan.from_json(text).stages[0])


def simulated(sizes: Sequence[tuple[int, int]]) -> tuple[FlowGraph, list[list[np.ndarray]]]:
    graph = normalize(flattened())
    rng = np.random.default_rng(0)
    return graph, [data(graph, {"batch": batch, "seq": seq}, rng) for batch, seq in sizes]


def test_graphs_of_fixed_and_symbolic_sizes_share_a_layout_of_weights():
    shared = weight(8, 4)

    def graph(batch: int | str) -> FlowGraph:
        x = symbol(batch, 8)
        return hidet.trace_from(ops.relu(ops.matmul(x, shared)), [x])

    family = hidet.distributed.search_family(
        [graph(1), graph("batch")],
        builtin("cpu", DeviceMesh((2,))),
        symbols={"batch": SymbolSize(64)},
    )
    fixed, symbolic = (plan.stages[0] for plan in family.plans)
    assert fixed.weights[0].spec == symbolic.weights[0].spec
    assert (fixed.symbols, [own.name for own in symbolic.symbols]) == ((), ["batch"])


def test_the_simulator_takes_sizes_from_the_inputs():
    graph, cases = simulated([(2, 3), (4, 5)])
    declared = {"batch": SymbolSize(16, 2), "seq": SymbolSize(128)}
    plan = search(graph, builtin("cpu", DeviceMesh((2,))), input_specs=[S3], symbols=declared).plan
    program = partition_graph(graph, plan.stages[0])
    for inputs in cases:
        np.testing.assert_allclose(simulate(program, inputs)[0], evaluate_graph(graph, inputs)[0], atol=1e-5)
    with pytest.raises(InputError, match=r"batch must be a positive multiple of 2; dim 0 of input 0 says batch = 3"):
        simulate(program, [np.zeros((3, 5, 8), np.float32)])


def test_two_inputs_that_disagree_are_refused():
    graph = normalize(pooled())
    declared = {"batch": SymbolSize(8), "seq": SymbolSize(8)}
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((2,))), symbols=declared).plan.stages[0])
    with pytest.raises(InputError, match=r"seq must be the same everywhere; dim 1 of input 1 says seq = 4, but dim 1"):
        simulate(program, [np.zeros((2, 3, 8), np.float32), np.zeros((2, 4, 1), np.float32)])
