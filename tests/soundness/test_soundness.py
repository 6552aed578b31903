"""Every choice of every operator class on meshes of any rank, and the harness itself: it must catch wrong rules."""

from __future__ import annotations

from collections.abc import Iterable

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from tests.seeds import seed

from hidet_dist.rules.rule import derive
from hidet_dist.soundness import OutOfRange, check_operator, check_specs, evaluate, random_inputs
from hidet_dist.soundness.check import apply_reduce
from hidet_dist.soundness.instances import MAKERS, instance
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn


def symbol(shape: list[int | str], dtype: str = "float32") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


def name_of(cls: type[hidet.Operator]) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


every_class = pytest.mark.parametrize("cls", MAKERS, ids=name_of)


def check(cls: type[hidet.Operator], number: int, meshes: Iterable[tuple[int, ...]]) -> None:
    """Check a random instance, the one of this number of the run's seed."""
    rng = np.random.default_rng((seed(), number))
    made = instance(cls, rng)
    for mesh in map(DeviceMesh, meshes):
        checked = check_operator(made.op, mesh, rng, made.ranges)
        assert checked.choices >= 1
        assert not checked.failures, "\n".join(map(str, checked.failures))


@pytest.mark.parametrize("meshes", [((2, 3),), pytest.param(((2,), (4,)), marks=pytest.mark.slow)])
@every_class
def test_every_choice_computes_what_the_whole_operator_does_on_meshes_of_any_rank(cls, meshes):
    check(cls, 1, meshes)


# Of each kind of rule one or two: sums, extremes, windows, parts, places, states, and what is declared by hand.
QUICKLY_ON_THREE_AXES = {
    "AddOp", "AttnMaskAddOp", "AvgPool2dOp", "BatchMatmulHipOp", "ConcatOp", "Conv2dOp", "CumulativeSumOp",
    "ExpertProductOp", "MaxOp", "NormalizeOp", "PermuteDimsOp", "ReduceMeanOp", "ReduceMaxOp", "ReshapeOp",
    "RowAttentionPartsOp", "ScatterElementsOp", "SoftmaxOp", "TakeOp", "WriteRowsOp",
}  # fmt: skip


@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=[pytest.mark.slow] * (cls.__name__ not in QUICKLY_ON_THREE_AXES)) for cls in MAKERS],
    ids=name_of,
)
def test_every_choice_computes_what_the_whole_operator_does_on_a_mesh_of_three_axes(cls):
    check(cls, 1, ((2, 2, 2),))


@pytest.mark.slow
@every_class
def test_every_choice_computes_what_the_whole_operator_does_on_meshes_with_shares(cls):
    rng = np.random.default_rng((seed(), 2))
    for number in range(2):
        made = instance(cls, np.random.default_rng((seed(), number)))
        for text in ("[gpu=2:1]", "[gpu=1:3]", "[gpu=1:2:1]", "[node=2, gpu=1:2]", "[node=3:1, gpu=1:2]"):
            checked = check_operator(made.op, DeviceMesh.parse(text), rng, made.ranges)
            assert not checked.failures, "\n".join(map(str, checked.failures))


@every_class
def test_every_choice_of_another_instance_computes_what_the_whole_operator_does(cls):
    check(cls, 0, ((2, 2),))


@pytest.mark.slow
@every_class
def test_every_choice_of_many_instances_computes_what_the_whole_operator_does(cls):
    for number in range(3, 23):
        check(cls, number, ((2,), (3,), (2, 2)))


# The oracle, against PyTorch and against hidet's own kernels

