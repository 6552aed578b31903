"""Factors that do not divide: padded where the operator does not see it, masked where it would, or not offered."""

from __future__ import annotations

import dataclasses

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph, Operator
from hidet.graph.ops.activation import SoftmaxOp

from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.padding import MaskPaddingOp
from hidet_dist.rules.rule import RuleTable, derive
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.soundness import check_operator, check_specs
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.testing import bert, shapes
from hidet_dist.view import GraphView

MESHES = [(2,), (4,), (2, 2), (2, 3)]


def symbol(shape: list[int], dtype: str = "float32") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


def choices(op: Operator, mesh: tuple[int, ...] = (4,)) -> set[str]:
    return {str(choice.spec) for choice in derive(op).choices(DeviceMesh(mesh))[1:]}


def padded(op: Operator, mesh: tuple[int, ...]) -> int:
    """Count an operator's choices with padding."""
    tensors = [*op.inputs, *op.outputs]
    found = 0
    for choice in derive(op).choices(DeviceMesh(mesh)):
        specs = (*choice.spec.in_specs, *choice.spec.out_specs)
        found += any(s.is_padded(x.shape, DeviceMesh(mesh)) for s, x in zip(specs, tensors, strict=True))
    return found


def test_a_vocabulary_that_does_not_divide_shards_with_padding():
    assert choices(ops.matmul(symbol([3, 6]), symbol([6, 13])).op) == {"(R, R), (R, S0) -> (R, S0)"}
    assert choices(ops.add(symbol([3, 13]), symbol([13])).op) == {"(R, S0), (S0) -> (R, S0)"}
    assert choices(ops.transpose(symbol([3, 13]), [1, 0]).op) == {"(R, S0) -> (S0, R)"}
    assert choices(ops.reshape(symbol([2, 3, 13]), [6, 13]).op) == {"(R, R, S0) -> (R, S0)"}
    assert choices(ops.take(symbol([13, 6]), symbol([3], "int64"), 0).op) == {
        "(S0, R), (R) -> (R, R) | all_reduce(sum, axes=0)"
    }


def test_vocabularies_of_real_models_over_four_and_eight_devices():
    for words in (50257, 30522):
        for mesh, split in (((4,), "S0"), ((8,), "S0"), ((2, 4), "S01")):
            table = ops.take(symbol([words, 768]), symbol([4, 16], "int64"), 0).op
            assert f"({split}, R), (R, R) -> (R, R, R) | all_reduce(sum, axes={split[1:]})" in choices(table, mesh)
            head = ops.matmul(symbol([4, 16, 768]), symbol([768, words])).op
            assert f"(R, R, R), (R, {split}) -> (R, R, {split})" in choices(head, mesh)
    assert TensorShardSpec.parse("(S01)").local_shape((50257,), DeviceMesh((2, 4))) == (6283,)


def test_a_contraction_that_does_not_divide_masks_its_operands():
    op = ops.matmul(symbol([4, 13]), symbol([13, 8])).op
    spec = next(c.spec for c in derive(op).choices(DeviceMesh((4,))) if c.spec.in_specs[0].mesh_axes_per_dim[1])
    assert str(spec) == "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"
    assert derive(op).masks(spec, DeviceMesh((4,))) == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    "op",
    [
        ops.max(symbol([3, 13]), [1]).op,
        ops.mean(symbol([3, 13]), [1]).op,
        SoftmaxOp(symbol([3, 13]), 1),
        ops.argmax(symbol([3, 13]), 1).op,
        ops.tril(symbol([13, 13]), 0).op,
        ops.take(symbol([12, 12]), symbol([13], "int64"), 0).op,  # padding would be looked up
        ops.divide(symbol([13], "int32"), symbol([13], "int32")).op,  # padding would be divided by
        ops.reshape(symbol([13, 3]), [39]).op,  # padding would lie between the rows
        ops.cumsum(symbol([13, 3]), 1).op,
    ],
    ids=lambda op: op.name,
)
def test_choices_that_padding_would_affect_are_not_offered(op):
    assert padded(op, (4,)) == padded(op, (2,)) == 0


