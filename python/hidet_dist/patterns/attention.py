"""Pattern matching of attention: two products with a softmax between them, which are one kernel.

hidet's own attention operator and rewrites are not used: the rewrites also match products whose second operand is
transposed, and the operator's definition is wrong for different numbers of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hidet.graph import Operator, Tensor
from hidet.graph.ops.arithmetic import AddOp, ClampOp, DivideScalarOp, MultiplyScalarOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import (
    BroadcastOp,
    CastOp,
    PermuteDimsOp,
    ReshapeOp,
    UnsqueezeOp,
)

from hidet_dist.patterns.rows import softmax_of
from hidet_dist.rewriting import Uses, only_user
from hidet_dist.spec.extents import Extent, evaluate, extents_of, quotient, same_extent, same_shape
from hidet_dist.traits import traits_of

DTYPES = ("float16", "bfloat16", "float32")
LONGEST_HEAD = 128
"""The supported sizes of a head: larger ones would not stay in registers."""
HEAD_STEP = 16
"""The size of a head must be a multiple of this: the inner dim of the tensor cores' product."""


LEAST_QUERIES = 16
"""The least number of queries of attention that is one kernel on CPUs. With fewer, it takes longer to bring keys and
values into panels than to multiply by them."""


@dataclass(frozen=True)
class Attention:
    """``softmax(q k^T * scale + bias) v``, by the tensors that its kernel reads.

    Attributes
    ----------
    q: the queries; ``q_in_memory``: whether they are in memory anyway, so that their computation is not fused.
    k: the keys; ``k_axes``: the permutation of their dims that the kernel needs, None if it needs none. They, and the
        values ``v``, may have fewer heads than the queries, each for several heads of queries.
    bias: the bias, or None.
    scale: the factor of the scores.
    """

    q: Tensor
    q_in_memory: bool
    k: Tensor
    k_axes: tuple[int, ...] | None
    v: Tensor
    bias: Tensor | None
    scale: float

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the kernel reads."""
        return [self.q, self.k, self.v, *([] if self.bias is None else [self.bias])]


@dataclass(frozen=True)
class _ScoresPattern:
    """``q k^T * scale + bias``: the operands of the product, whether the second is transposed, scale and bias."""

    q: Tensor
    k: Tensor
    keys_first: bool
    scale: float
    bias: Tensor | None


def attention_of(op: Operator, uses: Uses) -> Attention | None:
    """Match the last product of an attention that the kernels support; None for any other operator."""
    if not isinstance(op, MatmulOp) or op.attrs["transpose_b"] or op.outputs[0].dtype.name not in DTYPES:
        return None
    weights, v = op.inputs
    scores = _scores(_weighted(weights, uses), uses)
    if scores is None or not _fits(scores, v, op.outputs[0]):
        return None
    k, axes = scores.k, list(range(len(scores.k.shape)))
    if not scores.keys_first:
        if isinstance(k.op, PermuteDimsOp):
            axes, k = list(k.op.attrs["axes"]), k.op.inputs[0]
        axes[-2:] = axes[:-3:-1]
    permuted = None if axes == sorted(axes) else tuple(axes)
    keys = _one_head_each(k) if permuted is None else k
    in_memory = _lies_in_memory(scores.q, uses)
    return Attention(scores.q, in_memory, keys, permuted, _one_head_each(v), scores.bias, scores.scale)


def has_cpu_kernel(match: Attention, sizes: Mapping[str, int] = MappingProxyType({})) -> bool:
    """Whether attention is one kernel on CPUs (``hidet_dist/kernels/attention.h``).

    It is for float32 and :data:`LEAST_QUERIES` or more, by the ``sizes`` of symbols that are planned for, with as many
    heads of keys as of values, where those differ from the heads of queries.
    """
    return (
        all(x.dtype.name == "float32" for x in match.inputs)
        and math.isfinite(match.scale)
        and evaluate(extents_of(match.q)[-2], sizes) >= LEAST_QUERIES
        and groups_of(match) is not None
    )


def groups_of(match: Attention) -> tuple[Extent, int] | None:
    """Return the number of groups of heads that share keys or values, and of the heads of each.

    None if keys and values are shared by different numbers of heads, or by numbers that sizes of symbols decide.
    """
    heads, values = (extents_of(x)[-3] for x in (match.q, match.v))
    keys = extents_of(match.k)[-3 if match.k_axes is None else match.k_axes[-3]]
    shared = [one for one in (keys, values) if not same_extent(one, heads)]
    if not shared:
        return heads, 1
    number = quotient(heads, shared[0]) if all(same_extent(one, shared[0]) for one in shared) else None
    return None if number is None else (shared[0], number)


def _weighted(weights: Tensor, uses: Uses) -> Tensor | None:
    """Find the argument of the softmax that computes the weights, through casts; None if there is none."""
    x = weights
    while isinstance(x.op, CastOp | ClampOp) and only_user(x, uses) is not None:
        if isinstance(x.op, ClampOp) and (x.op.attrs["min_value"] > 0 or x.op.attrs["max_value"] < 1):
            return None  # a softmax has values from 0 to 1
        x = x.op.inputs[0]
        if not x.dtype.is_float():
            return None
    return None if x.op is None or only_user(x, uses) is None else softmax_of(x.op, uses)


def _scores(x: Tensor | None, uses: Uses) -> _ScoresPattern | None:
    """Match the argument of a softmax: a scaled product, plus a bias."""
    if x is None:
        return None
    bias: Tensor | None = None
    if isinstance(x.op, AddOp) and _reads(x, uses, 2):
        a, b = x.op.inputs
        first = _product(a, uses)
        matched, bias = (first, b) if first is not None else (_product(b, uses), a)
        if not same_shape(extents_of(x), extents_of(a if first is not None else b)):
            return None
    else:
        matched = _product(x, uses, 2)
    if matched is None:
        return None
    product, scale = matched
    q, k = product.inputs
    return _ScoresPattern(q, k, bool(product.attrs["transpose_b"]), scale, bias)


def _product(x: Tensor, uses: Uses, readers: int = 1) -> tuple[Operator, float] | None:
    """Match a product times a number, through casts."""
    scale = 1.0
    while _reads(x, uses, readers):
        op = x.op
        if isinstance(op, MatmulOp):
            return (op, scale) if op.outputs[0].dtype.name in DTYPES else None
        if isinstance(op, MultiplyScalarOp):
            scale *= float(op.attrs["scalar"])
        elif isinstance(op, DivideScalarOp):
            scale /= float(op.attrs["scalar"])
        elif not isinstance(op, CastOp) or not op.inputs[0].dtype.is_float():
            return None
        x, readers = op.inputs[0], 1
    return None


def _reads(x: Tensor, uses: Uses, readers: int) -> bool:
    """Whether a tensor has exactly ``readers`` uses, all by operators: a softmax reads its argument twice."""
    users = uses.get(x, ())
    return len(users) == readers and all(user is not None for user in users)


def _fits(scores: _ScoresPattern, v: Tensor, output: Tensor) -> bool:
    q, k = scores.q, scores.k
    if not len(q.shape) == len(k.shape) == len(v.shape) > 2:
        return False
    *outer, queries, size = extents_of(q)
    *_, keys, _ = held = _keys_shape(scores)
    # Outputs and keys have other shapes where a product broadcasts.
    alike = [(extents_of(v), held), (extents_of(output), [*outer, queries, size]), (held, [*outer, keys, size])]
    if not isinstance(size, int) or not all(same_shape(a, b) for a, b in alike):
        return False
    return q.dtype == k.dtype == v.dtype and size <= LONGEST_HEAD and size % HEAD_STEP == 0


def _lies_in_memory(x: Tensor, uses: Uses) -> bool:
    """Whether a tensor is a product, with an epilogue at most, that is written to memory in its layout."""
    while x.op is not None and not isinstance(x.op, MatmulOp):
        computed = [y for y in x.op.inputs if y.op is not None]
        traits = traits_of(x.op)
        if not (traits.elementwise or traits.renames) or len(computed) != 1 or only_user(computed[0], uses) is None:
            return False
        x = computed[0]
    return x.op is not None


def _keys_shape(scores: _ScoresPattern) -> list[Extent]:
    *outer, a, b = extents_of(scores.k)
    return [*outer, a, b] if scores.keys_first else [*outer, b, a]


def _one_head_each(x: Tensor) -> Tensor:
    """Return the heads before their repetition for groups of queries; ``x`` itself if they are not repeated."""
    if not isinstance(x.op, ReshapeOp) or not isinstance(x.op.inputs[0].op, BroadcastOp):
        return x
    wide = x.op.inputs[0]
    narrow = wide.op.inputs[0]
    shape, group, before = extents_of(x), extents_of(wide), extents_of(narrow)
    if len(group) != len(shape) + 1 or len(before) != len(group) or not isinstance(narrow.op, ReshapeOp | UnsqueezeOp):
        return x
    heads = narrow.op.inputs[0]
    dim = len(shape) - 3
    single = [*group[: dim + 1], 1, *group[dim + 2 :]]
    merged = [*group[:dim], group[dim] * group[dim + 1], *group[dim + 2 :]]
    alike = [(before, single), (shape, merged), (extents_of(heads), [*group[: dim + 1], *group[dim + 2 :]])]
    return heads if all(same_shape(a, b) for a, b in alike) else x
