"""A choice is right for the operator that is rebuilt on shards, not for the access pattern of the whole one.

Each test names the ways to shard an operator on a small mesh, all of them, and runs them against the whole operator.
"""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph.ops.activation import SoftmaxOp, ThresholdOp
from hidet.graph.ops.arithmetic import SetStridedSliceOp
from hidet.graph.ops.attention.attention import AttnOp
from hidet.graph.ops.create import ArangeOp, LinSpaceOp, TriOp
from hidet.graph.ops.normalize.norm import NormalizeOp
from hidet.graph.ops.transform import CastOp, Im2ColOp
from hidet.graph.ops.utils import Task, compute, tensor_input
from hidet.ir.type import data_type

from hidet_dist.rules.access import UnsupportedDefinition, analyze
from hidet_dist.rules.local import rebuild
from hidet_dist.rules.rule import _spec, derive
from hidet_dist.soundness import check_operator, evaluate
from hidet_dist.spec import DeviceMesh, TensorShardSpec


def symbol(shape: list[int], dtype: str = "float32") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


def choices(op: hidet.Operator, mesh: tuple[int, ...] = (2,)) -> set[str]:
    """All choices but the replicated one, after each of them was run."""
    checked = check_operator(op, DeviceMesh(mesh), np.random.default_rng(0))
    assert not checked.failures, "\n".join(map(str, checked.failures))
    first, *others = (str(choice.spec) for choice in derive(op).choices(DeviceMesh(mesh)))
    assert "S" not in first
    assert checked.choices == len(others) + 1
    return set(others)


def test_the_dim_that_a_split_cuts_stays_whole():
    for part in ops.split(symbol([2, 4, 24]), 3, axis=2):
        assert choices(part.op) == {"(S0, R, R) -> (S0, R, R)", "(R, S0, R) -> (R, S0, R)"}


@pytest.mark.parametrize(("start", "end", "stride"), [(0, 4, 1), (4, 8, 1), (1, 8, 1), (0, 8, 2), (7, 0, -1)])
def test_a_slice_with_a_start_or_a_stride_keeps_its_dim_whole(start, end, stride):
    op = ops.strided_slice(symbol([4, 8]), [start], [end], [1], [stride]).op
    assert choices(op) == {"(S0, R) -> (S0, R)"}


def test_a_slice_of_everything_shards_like_a_copy():
    op = ops.strided_slice(symbol([4, 8]), [0, 2], [4, 6], [0, 1], [1, 1]).op
    assert choices(op) == {"(S0, R) -> (S0, R)"}


def test_a_padded_dim_stays_whole():
    assert choices(ops.pad(symbol([4, 8]), [0, 2, 0, 2]).op) == {"(S0, R) -> (S0, R)"}
    assert choices(ops.pad(symbol([4, 8]), [2, 0, 0, 0]).op) == {"(R, S0) -> (R, S0)"}


@pytest.mark.parametrize("triangle", [ops.tril, ops.triu])
def test_a_triangle_keeps_both_of_its_dims_whole(triangle):
    assert choices(triangle(symbol([2, 4, 4]), 1).op) == {"(S0, R, R) -> (S0, R, R)"}


def test_operators_that_count_from_the_end_or_around_keep_their_dim_whole():
    assert choices(ops.flip(symbol([4, 8]), [1]).op) == {"(S0, R) -> (S0, R)"}
    assert choices(ops.roll(symbol([4, 8]), [1], [1]).op) == {"(S0, R) -> (S0, R)"}
    assert choices(ops.cumsum(symbol([4, 8]), 1).op) == {"(S0, R) -> (S0, R)"}
    assert choices(ops.argmax(symbol([4, 8]), 1).op) == {"(S0, R) -> (S0)"}


def test_operators_with_indices_into_the_whole_keep_those_dims_whole():
    written = SetStridedSliceOp(symbol([4, 8]), 0.5, [0, 2], [4, 6], [], [1, 1])
    assert choices(written) == {"(S0, R) -> (S0, R)"}
    resized = ops.resize2d(symbol([2, 1, 4, 6]), size=(8, 6), method="linear").op
    assert choices(resized) == {"(S0, R, R, R) -> (S0, R, R, R)"}
    columns = Im2ColOp(symbol([2, 3, 4, 6]), [2, 3], [1, 1], [1, 1], [1, 1])
    assert choices(columns) == {"(S0, R, R, R) -> (S0, R, R)"}


@pytest.mark.parametrize("pool", [ops.max_pool2d, ops.avg_pool2d])
def test_a_pool_shards_no_dim_that_its_windows_slide_along(pool):
    assert choices(pool(symbol([2, 4, 6, 6]), 3, 2, 1).op) == {
        "(S0, R, R, R) -> (S0, R, R, R)",
        "(R, S0, R, R) -> (R, S0, R, R)",
    }


def test_an_adaptive_pool_with_uneven_windows_shards_neither_side():
    op = ops.adaptive_avg_pool2d(symbol([2, 4, 6, 6]), [4, 2]).op
    assert choices(op) == {"(S0, R, R, R) -> (S0, R, R, R)", "(R, S0, R, R) -> (R, S0, R, R)"}


