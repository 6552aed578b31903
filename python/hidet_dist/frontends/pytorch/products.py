"""Products: linear layers, matrix products, attention, convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hidet.graph import Tensor, ops
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import BroadcastOp

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, Refused, constant, lowers, static
from hidet_dist.frontends.pytorch.shapes import permuted, reshaped
from hidet_dist.operators import elementwise, reductions, to_dtype
from hidet_dist.operators.elementwise import SelectOp
from hidet_dist.spec.extents import extents_of, same_extent


def product(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
    """``a @ b``, or with the last two dims of ``b`` swapped; vectors are rows and columns, as NumPy has it."""
    if len(a.shape) == 1 and len(b.shape) == 1:
        return ops.sum(a * b, [0])
    if not transposed and b.op is not None and len(b.shape) >= 2:
        # What was transposed only to be multiplied by is read as it lies.
        swapped = [*range(len(b.shape) - 2), len(b.shape) - 1, len(b.shape) - 2]
        if list(b.op.attrs.get("axes", ())) == swapped and type(b.op).__name__ == "PermuteDimsOp":
            return MatmulOp(a, b.op.inputs[0], transpose_b=True).outputs[0]
    return MatmulOp(a, b, transpose_b=transposed).outputs[0]


@lowers("linear.default")
def _linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = product(x, weight, transposed=len(weight.shape) > 1)
    return found if bias is None else found + bias


@lowers("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default")
def _matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)


@lowers("addmm.default", "baddbmm.default", "addmv.default")
def _addmm(call: Call, x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    found = product(a, b)
    if alpha != 1:
        found = ops.multiply(found, constant(alpha, call.dtype))
    if beta == 0:
        return found
    return found + (x if beta == 1 else ops.multiply(x, constant(beta, call.dtype)))


@lowers("outer.default")
def _outer(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return ops.unsqueeze(a, [1]) * ops.unsqueeze(b, [0])


@lowers("scaled_dot_product_attention.default")
def _attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise Refused(f"attention has dropout {dropout_p}: pass 0 in evaluation mode")
    # The mask is a tensor of the graph: an operator that hid it could be sharded wrongly.
    size = extents_of(q)[-1]
    if scale is None:
        scale = 1 / math.sqrt(static(size, "the size of a head"))
    if enable_gqa:
        heads = extents_of(q)[-3]
        k, v = _grouped(k, heads), _grouped(v, heads)
    scores = ops.multiply(product(q, k, transposed=True), constant(float(scale), q.dtype.name))
    dtype, rows, columns = q.dtype.name, extents_of(q)[-2], extents_of(k)[-2]
    empty = None
    if is_causal:
        scores = scores + _causal(call, rows, columns, dtype)
    if attn_mask is not None:
        bias, empty = call.once(("mask", attn_mask, dtype), lambda: _bias(call, attn_mask, rows, columns, dtype))
        scores = scores + bias
    found = product(ops.softmax(scores, len(scores.shape) - 1), v)
    if empty is None:
        return found
    # Rows without any key are 0, as PyTorch has them.
    return elementwise.where(empty, 0.0, found)


def _grouped(x: Tensor, heads: Any) -> Tensor:
    """Each head of keys or values once for every head of queries in its group."""
    *batch, own, rows, size = extents_of(x)
    if same_extent(own, heads):
        return x
    wide = ops.broadcast(ops.unsqueeze(x, [len(batch) + 1]), [*batch, own, heads // own, rows, size])
    return reshaped(wide, [*batch, heads, rows, size])


def _causal(call: Call, rows: Any, columns: Any, dtype: str) -> Tensor:
    """What is added to scores so that no query sees later keys: 0, and the dtype's least number above the diagonal."""

    def make() -> Tensor:
        return ops.triu(ops.full([rows, columns], constant(_LEAST[dtype], dtype), dtype), 1)

    found: Tensor = call.once(("causal", str(rows), str(columns), dtype), make)
    return found


_LEAST: dict[str, float] = {
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
    "float32": -3.4028234663852886e38,
    "float64": -1.7976931348623157e308,
}