OPERATORS = {
    "matmul": lambda: ops.matmul(symbol([7, 11]), symbol([11, 13])).op,
    "batched": lambda: ops.matmul(symbol([7, 2, 11]), symbol([7, 11, 3])).op,
    "integers": lambda: ops.matmul(symbol([3, 11], "int32"), symbol([11, 7], "int32")).op,
    "lookup": lambda: ops.take(symbol([13, 7]), symbol([6], "int64"), 0).op,
    "gather": lambda: ops.gather(symbol([2, 13]), symbol([2, 4], "int64"), 1).op,
    "elementwise": lambda: ops.divide(symbol([7, 13]), symbol([13])).op,
    "permute": lambda: ops.permute_dims(symbol([7, 2, 11]), [2, 0, 1]).op,
    "compare": lambda: ops.less(symbol([11, 7]), symbol([7])).op,
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPERATORS)
def test_padded_choices_compute_the_same_for_any_values_in_the_padding(name, mesh):
    op = OPERATORS[name]()
    checked = check_operator(op, DeviceMesh(mesh), np.random.default_rng(1))
    assert padded(op, mesh) >= (1 if name == "gather" else 2)
    assert not checked.failures, "\n".join(map(str, checked.failures))


def test_negative_indices_count_from_the_true_end_of_a_padded_table():
    op = ops.take(symbol([13, 4]), symbol([26], "int64"), 0).op
    table, indices = np.random.default_rng(2).uniform(-1, 1, [13, 4]), np.arange(-13, 13)
    for mesh in map(DeviceMesh, ((2,), (4,), (2, 2))):
        specs = [choice.spec for choice in derive(op).choices(mesh)]
        assert check_specs(op, mesh, specs, [table, indices]).failures == []


# Wrong rules, which the harness must catch


def test_a_contraction_whose_padding_is_not_masked_is_caught():
    rule = derive(ops.matmul(symbol([4, 13]), symbol([13, 8])).op)
    rule.masks = lambda *_: ()  # type: ignore[method-assign]
    checked = check_operator(rule.op, DeviceMesh((4,)), np.random.default_rng(3), rule=rule)
    assert [failure.spec for failure in checked.failures] == [
        "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)",
        "(R, S0), (S0, R) -> (S0, R) | reduce_scatter(sum, axes=0, dim=0)",
        "(R, S0), (S0, R) -> (R, S0) | reduce_scatter(sum, axes=0, dim=1)",
    ]


@pytest.mark.parametrize("reduce", [ops.max, ops.mean, ops.prod])
def test_a_padded_reduction_that_zeros_would_change_is_caught(reduce):
    rule = derive(reduce(symbol([3, 13]), [1]).op)
    rule.paddable = frozenset(rule.factors)
    rule._proven = lambda *_: True  # type: ignore[method-assign]
    checked = check_operator(rule.op, DeviceMesh((4,)), np.random.default_rng(4), {0: (-2.0, -1.0)}, rule)
    assert checked.choices == 2
    assert len(checked.failures) == 1


def test_an_index_read_from_padding_is_caught():
    rule = derive(ops.take(symbol([8, 3]), symbol([13], "int64"), 0).op)
    rule.paddable = frozenset(rule.factors)
    checked = check_operator(rule.op, DeviceMesh((4,)), np.random.default_rng(5), rule=rule)
    assert {failure.spec for failure in checked.failures} == {"(R, R), (S0) -> (S0, R)"}


# Whole graphs


def constant(rng: np.random.Generator, *shape: int) -> hidet.Tensor:
    return hidet.asarray(rng.uniform(0.5, 1, shape).astype(np.float32))


def mlp() -> FlowGraph:
    rng, x = np.random.default_rng(6), symbol([4, 8])
    wide = ops.exp(ops.matmul(x, constant(rng, 8, 13)))
    return normalize(hidet.trace_from(ops.matmul(wide, constant(rng, 13, 6)), [x]))


def equals_the_whole(graph: FlowGraph, plan: Plan, inputs: list[np.ndarray] | None = None) -> bool:
    """Whether a plan computes what the whole graph does, by the oracle; on random inputs if none are given."""
    inputs = inputs or graph_inputs(graph, np.random.default_rng(7))
    return check_stage(graph, plan.stages[0], inputs, evaluate_graph(graph, inputs)) == ""


