"""For each family of operators a choice that an expert expects of it, run against the whole operator.

Where a model writes a layer as several operators, the choice must go through all of them without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.attention.attention import AttnOp
from hidet.graph.ops.attention.attention_mask import AttnMaskAddOp
from hidet.graph.ops.embedding_bag import EmbeddingBagOp
from hidet.graph.ops.scatter import scatter_add_

from hidet_dist import operators
from hidet_dist.normalize import normalize
from hidet_dist.rules.rule import RuleTable, derive
from hidet_dist.soundness import check_operator
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

MESH = DeviceMesh((2,))


def symbol(*shape: int, dtype: str = "float32") -> Tensor:
    return hidet.symbol(list(shape), dtype, "cpu")


def half(*shape: int) -> Tensor:
    return symbol(*shape, dtype="float16")


def index(*shape: int) -> Tensor:
    return symbol(*shape, dtype="int64")


def flag(*shape: int) -> Tensor:
    return symbol(*shape, dtype="bool")


QKV = (half(2, 4, 6, 3), half(2, 4, 3, 6), half(2, 4, 6, 3))
BATCH_OF_3 = "(S0, R, R, R), (S0, R, R, R), (S0, R, R, R)"
HEADS_OF_3 = "(R, S0, R, R), (R, S0, R, R), (R, S0, R, R)"

# The operator that makes a tensor, and choices of it on two devices.
SINGLE: dict[str, tuple[Callable[[], Tensor], tuple[str, ...]]] = {
    "attention: batch, heads, query rows": (
        lambda: AttnOp(*QKV, False).outputs[0],
        (
            f"{BATCH_OF_3} -> (S0, R, R, R)",
            f"{HEADS_OF_3} -> (R, S0, R, R)",
            "(R, R, S0, R), (R, R, R, R), (R, R, R, R) -> (R, R, S0, R)",
        ),
    ),
    "causal attention: batch, heads": (
        lambda: AttnOp(*QKV, True).outputs[0],
        (f"{BATCH_OF_3} -> (S0, R, R, R)", f"{HEADS_OF_3} -> (R, S0, R, R)"),
    ),
    "attention of one head of keys and values: query heads": (
        lambda: AttnOp(half(2, 4, 6, 3), half(2, 1, 3, 6), half(2, 1, 6, 3), False).outputs[0],
        ("(R, S0, R, R), (R, R, R, R), (R, R, R, R) -> (R, S0, R, R)",),
    ),
    "attention with a mask: heads beside the mask whole": (
        lambda: AttnMaskAddOp(*QKV, half(1, 1, 6, 6)).outputs[0],
        (f"{HEADS_OF_3}, (R, R, R, R) -> (R, S0, R, R)",),
    ),
    "embedding: rows of the table, features, tokens": (
        lambda: ops.take(symbol(12, 6), index(2, 4)),
        (
            "(S0, R), (R, R) -> (R, R, R) | all_reduce(sum, axes=0)",
            "(S0, R), (R, R) -> (R, S0, R) | reduce_scatter(sum, axes=0, dim=1)",
            "(R, S0), (R, R) -> (R, R, S0)",
            "(R, R), (S0, R) -> (S0, R, R)",
        ),
    ),
    "gather: the dim that is looked up in, others": (
        lambda: ops.gather(symbol(8, 4), index(6, 4), 0),
        ("(S0, R), (R, R) -> (R, R) | all_reduce(sum, axes=0)", "(R, S0), (R, S0) -> (R, S0)"),
    ),
    "scatter: dims that are not scattered along": (
        lambda: scatter_add_(symbol(8, 4), 0, index(6, 4), symbol(6, 4)),
        ("(R, S0), (R, S0), (R, S0) -> (R, S0)",),
    ),
    "embedding bag: features": (
        lambda: EmbeddingBagOp(index(8), symbol(12, 6), index(2), "mean").outputs[0],
        ("(R), (R, S0), (R) -> (R, S0)",),
    ),
    "concat: other dims": (
        lambda: ops.concat([symbol(4, 6), symbol(4, 8)], 1),
        ("(S0, R), (S0, R) -> (S0, R)",),
    ),
    "split: other dims": (lambda: ops.split(symbol(4, 12), 3, axis=1)[1], ("(S0, R) -> (S0, R)",)),
    "pad: other dims": (lambda: ops.pad(symbol(4, 6), [0, 1, 0, 1]), ("(S0, R) -> (S0, R)",)),
    "cumulative sum: other dims": (lambda: ops.cumsum(symbol(4, 6), 1), ("(S0, R) -> (S0, R)",)),
    "argmax: other dims": (lambda: ops.argmax(symbol(4, 6), 1), ("(S0, R) -> (S0)",)),
    "all: the least": (
        lambda: ops.all(flag(4, 6), axis=[1]),
        ("(R, S0) -> (R) | all_reduce(min, axes=0)", "(R, S0) -> (S0) | reduce_scatter(min, axes=0, dim=0)"),
    ),
    "any: the greatest": (lambda: ops.any(flag(4, 6), axis=[1]), ("(R, S0) -> (R) | all_reduce(max, axes=0)",)),
    "mean: an average": (lambda: ops.mean(symbol(4, 6), [1]), ("(R, S0) -> (R) | all_reduce(average, axes=0)",)),
    "product": (lambda: ops.prod(symbol(4, 6), [1]), ("(R, S0) -> (R) | all_reduce(product, axes=0)",)),
    "convolution 1-D: batch, channels out, channels in": (
        lambda: ops.conv1d(symbol(2, 4, 8), symbol(6, 4, 3)),
        (
            "(S0, R, R), (R, R, R) -> (S0, R, R)",
            "(R, R, R), (S0, R, R) -> (R, S0, R)",
            "(R, S0, R), (R, S0, R) -> (R, R, R) | all_reduce(sum, axes=0)",
        ),
    ),
    "convolution 3-D: batch, channels out, channels in": (
        lambda: ops.conv3d(symbol(2, 4, 3, 3, 3), symbol(6, 4, 2, 2, 2)),
        (
            "(S0, R, R, R, R), (R, R, R, R, R) -> (S0, R, R, R, R)",
            "(R, R, R, R, R), (S0, R, R, R, R) -> (R, S0, R, R, R)",
            "(R, S0, R, R, R), (R, S0, R, R, R) -> (R, R, R, R, R) | all_reduce(sum, axes=0)",
        ),
    ),
    "transposed convolution: channels out, channels in": (
        lambda: ops.conv2d_transpose(symbol(2, 4, 3, 3), symbol(4, 6, 2, 2), 1, 0),
        (
            "(R, R, R, R), (R, S0, R, R) -> (R, S0, R, R)",
            "(R, S0, R, R), (S0, R, R, R) -> (R, R, R, R) | all_reduce(sum, axes=0)",
        ),
    ),
    "grouped convolution: groups": (
        lambda: ops.conv2d(symbol(1, 8, 5, 5), symbol(8, 2, 3, 3), groups=4),
        ("(R, S0, R, R), (S0, R, R, R) -> (R, S0, R, R)",),
    ),
    "grouped transposed convolution: groups": (
        lambda: ops.conv2d_transpose(symbol(1, 8, 3, 3), symbol(8, 3, 2, 2), 1, 0, groups=2),
        ("(R, S0, R, R), (S0, R, R, R) -> (R, S0, R, R)",),
    ),
    "depthwise convolution: channels": (
        lambda: ops.conv2d(symbol(1, 8, 5, 5), symbol(8, 1, 3, 3), groups=8),
        ("(R, S0, R, R), (S0, R, R, R) -> (R, S0, R, R)",),
    ),
    "pooling: batch, channels": (
        lambda: ops.max_pool2d(symbol(2, 4, 6, 6), 3, 2, 1),
        ("(S0, R, R, R) -> (S0, R, R, R)", "(R, S0, R, R) -> (R, S0, R, R)"),
    ),
    "adaptive pooling: channels": (
        lambda: ops.adaptive_avg_pool2d(symbol(2, 4, 6, 6), [1, 1]),
        ("(R, S0, R, R) -> (R, S0, R, R)",),
    ),
    "layer norm: rows": (lambda: ops.layer_norm(symbol(2, 4, 6)), ("(R, S0, R) -> (R, S0, R)",)),
    "instance norm: channels": (lambda: ops.instance_norm(symbol(2, 4, 6, 6)), ("(R, S0, R, R) -> (R, S0, R, R)",)),
    "batched product of an einsum: batch, both matrices, the sum": (
        lambda: ops.einsum("bij,bjk->bik", [symbol(2, 4, 6), symbol(2, 6, 8)]),
        (
            "(S0, R, R), (S0, R, R) -> (S0, R, R)",
            "(R, S0, R), (R, R, R) -> (R, S0, R)",
            "(R, R, R), (R, R, S0) -> (R, R, S0)",
            "(R, R, S0), (R, S0, R) -> (R, S0, R) | reduce_scatter(sum, axes=0, dim=1)",
        ),
    ),
    "quantised product: columns with their scales, the sum": (
        lambda: hidet.graph.ops.quant.matmul.symmetric_quant_matmul(
            half(4, 6), symbol(6, 8, dtype="int8"), half(8)
        ),
        ("(R, R), (R, S0), (S0) -> (R, S0)", "(R, S0), (S0, R), (R) -> (R, R) | all_reduce(sum, axes=0)"),
    ),
    "quantisation: rows that have a scale of their own": (
        lambda: ops.symmetric_quantize(symbol(4, 6), dims=-1)[0],
        ("(S0, R) -> (S0, R), (S0)",),
    ),
    "quantisation: columns that have a scale of their own": (
        lambda: ops.symmetric_quantize(symbol(6, 6), dims=0)[0],
        ("(R, S0) -> (R, S0), (S0)",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SINGLE)
def test_a_family_has_the_choices_that_an_expert_expects(family):
    build, expected = SINGLE[family]
    op = build().op
    assert set(expected) <= {str(choice.spec) for choice in derive(op).choices(MESH)}
    assert check_operator(op, MESH, np.random.default_rng(0)).failures == []


def through(inputs: Sequence[tuple[Tensor, str]], y: Tensor, reduced: bool = False) -> set[str]:
    """How ``y`` can lie when the inputs lie as said and nothing is communicated, but for reduce functions if allowed.

    Constants may lie in any way.
    """
    view, table = GraphView(normalize(hidet.trace_from(y, [x for x, _ in inputs]))), RuleTable(MESH)
    lies = {view.names[x]: {spec} for x, spec in inputs}
    for op in view.operators:
        found: list[set[str]] = [set() for _ in op.outputs]
        for choice in table(op)[1]:
            wanted = [(view.names[x], str(spec)) for x, spec in zip(op.inputs, choice.spec.in_specs, strict=True)]
            if all(name in view.weights or spec in lies[name] for name, spec in wanted) and (
                reduced or not any(choice.spec.reduce_fns)
            ):
                for own, spec in zip(found, choice.spec.out_specs, strict=True):
                    own.add(str(spec))
        lies.update(zip((view.names[z] for z in op.outputs), found, strict=True))
    return lies[view.outputs[0]]


def weight(*shape: int) -> Tensor:
    return hidet.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32))


def rms_norm(x: Tensor) -> Tensor:
    scale = ops.rsqrt(ops.add(ops.mean(ops.square(x), [-1], keep_dim=True), 1e-5))
    return ops.multiply(ops.multiply(x, scale), weight(int(x.shape[-1])))


def test_rms_norm_shards_by_rows_and_by_features_with_a_mean_of_squares():
    x = symbol(2, 4, 8)
    assert "(R, S0, R)" in through([(x, "(R, S0, R)")], rms_norm(x))
    assert "(R, R, S0)" in through([(x, "(R, R, S0)")], rms_norm(x), reduced=True)
    assert "(R, R, S0)" not in through([(x, "(R, R, S0)")], rms_norm(x))


def test_batch_norm_shards_by_channels():
    x = symbol(2, 4, 6, 6)
    scale = ops.multiply(ops.subtract(x, weight(1, 4, 1, 1)), weight(1, 4, 1, 1))
    assert through([(x, "(R, S0, R, R)")], ops.add(scale, weight(1, 4, 1, 1))) == {"(R, S0, R, R)"}


def test_group_norm_shards_by_groups():
    x = symbol(2, 8, 6, 6)
    assert through([(x, "(R, S0, R, R)")], ops.group_norm(x, 4)) == {"(R, S0, R, R)"}


def test_rotary_embedding_shards_by_heads():
    x = symbol(2, 4, 6, 8)
    left, right = ops.split(x, 2, axis=3)
    turned = ops.concat([ops.negative(right), left], 3)
    y = ops.add(ops.multiply(x, weight(6, 8)), ops.multiply(turned, weight(6, 8)))
    assert through([(x, "(R, S0, R, R)")], y) == {"(R, S0, R, R)"}


def test_heads_of_keys_are_repeated_for_the_heads_of_queries_that_a_device_has():
    x = symbol(2, 2, 6, 8)
    wide = ops.broadcast(ops.unsqueeze(x, 2), [2, 2, 3, 6, 8])
    assert through([(x, "(R, S0, R, R)")], ops.reshape(wide, [2, 6, 6, 8])) == {"(R, S0, R, R)"}


def test_experts_stay_on_separate_devices_from_dispatch_to_combination():
    """Tokens whole on every device; each device has some experts, and the sum has what all of them made."""
    x, mask = symbol(8, 6), symbol(8, 4 * 2)
    sent = ops.reshape(ops.matmul(ops.transpose(mask, [1, 0]), x), [4, 2, 6])
    hidden = ops.gelu(ops.matmul(sent, weight(4, 6, 10)))
    made = ops.matmul(hidden, weight(4, 10, 6))
    inputs = [(x, "(R, R)"), (mask, "(R, S0)")]
    assert "(S0, R, R)" in through(inputs, made)
    combined = ops.matmul(mask, ops.reshape(made, [8, 6]))
    assert {"(R, R)", "(S0, R)"} <= through(inputs, combined, reduced=True)


def test_tokens_are_scattered_to_experts_and_gathered_by_features():
    x, slots = symbol(8, 6), index(8, 6)
    sent = scatter_add_(symbol(8, 6), 0, slots, x)
    inputs = [(sent.op.inputs[0], "(R, S0)"), (slots, "(R, S0)"), (x, "(R, S0)")]
    assert through(inputs, ops.gather(sent, slots, 0)) == {"(R, S0)"}


def test_a_number_is_scattered_where_the_indices_are():
    for number in (0.0, 1.0):
        slots = index(8, 2)
        groups = operators.scatter(symbol(8, 6), 1, slots, number)
        inputs = [(groups.op.inputs[0], "(S0, R)"), (slots, "(S0, R)")]
        assert through(inputs, groups) == {"(S0, R)"}


def test_axes_that_split_merged_dims_in_descending_order_stay():
    x = symbol(2, 3, 8)
    choices = {str(c.spec) for c in derive(ops.reshape(x, [6, 8]).op).choices(DeviceMesh((3, 2)))}
    assert "(S1, S0, R) -> (S10, R)" in choices
