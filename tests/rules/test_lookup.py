"""Lookups in a table whose rows are sharded: masked on each device, then summed."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.partitioning.proof import with_conversions
from hidet_dist.rules.rule import derive
from hidet_dist.simulate import simulate
from hidet_dist.soundness import check_operator, check_specs
from hidet_dist.spec import DeviceMesh, OperatorPlan, OpShardSpec, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.view import GraphView


def symbol(shape: list[int], dtype: str = "float32") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


def test_the_rows_of_an_embedding_are_a_factor_that_is_summed():
    rule = derive(ops.take(symbol([12, 5]), symbol([3], "int64"), 0).op)
    assert rule.notation() == "([k,j],[i])->([i,j]) {i=3,j=5,k=12} reduction={k}"
    specs = [str(choice.spec) for choice in rule.choices(DeviceMesh((2, 2)))]
    assert "(S01, R), (R) -> (R, R) | all_reduce(sum, axes=01)" in specs


@pytest.mark.parametrize("mesh", [(2,), (3, 2)])
def test_negative_indices_count_from_the_end_of_the_whole_table(mesh):
    op = ops.take(symbol([12, 4]), symbol([24], "int64"), 0).op
    table, indices = np.random.default_rng(1).uniform(-1, 1, [12, 4]), np.arange(-12, 12)
    specs = [choice.spec for choice in derive(op).choices(DeviceMesh(mesh))]
    assert sum(bool(spec.in_specs[0].mesh_axes_per_dim[0]) for spec in specs) >= 3
    assert check_specs(op, DeviceMesh(mesh), specs, [table, indices]).failures == []


def test_gather_and_index_select_along_any_dim():
    rng = np.random.default_rng(2)
    gathered = ops.gather(symbol([2, 8, 3]), symbol([2, 6, 3], "int64"), 1).op
    selected = ops.index_select(symbol([2, 3, 8]), symbol([6], "int64"), 2).op
    for op, spec in (
        (gathered, "(R, S0, R), (R, R, R) -> (R, R, R) | all_reduce(sum, axes=0)"),
        (selected, "(R, R, S0), (R) -> (R, R, R) | all_reduce(sum, axes=0)"),
    ):
        assert spec in [str(choice.spec) for choice in derive(op).choices(DeviceMesh((4,)))]
        assert check_operator(op, DeviceMesh((4,)), rng).failures == []


def test_lookups_that_cannot_be_summed_keep_their_rows_whole():
    op = ops.take(symbol([8, 3], "bool"), symbol([5], "int64"), 0).op
    specs = [choice.spec.in_specs[0] for choice in derive(op).choices(DeviceMesh((2,)))]
    assert not any(spec.mesh_axes_per_dim[0] for spec in specs)


def test_without_its_sum_a_lookup_is_caught():
    op = ops.take(symbol([8, 4]), symbol([6], "int64"), 0).op
    inputs = [np.random.default_rng(3).uniform(1, 2, [8, 4]), np.arange(6)]
    wrong = check_specs(op, DeviceMesh((2,)), [OpShardSpec.parse("(S0, R), (R) -> (R, R)")], inputs)
    assert "differs" in wrong.failures[0].what


def _program(graph: FlowGraph, spec: str, mesh: DeviceMesh) -> Program:
    view = GraphView(graph)
    own = OpShardSpec.parse(spec)

    def tensor(name: str, lies: TensorShardSpec) -> TensorPlan:
        return TensorPlan(name, view.shape(name), view.tensors[name].dtype.name, view.nbytes(name), lies)

    stage = StagePlan(
        mesh,
        view.fingerprint(),
        (OperatorPlan(0, "Take", own, 0.0, 0.0),),
        (tensor(view.weights[0], own.in_specs[0]),),
        (tensor(view.inputs[0], own.in_specs[1]),),
        (tensor(view.outputs[0], own.out_specs[0]),),
    )
    return partition_graph(graph, with_conversions(view, stage, builtin("cpu", mesh)))


def test_an_embedding_sharded_by_its_rows_from_end_to_end_in_compiled_kernels():
    table = np.random.default_rng(4).uniform(-1, 1, [12, 4]).astype(np.float32)
    x = symbol([8], "int64")
    graph = normalize(hidet.trace_from(ops.take(hidet.asarray(table), x, 0), inputs=[x]))
    indices = np.array([0, 11, -1, -12, 5, 6, 2, 9])
    mesh = DeviceMesh((2, 2))
    program = _program(
        graph, "(S10, R), (R) -> (S0, R) | reduce_scatter(sum, axes=0, dim=0) all_reduce(sum, axes=1)", mesh
    )
    assert {weight.spec.local_shape(weight.shape, mesh) for weight in program.weights} == {(3, 4)}
    (got,) = simulate(program, [indices])
    np.testing.assert_array_equal(got, table[indices])