def pinned(graph: FlowGraph, mesh: DeviceMesh, specs: dict[str, str]) -> Plan:
    """The best plan whose weights lie as ``specs`` say, and are used so."""
    view = GraphView(graph)

    def as_stored(op, spec):
        names = [view.names[x] for x in op.inputs]
        return all(specs.get(name, str(own)) == str(own) for name, own in zip(names, spec.in_specs, strict=True))

    return search(graph, builtin("cpu", mesh), mem_budget=2**40, pins=specs, allow=as_stored).plan


def test_a_padded_contraction_in_compiled_kernels():
    graph, x = mlp(), np.random.default_rng(7).uniform(-1, 1, (4, 8)).astype(np.float32)
    program = partition_graph(graph, pinned(graph, DeviceMesh((2,)), {"w0": "(R, S0)", "w1": "(S0, R)"}).stages[0])
    np.testing.assert_allclose(simulate(program, [x])[0], evaluate_graph(graph, [x])[0], rtol=1e-5)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_only_the_activation_of_a_padded_contraction_is_masked(mesh):
    graph = mlp()
    split = "S01" if len(mesh) == 2 else "S0"
    plan = pinned(graph, DeviceMesh(mesh), {"w0": f"(R, {split})", "w1": f"({split}, R)"})
    assert set(plan.collectives()) <= {"all_reduce", "reduce_scatter", "all_gather"}
    program = partition_graph(graph, plan.stages[0])
    masks = [node for node in program.graph.nodes if isinstance(node, MaskPaddingOp)]
    assert [node.inputs[0].op.name for node in masks] == ["Exp"]
    size = 4 if mesh != (2,) else 7
    assert {w.spec.local_shape(w.shape, program.mesh) for w in program.weights} == {(8, size), (size, 6)}
    assert program.data_of(program.mesh.size - 1)["w1"][-1].eq(0).all()
    assert equals_the_whole(graph, plan)


def test_the_figures_of_a_plan_count_the_padding():
    graph, mesh = mlp(), DeviceMesh((4,))
    plan = pinned(graph, mesh, {"w0": "(R, S0)", "w1": "(S0, R)"})
    assert plan.stages[0].weight_bytes_per_device == (8 * 4 + 4 * 6) * 4
    data = partition_graph(graph, plan.stages[0]).data_of(3)
    assert sum(data[f"w{n}"].numel() for n in range(2)) * 4 == plan.stages[0].weight_bytes_per_device


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 4)])
def test_random_plans_of_a_model_that_divides_by_nothing(mesh):
    rng = np.random.default_rng(8)
    traced = GRAPHS["uneven"](rng)
    graph, inputs = normalize(traced), graph_inputs(traced, rng)
    view, whole = GraphView(graph), evaluate_graph(traced, inputs)
    table = RuleTable(DeviceMesh(mesh))
    for _ in range(12):
        assert check_stage(graph, random_stage(view, DeviceMesh(mesh), table, rng), inputs, whole) == ""


@pytest.mark.parametrize(("mesh", "split"), [((2,), "S0"), ((4,), "S0"), ((2, 2), "S01")])
def test_a_tied_table_is_stored_once_and_split_by_its_rows(mesh, split):
    """The lookup and the head read the same shards of the table, 13 rows over 2 or 4 devices."""
    rng = np.random.default_rng(9)
    graph = normalize(GRAPHS["uneven"](rng))
    plan = pinned(graph, DeviceMesh(mesh), {"w0": f"({split}, R)"})
    lookup = next(op.spec for op in plan.stages[0].operators if op.operator == "Take")
    head = [op.spec for op in plan.stages[0].operators if op.operator == "Matmul"][-1]
    assert str(lookup.in_specs[0]) == str(head.in_specs[1]) == f"({split}, R)"
    assert str(head.out_specs[0]) == f"(R, R, {split})"
    assert equals_the_whole(graph, plan)