TORCH = {
    "gelu": (lambda x: ops.gelu(x).op, torch.nn.functional.gelu),
    "silu": (lambda x: ops.silu(x).op, torch.nn.functional.silu),
    "hardswish": (lambda x: ops.hardswish(x).op, torch.nn.functional.hardswish),
    "softplus": (lambda x: ops.softplus(x, 1, 20).op, torch.nn.functional.softplus),
    "softmax": (lambda x: hidet.graph.ops.activation.SoftmaxOp(x, 1), lambda x: torch.softmax(x, 1)),
    "argmax": (lambda x: ops.argmax(x, 1).op, lambda x: torch.argmax(x, 1)),
    "sum": (lambda x: ops.sum(x, [0]).op, lambda x: x.sum(0)),
    "mean": (lambda x: ops.mean(x, [1]).op, lambda x: x.mean(1)),
    "prod": (lambda x: ops.prod(x, [1]).op, lambda x: x.prod(1)),
    "cumsum": (lambda x: ops.cumsum(x, 1).op, lambda x: torch.cumsum(x, 1)),
    "flip": (lambda x: ops.flip(x, [1]).op, lambda x: torch.flip(x, [1])),
    "roll": (lambda x: ops.roll(x, [1], [0]).op, lambda x: torch.roll(x, 1, 0)),
    "tril": (lambda x: ops.tril(x, -1).op, lambda x: torch.tril(x, -1)),
    "pad": (lambda x: ops.pad(x, [1, 0, 0, 2]).op, lambda x: torch.nn.functional.pad(x, (0, 2, 1, 0))),
    "reshape": (lambda x: ops.reshape(x, [3, 8, 2]).op, lambda x: x.reshape(3, 8, 2)),
    "transpose": (lambda x: ops.transpose(x, [1, 0]).op, lambda x: x.T),
    "pool": (
        lambda x: ops.max_pool2d(ops.reshape(x, [1, 2, 4, 6]), 3, 2, 1).op,
        lambda x: torch.nn.functional.max_pool2d(x.reshape(1, 2, 4, 6), 3, 2, 1),
    ),
    "adaptive_pool": (
        lambda x: ops.adaptive_avg_pool2d(ops.reshape(x, [1, 2, 4, 6]), [3, 4]).op,
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x.reshape(1, 2, 4, 6), [3, 4]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_the_oracle_agrees_with_pytorch(name):
    build, peer = TORCH[name]
    x = np.random.default_rng(1).uniform(-3, 3, [6, 8])
    op = build(symbol([6, 8]))
    own = x.reshape([int(size) for size in op.inputs[0].shape])
    (got,) = evaluate(op.task, [own])
    np.testing.assert_allclose(got, peer(torch.from_numpy(x)).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_oracle_agrees_with_pytorch_on_convolutions(groups):
    rng = np.random.default_rng(2)
    x, w = rng.uniform(-1, 1, [2, 4, 6, 5]), rng.uniform(-1, 1, [8, 4 // groups, 3, 2])
    op = ops.conv2d(symbol([2, 4, 6, 5]), symbol(list(w.shape)), stride=2, padding=1, groups=groups).op
    want = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), stride=2, padding=1, groups=groups)
    np.testing.assert_allclose(evaluate(op.task, [x, w])[0], want.numpy(), rtol=1e-9)
    w = rng.uniform(-1, 1, [4, 2, 3, 2])
    op = ops.conv2d_transpose(symbol([2, 4, 6, 5]), symbol(list(w.shape)), stride=2, padding=1, groups=groups).op
    want = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x), torch.from_numpy(w), stride=2, padding=1, groups=groups
    )
    np.testing.assert_allclose(evaluate(op.task, [x, w])[0], want.numpy(), rtol=1e-9)


def test_integer_division_is_that_of_c():
    from hidet.graph.ops.utils import Task, compute, tensor_input

    x = tensor_input("x", "int32", [6])
    task = Task("divide", [x], [compute("q", [6], lambda i: x[i] / 4), compute("r", [6], lambda i: x[i] % 4)])
    quotient, remainder = evaluate(task, [np.array([-9, -4, -1, 1, 4, 9])])
    assert quotient.tolist() == [-2, -1, 0, 0, 1, 2]
    assert remainder.tolist() == [-1, 0, -1, 1, 0, 1]


def test_a_read_outside_a_tensor_is_an_error_unless_its_branch_is_not_taken():
    from hidet.graph.ops.utils import Task, compute, tensor_input
    from hidet.ir.expr import if_then_else

    x = tensor_input("x", "float32", [4])
    data = np.arange(4.0)
    guarded = Task("guarded", [x], [compute("y", [6], lambda i: if_then_else(i < 4, x[i], 0.0))])
    assert evaluate(guarded, [data])[0].tolist() == [0, 1, 2, 3, 0, 0]
    bare = Task("bare", [x], [compute("y", [6], lambda i: x[i])])
    with pytest.raises(OutOfRange, match="of 4"):
        evaluate(bare, [data])


KERNELS = {
    "matmul": lambda: ops.matmul(symbol([4, 6]), symbol([6, 8])).op,
    "slice": lambda: ops.strided_slice(symbol([4, 9]), [1], [8], [1], [3]).op,
    "conv": lambda: ops.conv2d(symbol([2, 4, 5, 5]), symbol([4, 2, 3, 3]), groups=2).op,
    "take": lambda: ops.take(symbol([6, 4]), symbol([2, 3], "int64"), 0).op,
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_oracle_agrees_with_hidets_own_kernels(name):
    op = KERNELS[name]()
    inputs = random_inputs(op, np.random.default_rng(3))
    kernel_inputs = [
        hidet.asarray(np.ascontiguousarray(x.astype(s.dtype.name))) for x, s in zip(inputs, op.inputs, strict=True)
    ]
    (got,) = op.compiled_task.run_async(kernel_inputs)
    np.testing.assert_allclose(got.numpy(), evaluate(op.task, inputs)[0], rtol=1e-5, atol=1e-5)


# Wrong rules, which the harness must catch

MESH = DeviceMesh((2,))


def failures(op: hidet.Operator, spec: str) -> list[str]:
    checked = check_specs(op, MESH, [OpShardSpec.parse(spec)], random_inputs(op, np.random.default_rng(4)))
    return [failure.what for failure in checked.failures]


def test_a_sharded_dim_that_is_padded_is_caught():
    # Padded by 2 on one side, each shard gets its own pad: the shapes fit, the values do not.
    op = ops.pad(symbol([4, 6]), [0, 2, 0, 0]).op
    assert not failures(op, "(S0, R) -> (S0, R)")
    assert failures(op, "(R, S0) -> (R, S0)") != []


def test_a_reduction_without_its_reduce_function_is_caught():
    op = ops.matmul(symbol([4, 6]), symbol([6, 8])).op
    assert not failures(op, "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)")
    assert "differs" in failures(op, "(R, S0), (S0, R) -> (R, R)")[0]
    assert "differs" in failures(op, "(R, S0), (S0, R) -> (R, R) | all_reduce(max, axes=0)")[0]


def test_a_slice_of_a_sharded_dim_is_caught():
    op = ops.reshape(symbol([4, 12]), [4, 3, 4]).op
    assert "differs" in failures(op, "(R, S0) -> (R, R, S0)")[0]
    op = ops.flip(symbol([4, 6]), [1]).op
    assert not failures(op, "(S0, R) -> (S0, R)")
    assert "differs" in failures(op, "(R, S0) -> (R, S0)")[0]
    # The query part of a fused query, key and value: half of the shards hold none of it.
    op = ops.strided_slice(symbol([4, 12]), [0], [4], [1], [1]).op
    assert failures(op, "(R, S0) -> (R, S0)") != []


def test_a_wrong_rule_that_ignores_what_is_pinned_is_caught():
    """The rule of tril as the access pattern alone would have it: both dims are indexed one to one."""
    rule = derive(ops.tril(symbol([4, 6]), 0).op)
    rule.factors = tuple(sorted({d for dim in rule.out_layouts[0] for d in dim or ()}))
    rule._proven = lambda *_: True  # type: ignore[method-assign]
    checked = check_operator(rule.op, MESH, np.random.default_rng(5), rule=rule)
    assert checked.choices == 3
    assert len(checked.failures) == 2


def test_reduce_functions_in_numpy():
    mesh = DeviceMesh((2, 2))
    parts = [np.full(4, rank, float) for rank in range(4)]
    assert [y.tolist() for y in apply_reduce(mesh, ReduceFn("all_reduce", "sum", (1,)), parts)] == [
        [1] * 4, [1] * 4, [5] * 4, [5] * 4,
    ]  # fmt: skip
    scattered = apply_reduce(mesh, ReduceFn("reduce_scatter", "max", (0,), 0), [p + np.arange(4) for p in parts])
    assert [y.tolist() for y in scattered] == [[2, 3], [3, 4], [4, 5], [5, 6]]


def test_an_operand_may_have_no_elements() -> None:
    """As the tokens before the last one of a sequence of one token."""
    joined = ops.concat([symbol(["before", 2]), symbol([1, 2])], axis=0)
    assert joined.op is not None
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    for before in (0, 2):
        (got,) = evaluate(joined.op.task, [rows[:before], rows[2:]], {"before": before})
        np.testing.assert_array_equal(got, np.concatenate([rows[:before], rows[2:]]))
