"""Pattern matching of attention in a program: two products with a softmax between them.

hidet's own attention operator and rewrites are not used: the rewrites also match products whose second operand is
transposed, and the operator's definition is wrong for different numbers of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.arithmetic import AddOp, ClampOp, DivideScalarOp, MultiplyScalarOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.special import barrier
from hidet.graph.ops.transform import (
    BroadcastOp,
    CastOp,
    PermuteDimsOp,
    ReshapeOp,
    UnsqueezeOp,
)
from hidet.ir.expr import is_constant

from hidet_dist.compile.cuda.attention import DTYPES, HEAD_STEP, LONGEST_HEAD, AttentionOp
from hidet_dist.compile.cuda.find_rows import softmax_of
from hidet_dist.elementwise import ELEMENTWISE
from hidet_dist.renaming import RENAMINGS
from hidet_dist.rewriting import Build, Repeated, Uses, only_user, replace_operators
from hidet_dist.spec.extents import Extent, extents_of


@dataclass(frozen=True)
class _Scores:
    """``q k^T * scale + bias``: the operands of the product, whether the second is transposed, scale and bias."""

    q: Tensor
    k: Tensor
    keys_first: bool
    scale: float
    bias: Tensor | None


def attention_in_one_kernel(graph: FlowGraph) -> FlowGraph:
    """Return an equivalent graph with each attention as one operator; the given graph is not changed."""

    repeated = Repeated()

    def replaced(op: Operator, uses: Uses) -> tuple[list[Tensor], Build] | None:
        if not isinstance(op, MatmulOp) or op.attrs["transpose_b"] or op.outputs[0].dtype.name not in DTYPES:
            return None
        weights, v = op.inputs
        scores = _scores(_weighted(weights, uses), uses)
        if scores is None or not _fits(scores, v, op.outputs[0]):
            return None
        copied = _lies_in_memory(scores.q, uses)
        inputs = [scores.q, scores.k, v, *([] if scores.bias is None else [scores.bias])]

        def build(inputs: list[Tensor]) -> Tensor:
            q, k, v, *rest = inputs
            k, axes = (k, None) if scores.keys_first else _transposed(k)
            read = [q, k if axes else _one_head_each(k), _one_head_each(v), *rest]
            key = scores.scale, copied, axes
            return repeated(key, read, lambda: [_attention(read, scores.scale, copied, axes)])[0]

        return inputs, build

    return replace_operators(graph, replaced)


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


def _scores(x: Tensor | None, uses: Uses) -> _Scores | None:
    """Match the argument of a softmax: a scaled product, plus a bias."""
    if x is None:
        return None
    bias: Tensor | None = None
    if isinstance(x.op, AddOp) and _reads(x, uses, 2):
        a, b = x.op.inputs
        first = _product(a, uses)
        matched, bias = (first, b) if first is not None else (_product(b, uses), a)
        if extents_of(x) != extents_of(a if first is not None else b):
            return None
    else:
        matched = _product(x, uses, 2)
    if matched is None:
        return None
    product, scale = matched
    q, k = product.inputs
    return _Scores(q, k, bool(product.attrs["transpose_b"]), scale, bias)


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


def _fits(scores: _Scores, v: Tensor, output: Tensor) -> bool:
    q, k = scores.q, scores.k
    tensors = [q, k, v, output, *([] if scores.bias is None else [scores.bias])]
    if not all(is_constant(*x.shape) for x in tensors) or not len(q.shape) == len(k.shape) == len(v.shape) > 2:
        return False
    *outer, queries, size = extents_of(q)
    *_, keys, _ = held = _keys_shape(scores)
    if held[-1] != size or list(extents_of(v)) != held or extents_of(output) != (*outer, queries, size):
        return False
    if held != [*outer, keys, size]:  # a product that broadcasts
        return False
    return q.dtype == k.dtype == v.dtype and int(size) <= LONGEST_HEAD and int(size) % HEAD_STEP == 0


def _lies_in_memory(x: Tensor, uses: Uses) -> bool:
    """Whether a tensor is a product, with an epilogue at most, that is written to memory in its layout."""
    while x.op is not None and not isinstance(x.op, MatmulOp):
        computed = [y for y in x.op.inputs if y.op is not None]
        if (
            not isinstance(x.op, (*ELEMENTWISE, *RENAMINGS))
            or len(computed) != 1
            or only_user(computed[0], uses) is None
        ):
            return False
        x = computed[0]
    return x.op is not None


def _keys_shape(scores: _Scores) -> list[Extent]:
    *outer, a, b = extents_of(scores.k)
    return [*outer, a, b] if scores.keys_first else [*outer, b, a]


def _attention(inputs: list[Tensor], scale: float, copied: bool, axes: tuple[int, ...] | None) -> Tensor:
    """Build the operator on queries, keys, values and a bias or none; ``axes`` permute the dims of the keys."""
    q, k, v, *rest = inputs
    keys = barrier(ops.permute_dims(k, list(axes)) if axes else k)
    bias = ops.cast(rest[0], "float32") if rest else _nothing(q)
    return AttentionOp(barrier(q) if copied else q, keys, barrier(v), bias, scale, copied).outputs[0]


def _transposed(x: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Swap the last two dims, merged with a permutation of them: return a tensor, and the axes to permute it by."""
    axes = list(range(len(x.shape)))
    if isinstance(x.op, PermuteDimsOp):
        axes, x = list(x.op.attrs["axes"]), x.op.inputs[0]
    axes[-2:] = axes[:-3:-1]
    return x, None if axes == sorted(axes) else tuple(axes)


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
    if (
        list(before) != single
        or list(shape) != merged
        or list(extents_of(heads)) != [*group[: dim + 1], *group[dim + 2 :]]
    ):
        return x
    return heads


def _nothing(q: Tensor) -> Tensor:
    """Make a bias of zero."""
    return ops.full([1] * len(q.shape), 0.0, "float32", q.device)