@pytest.mark.parametrize(("mesh", "split"), [((2,), "S0"), ((4,), "S0"), ((2, 2), "S01")])
def test_an_encoder_of_101_words_and_an_inner_width_of_26(mesh, split):
    config = bert.BertConfig(
        vocab_size=101,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=26,
        max_position_embeddings=8,
    )
    graph = normalize(bert.trace(bert.random_bert(config, seed=11), batch=2, seq=4))
    view = GraphView(graph)
    shapes_of = {name: view.shape(name) for name in view.weights}
    specs = {name: f"({split}, R)" for name, shape in shapes_of.items() if shape in ((101, 16), (26, 16))}
    specs |= {name: f"(R, {split})" for name, shape in shapes_of.items() if shape == (16, 26)}
    assert len(specs) == 3
    plan = pinned(graph, DeviceMesh(mesh), specs)
    ids = np.array([[0, 100, 50, 51], [75, 76, 25, 26]])
    assert equals_the_whole(graph, plan, [ids, np.ones_like(ids)])


def test_a_tight_budget_is_met_by_padding():
    """Room for one matrix and a little more than half of the other: without padding, both would have to be whole."""
    rng = np.random.default_rng(10)
    x, table = symbol([5], "int64"), constant(rng, 101, 3)
    graph = normalize(hidet.trace_from(ops.matmul(ops.take(table, x, 0), constant(rng, 3, 101)), [x]))
    mesh = DeviceMesh((2,))
    beside = (5 * 2 + 5 * 101) * 4 + 2 * buffer_nbytes(5 * 3 * 4)  # indices, scores; rows found, their sum
    plan = search(graph, builtin("cpu", mesh), mem_budget=(101 * 3 + 51 * 3) * 4 + beside).plan
    assert any(weight.spec.is_padded(weight.shape, mesh) for weight in plan.stages[0].weights)
    assert plan.stages[0].weight_bytes_per_device < 2 * 101 * 3 * 4
    assert equals_the_whole(graph, plan)


def test_a_padded_head_pays_where_few_tokens_are_decoded():
    """GPT-2's head on eight devices, which 50257 does not divide by: an eighth of the matrix is read by each."""
    graph = normalize(shapes.gpt(shapes.GPTConfig(1, 768, 12, 50257, batch=1, sequence=8, dtype="float16")))
    cluster = builtin("dgx-a100", DeviceMesh((8,)))

    def exact(op, spec):
        tensors = zip((*op.inputs, *op.outputs), (*spec.in_specs, *spec.out_specs), strict=True)
        return not any(own.is_padded(x.shape, cluster.mesh) for x, own in tensors)

    plan = search(graph, cluster).plan
    assert plan.seconds < search(graph, cluster, allow=exact).plan.seconds
    (head,) = (weight for weight in plan.stages[0].weights if weight.shape == (768, 50257))
    assert str(head.spec) == "(R, S0)"
    assert head.local_nbytes(cluster.mesh) == 768 * 6283 * 2


def test_inputs_and_outputs_that_do_not_divide_are_refused():
    mesh = DeviceMesh((2,))
    uneven = normalize(hidet.trace_from(ops.exp(x := symbol([13])), [x]))
    with pytest.raises(ConfigError, match=r"input 0 does not fit.*does not divide"):
        search(uneven, builtin("cpu", mesh), input_specs=[TensorShardSpec.parse("(S0)")])
    plan = search(uneven, builtin("cpu", mesh)).plan
    split = dataclasses.replace(plan.stages[0].outputs[0], spec=TensorShardSpec.parse("(S0)"))
    with pytest.raises(PlanError, match=r"spec of t0\.0 does not fit.*does not divide"):
        partition_graph(uneven, dataclasses.replace(plan.stages[0], outputs=(split,)))


def test_a_plan_that_pads_what_must_not_be_is_refused():
    graph, mesh = normalize(hidet.trace_from(ops.max(x := symbol([4, 13]), [1]), [x])), DeviceMesh((2,))
    plan = search(graph, builtin("cpu", mesh)).plan
    spec = OpShardSpec.parse("(R, S0) -> (R) | all_reduce(max, axes=0)")
    operator = dataclasses.replace(plan.stages[0].operators[0], spec=spec)
    with pytest.raises(PlanError, match="Operator 0, ReduceMax, cannot run as"):
        partition_graph(graph, dataclasses.replace(plan.stages[0], operators=(operator,)))