def _bias(call: Call, mask: Tensor, rows: Any, columns: Any, dtype: str) -> tuple[Tensor, Tensor | None]:
    """A mask as what is added to scores, and which rows it leaves no key; None where it leaves each row some."""
    values = call.known(mask)
    while isinstance(mask.op, BroadcastOp) and len(mask.op.inputs[0].shape) == len(mask.shape):
        mask = mask.op.inputs[0]  # sums broadcast by themselves
    is_bool = mask.dtype.name == "bool"
    if values is not None:
        seen = values if is_bool else values > float("-inf")
        if is_bool and bool((seen == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
            return _causal(call, rows, columns, dtype), None
    if is_bool:
        bias = SelectOp(mask, 0.0, _LEAST[dtype], dtype).outputs[0]
    else:
        bias = elementwise.clamp_min(to_dtype(mask, dtype), _LEAST[dtype])
    if values is not None and bool(seen.any(-1).all()):
        return bias, None
    # The least number itself is no -inf: a row of it is the mean of all values.
    keys = mask if is_bool else elementwise.ge(to_dtype(mask, dtype), _LEAST[dtype])
    return bias, elementwise.logical_not(reductions.any(keys, -1, True))


@lowers("einsum.default")
def _einsum(call: Call, equation: str, operands: Sequence[Tensor], **_: Any) -> Tensor:
    given, arrow, right = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if "." in equation or any(len(set(term)) != len(term) for term in (*terms, right)) or not arrow:
        raise Refused(f"the einsum {equation!r} is not supported: it has an ellipsis or repeats an index")
    made, own = operands[0], terms[0]
    for number in range(1, len(terms)):
        later = set("".join(terms[number + 1 :]) + right)
        made, own = _contracted(made, own, operands[number], terms[number], later)
    if gone := [dim for dim, name in enumerate(own) if name not in right]:
        made = ops.sum(made, gone)
        own = "".join(name for name in own if name in right)
    return permuted(made, [own.index(name) for name in right])


def _contracted(a: Tensor, own: str, b: Tensor, other: str, later: set[str]) -> tuple[Tensor, str]:
    """The product of two operands of an einsum, and the indices of its dims; those that are not asked for are gone."""
    a, own = _without(a, own, set(other) | later)
    b, other = _without(b, other, set(own) | later)
    batch = [name for name in own if name in other and name in later]
    inner = [name for name in own if name in other and name not in later]
    rows = [name for name in own if name not in other]
    columns = [name for name in other if name not in own]
    sizes = {**dict(zip(own, extents_of(a), strict=True)), **dict(zip(other, extents_of(b), strict=True))}

    def extent(names: Sequence[str]) -> Any:
        size: Any = 1
        for name in names:
            size = sizes[name] * size
        return size

    left = permuted(a, [own.index(name) for name in (*batch, *rows, *inner)])
    right = permuted(b, [other.index(name) for name in (*batch, *inner, *columns)])
    outer = [sizes[name] for name in batch]
    left = reshaped(left, [*outer, extent(rows), extent(inner)])
    right = reshaped(right, [*outer, extent(inner), extent(columns)])
    names = [*batch, *rows, *columns]
    return reshaped(product(left, right), [sizes[name] for name in names]), "".join(names)


def _without(x: Tensor, own: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [dim for dim, name in enumerate(own) if name not in kept]
    return (ops.sum(x, gone) if gone else x), "".join(name for name in own if name in kept)


@lowers("_grouped_mm.default", "transformers.grouped_mm_fallback.default")
def _grouped_mm(call: Call, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return product(a, b) if offs is None else operators.grouped_matmul(a, b, offs)


@lowers("conv1d.default", "conv2d.default", "conv3d.default")
def _conv(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    return _convolution(call, x, weight, bias, stride, padding, dilation, False, 0, groups)


@lowers("conv1d.padding", "conv2d.padding", "conv3d.padding")
def _conv_padding(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    rank = len(weight.shape) - 2
    steps = [dilation] * rank if isinstance(dilation, int) else [*dilation] * (rank // len(dilation))
    total = [
        step * (static(size, "the size of a kernel") - 1) if padding == "same" else 0
        for step, size in zip(steps, extents_of(weight)[2:], strict=True)
    ]
    before = [own // 2 for own in total]
    after = [own - first for own, first in zip(total, before, strict=True)]
    if before != after:
        pairs = zip(reversed(before), reversed(after), strict=True)
        x, before = operators.constant_pad_nd(x, [size for pair in pairs for size in pair]), [0] * rank
    return _convolution(call, x, weight, bias, stride, before, dilation, False, 0, groups)


@lowers("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def _conv_transpose(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    return _convolution(call, x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@lowers("convolution.default", "_convolution.default")
def _convolution(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_: Any,
) -> Tensor:
    single = len(x.shape) == len(weight.shape) - 1  # without a batch
    x = ops.unsqueeze(x, [0]) if single else x
    found = operators.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return reshaped(found, call.shape) if single else found


@lowers("cosine_similarity.default")
def _cosine_similarity(call: Call, a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    dim %= max(len(a.shape), len(b.shape))

    def length(x: Tensor) -> Tensor:
        return elementwise.clamp_min(ops.sqrt(ops.sum(ops.square(x), [dim])), eps)

    return ops.sum(a * b, [dim]) / (length(a) * length(b))
