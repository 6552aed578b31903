"""Lowerings of products: linear layers, matrix products, attention, convolutions."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, lower_plainly, lowers, static
from hidet_dist.frontends.pytorch.experts import by_gathered
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import attention, elementwise
from hidet_dist.operators.shaping import reshaped
from hidet_dist.spec.extents import extents_of


@lowers("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default")
def _matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    y = by_gathered(call, a, b)
    return operators.matmul(a, b) if y is None else y


@lowers("_int_mm.default")
def _int_mm(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return operators.integer_matmul(a, b, call.dtype)


@lowers("_trilinear.default")
def _trilinear(
    call: Call,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Multiply three tensors, each without the dims of its ``expand``, and sum over ``sumdim``."""
    letters = string.ascii_lowercase[: len(a.shape) + len(expand1)]
    *terms, result = (
        "".join(letter for dim, letter in enumerate(letters) if dim not in without)
        for without in (expand1, expand2, expand3, sumdim)
    )
    return operators.einsum(f"{','.join(terms)}->{result}", [a, b, c])


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
    **options: Any,
) -> Tensor:
    if dropout_p:
        raise Refused(f"attention has dropout {dropout_p}: pass 0 for it in evaluation mode")
    if attn_mask is not None and is_causal:
        raise Refused("attention has a mask and is_causal=True: let the mask hide later keys too")
    mask = _mask_of(call, attn_mask, is_causal, extents_of(q)[-2], extents_of(k)[-2], q.dtype.name)
    return operators.scaled_dot_product_attention(q, k, v, mask, **options)


def _mask_of(call: Call, x: Tensor | None, is_causal: bool, queries: Any, keys: Any, dtype: str) -> Any:
    """Return the mask of an attention, made once for all layers that share it; None for no mask.

    ``x`` is the mask in PyTorch, None for none; ``queries`` and ``keys`` are the lengths of the sequences.
    """
    values = None if x is None else call.known(x)
    if values is not None:
        shared = "is causal", x, str(queries), str(keys)
        is_causal = call.once(shared, lambda: attention.is_causal_mask(values, queries, keys))
    if is_causal:
        key = ("causal", str(queries), str(keys), dtype)
        return call.once(key, lambda: attention.causal_mask(queries, keys, dtype))
    if x is None:
        return None
    return call.once(("mask", x, dtype), lambda: attention.attention_mask(x, dtype, values))


@lowers("einsum.default")
def _einsum(call: Call, equation: str, operands: Sequence[Tensor], **_: Any) -> Tensor:
    try:
        return operators.einsum(equation, operands)
    except NotImplementedError as error:
        raise Refused(str(error)) from error


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
    before = [count // 2 for count in total]
    after = [count - first for count, first in zip(total, before, strict=True)]
    if before != after:  # the padding at the end is one longer
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
    is_single = len(x.shape) == len(weight.shape) - 1  # an image without a batch dim
    x = ops.unsqueeze(x, [0]) if is_single else x
    y = operators.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return reshaped(y, call.shape) if is_single else y


@lowers("cosine_similarity.default")
def _cosine_similarity(call: Call, a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    if not (a.shape or b.shape):
        return reshaped(_cosine_similarity(call, reshaped(a, [1]), reshaped(b, [1]), 0, eps), [])
    dim %= max(len(a.shape), len(b.shape))

    def length(x: Tensor) -> Tensor:
        return elementwise.clamp_min(ops.sqrt(ops.sum(ops.square(x), [dim])), eps)

    return ops.sum(a * b, [dim]) / (length(a) * length(b))


lower_plainly(
    {
        "linear.default": operators.linear,
        "addmm.default": operators.addmm,
        "baddbmm.default": operators.addmm,
        "addmv.default": operators.addmm,
    }
)