def test_operators_whose_values_are_indices_are_replicated():
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")  # an operator without inputs would run right away
        made = [
            ArangeOp(0, 8, 1, hidet.int32, "cpu"),
            LinSpaceOp(0.0, 1.0, 8, dtype=hidet.float32, device="cpu"),
            TriOp(4, 4, 0, hidet.float32, "cpu"),
        ]
    for op in made:
        assert choices(op) == set()


def test_a_dense_convolution_shards_batch_channels_and_their_sum_but_no_window():
    op = ops.conv2d(symbol([2, 4, 6, 6]), symbol([8, 4, 3, 3]), padding=1).op
    assert choices(op) == {
        "(S0, R, R, R), (R, R, R, R) -> (S0, R, R, R)",
        "(R, R, R, R), (S0, R, R, R) -> (R, S0, R, R)",
        "(R, S0, R, R), (R, S0, R, R) -> (R, R, R, R) | all_reduce(sum, axes=0)",
        *(
            f"(R, S0, R, R), (R, S0, R, R) -> {out} | reduce_scatter(sum, axes=0, dim={dim})"
            for dim, out in enumerate(("(S0, R, R, R)", "(R, S0, R, R)", "(R, R, S0, R)", "(R, R, R, S0)"))
        ),
    }


@pytest.mark.parametrize("channels_a_group", [1, 2])
def test_a_grouped_convolution_shards_whole_groups(channels_a_group):
    x, w = symbol([3, 4 * channels_a_group, 5, 5]), symbol([8, channels_a_group, 3, 3])
    assert choices(ops.conv2d(x, w, groups=4).op) == {"(R, S0, R, R), (S0, R, R, R) -> (R, S0, R, R)"}


def test_a_grouped_transposed_convolution_shards_whole_groups():
    op = ops.conv2d_transpose(symbol([1, 8, 3, 3]), symbol([8, 3, 2, 2]), 1, 0, groups=4).op
    assert choices(op) == {"(R, S0, R, R), (S0, R, R, R) -> (R, S0, R, R)"}
    assert choices(op, (8,)) == set()


def test_more_devices_than_groups_do_not_cut_a_group():
    op = ops.conv2d(symbol([3, 4, 5, 5]), symbol([8, 2, 3, 3]), groups=2).op
    assert choices(op, (4,)) == set()


def test_a_kernel_as_wide_as_the_image_sums_over_it_unless_the_image_is_padded():
    x, w = symbol([1, 3, 4, 4]), symbol([5, 3, 4, 4])
    assert choices(ops.conv2d(x, w).op) == {
        "(R, R, S0, R), (R, R, S0, R) -> (R, R, R, R) | all_reduce(sum, axes=0)",
        "(R, R, R, S0), (R, R, R, S0) -> (R, R, R, R) | all_reduce(sum, axes=0)",
    }
    assert choices(ops.conv2d(x, w, padding=1).op) == set()
    assert choices(ops.conv2d(x, symbol([5, 3, 2, 2])).op) == set()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_shards_batch_and_heads_and_rows_only_where_no_mask_counts_them(causal):
    q, k, v = (symbol(shape, "float16") for shape in ([2, 4, 6, 3], [2, 4, 3, 6], [2, 4, 6, 3]))
    rows = "(R, R, S0, R), (R, R, R, R), (R, R, R, R) -> (R, R, S0, R)"
    assert choices(AttnOp(q, k, v, causal)) == {
        "(S0, R, R, R), (S0, R, R, R), (S0, R, R, R) -> (S0, R, R, R)",
        "(R, S0, R, R), (R, S0, R, R), (R, S0, R, R) -> (R, S0, R, R)",
    } | (set() if causal else {rows})


def test_attention_by_hand_is_attention():
    import torch

    from hidet_dist.rules.declared import definition_of

    rng = np.random.default_rng(1)
    q, k, v = (rng.uniform(-1, 1, [2, 3, 5, 4]) for _ in range(3))
    q_, k_, v_ = (symbol(shape, "float16") for shape in ([2, 3, 5, 4], [2, 3, 4, 5], [2, 3, 5, 4]))
    for causal in (False, True):
        op = AttnOp(q_, k_, v_, causal)
        (got,) = evaluate(definition_of(op), [q, k.transpose(0, 1, 3, 2), v])
        want = torch.nn.functional.scaled_dot_product_attention(
            *map(torch.from_numpy, (q, k, v)), is_causal=causal, scale=1.0
        )
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-9)


def test_a_broadcast_input_is_replicated_beside_a_sharded_one():
    op = ops.add(symbol([4, 8]), symbol([1, 8])).op
    assert choices(op) == {"(S0, R), (R, R) -> (S0, R)", "(R, S0), (R, S0) -> (R, S0)"}
    op = ops.take(symbol([10, 4]), symbol([6], "int64"), 0).op
    assert {"(R, R), (S0) -> (S0, R)", "(R, S0), (R) -> (R, S0)"} <= choices(op)


def test_a_concat_of_many_inputs_has_no_product_of_choices():
    op = ops.concat([symbol([2, 4, 6, 8]) for _ in range(12)], 0).op
    assert len(choices(op)) == 3
    assert len(choices(op, (2, 2))) == 14  # of (3 + 1) ** 2 - 1, one does not divide


def test_heads_split_off_stay_sharded_where_an_axis_covers_part_of_them():
    split = ops.reshape(symbol([3, 5, 24]), [3, 5, 6, 4]).op
    assert choices(split, (3,)) == {
        "(S0, R, R) -> (S0, R, R, R)",
        "(R, S0, R) -> (R, S0, R, R)",  # padded
        "(R, R, S0) -> (R, R, S0, R)",
    }
    # Six heads over four devices would cut a head; 2 x 3 devices have one head each.
    assert choices(split, (4,)) == set()
    assert "(R, R, S01) -> (R, R, S01, R)" in choices(split, (2, 3))
    merge = ops.reshape(symbol([3, 5, 6, 4]), [3, 5, 24]).op
    assert choices(merge, (2,)) == {
        "(R, R, S0, R) -> (R, R, S0)",
        "(S0, R, R, R) -> (S0, R, R)",  # padded
        "(R, S0, R, R) -> (R, S0, R)",  # padded
    }
    assert "(R, R, S01, R) -> (R, R, S01)" in choices(merge, (2, 3))


def test_devices_may_go_past_the_heads_into_them():
    split = ops.reshape(symbol([3, 24]), [3, 2, 12]).op
    assert "(R, S01) -> (R, S0, S1)" in choices(split, (2, 3))
    assert "(R, S01) -> (R, S1, S0)" not in choices(split, (3, 2))


def test_several_axes_share_a_factor():
    op = ops.matmul(symbol([8, 6]), symbol([6, 8])).op
    found = choices(op, (2, 2))
    assert "(S01, R), (R, R) -> (S01, R)" in found
    assert "(S0, S1), (S1, R) -> (S0, R) | all_reduce(sum, axes=1)" in found
    assert "(S0, S1), (S1, R) -> (S01, R) | reduce_scatter(sum, axes=1, dim=0)" in found
    k = ops.matmul(symbol([3, 8]), symbol([8, 3])).op
    assert choices(k, (2, 2)) >= {"(R, S01), (S01, R) -> (R, R) | all_reduce(sum, axes=01)"}


def test_partial_results_leave_only_linear_reductions():
    assert choices(ops.mean(symbol([3, 8]), [1]).op) == {"(R, S0) -> (R) | all_reduce(average, axes=0)"}
    # Rounded averages, and what is inside a normalisation.
    assert choices(ops.mean(symbol([3, 8], "int32"), [1]).op) == set()
    assert choices(SoftmaxOp(symbol([3, 8]), 1)) == set()
    assert choices(NormalizeOp(symbol([3, 8]), [1], 1e-5, "float32")) == set()


def test_bounds_that_are_in_no_attribute_survive_being_rebuilt():
    x = np.linspace(-4, 4, 8)
    for op in (ops.hardtanh(symbol([8]), -2.0, 3.0).op, ThresholdOp(symbol([8]), 0.5, 0.25)):
        (whole,) = evaluate(op.task, [x])
        for size in (8, 4):
            (local,) = rebuild(op, [symbol([size])], [(size,)])
            np.testing.assert_array_equal(evaluate(local.op.task, [x[:size]])[0], whole[:size])
            assert type(local.op) is type(op)


def test_a_division_that_borrows_from_higher_digits_has_no_normal_form():
    x = tensor_input("x", "float32", [6])
    # (16 + 8 i - j) / 8 is i + 2 for j = 0 but i + 1 for all other j.
    definition = analyze(Task("borrow", [x], [compute("y", [2, 8], lambda i, j: x[(i * 8 + 16 - j) / 8])]))
    assert definition.accesses[0].indices == (None,)
    assert len(definition.pinned) == 2


def test_a_diagonal_is_not_sharded_along_two_dims():
    x = tensor_input("x", "float32", [4, 4])
    task = Task("diagonal", [x], [compute("y", [4], lambda i: x[i, i])])
    (digits,) = analyze(task).out_digits[0]
    (digit,) = digits
    assert _spec((digits,), {digit: (0,)}, {digit: 2}) == TensorShardSpec(((0,),))
    assert _spec((digits, digits), {digit: (0,)}, {digit: 2}) is None


def test_a_symbolic_dim_has_no_rule_but_a_reason():
    op = ops.relu(hidet.symbol(["batch", 8], "float32", "cpu")).op
    rule = derive(op)
    assert rule.definition is None
    assert "symbolic" in rule.notation()
    with pytest.raises(UnsupportedDefinition, match="symbolic"):
        analyze(op.task)


def test_a_cast_to_int32_stays_one_when_it_is_rebuilt():
    for kind in ("int64", "float32", "int32"):
        op = CastOp(symbol([8], kind), data_type("int32"))
        assert op.outputs[0].dtype.name == "int32"
        assert rebuild(op, [symbol([4], kind)], [(4,)])[0].dtype.name == "int32"
