"""Matrix products, attention, and products by experts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.ir.dtypes import boolean

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import Scalar, constant, to_dtype


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, leading dims broadcast; of vectors their dot product."""
    if len(x.shape) == 1 and len(y.shape) == 1:
        return reductions.sum(elementwise.mul(x, y), dtype=x.dtype)
    if x.dtype.is_float():
        return ops.matmul(x, y)
    # hidet sums integers up in float32.
    if len(x.shape) == 1:
        return ops.squeeze(matmul(ops.unsqueeze(x, 0), y), len(y.shape) - 2)
    if len(y.shape) == 1:
        return reductions.sum(elementwise.mul(x, y), -1, dtype=x.dtype)
    products = elementwise.mul(ops.unsqueeze(x, len(x.shape)), ops.unsqueeze(y, len(y.shape) - 2))
    return reductions.sum(products, -2, dtype=x.dtype)


mm = bmm = mv = dot = matmul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of ``weight[out, in]``."""
    y = MatmulOp(x, weight, transpose_b=True).outputs[0]
    return y if bias is None else elementwise.add(y, bias)


def addmm(x: Tensor, a: Tensor, b: Tensor, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """``beta * x + alpha * (a @ b)``; ``x`` is not read where beta is 0."""
    y = matmul(a, b)
    y = y if alpha == 1 else elementwise.mul(y, alpha)
    if beta == 0:
        return y
    return elementwise.add(y, x if beta == 1 else elementwise.mul(x, beta))


baddbmm = addmv = addmm


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query @ key.T * scale + mask) @ value``, shapes [..., heads, length, size].

    A mask is bool (true where a key is seen) or is added. ``is_causal`` lets query i see the keys up to i. With
    ``enable_gqa`` there may be fewer heads of keys and values, each for as many heads of queries. Dropout is that of
    inference: none.

    Raises ValueError when there are a mask and causality, or dropout.
    """
    if dropout_p:
        raise ValueError(f"Attention has dropout {dropout_p}: put the model into inference mode (eval()).")
    if attn_mask is not None and is_causal:
        raise ValueError("Attention takes either a mask or is_causal=True.")
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated_heads(x, query.shape[-3]) for x in (key, value))
    scale = 1.0 / math.sqrt(int(query.shape[-1])) if scale is None else scale
    rank = len(key.shape)
    turned = ops.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2])
    scores = elementwise.mul(matmul(query, turned), scale)
    hides = False
    if is_causal:
        rows, columns = int(query.shape[-2]), int(key.shape[-2])
        attn_mask = constant(np.tril(np.ones([rows, columns], bool)), boolean, query)
    if attn_mask is not None and attn_mask.dtype.is_boolean():
        hides = not is_causal
        scores = elementwise.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        hides = True
        scores = elementwise.add(scores, attn_mask)
    # A query that sees no key has no weights; PyTorch gives it zeros.
    weights = reductions.safe_softmax(scores, -1) if hides else reductions.softmax(scores, -1)
    return matmul(weights, value)


def _repeated_heads(x: Tensor, heads: Any) -> Tensor:
    *batch, groups, length, size = x.shape
    wide = ops.broadcast(ops.unsqueeze(x, len(batch) + 1), [*batch, groups, heads // groups, length, size])
    return ops.reshape(wide, [*batch, heads, length, size])


def grouped_matmul(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Products of consecutive rows with a matrix each: ``out[s] = x[s] @ weight[e]`` for the expert e of row s.

    Each expert's part of a row is masked, so that one product over all experts and inner dims gives the result: its
    shape does not depend on data, and it shards by experts, inner dims, columns and rows alike. It takes as many
    operations as if every expert computed every row.

    Parameters
    ----------
    x: Tensor
        [rows, inner]; the rows of expert 0 first, and so on.
    weight: Tensor
        [experts, inner, columns].
    offs: Tensor
        int[experts], ascending: the row behind the last one of each expert. Rows behind the last of all are zeros.

    Returns
    -------
    Tensor
        [rows, columns].

    Raises
    ------
    ValueError
        For operands of other ranks.
    """
    if (len(x.shape), len(weight.shape)) != (2, 3):
        raise ValueError(
            "Grouped products are supported of x[rows, inner] and weight[experts, inner, columns], and not of "
            f"{list(x.shape)} and {list(weight.shape)}."
        )
    rows, inner = x.shape
    experts, _, columns = weight.shape
    ends = ops.reshape(to_dtype(offs, "int64"), [1, experts])
    starts = ops.pad(ops.strided_slice(ends, [0], [experts - 1], [1]), [0, 1, 0, 0], value=0)
    row = constant(np.arange(int(rows)).reshape(-1, 1), "int64", x)
    own = elementwise.logical_and(elementwise.ge(row, starts), elementwise.lt(row, ends))
    # Zeros by choice and not by multiplication: what is not a finite number must not reach the others.
    masked = elementwise.where(ops.unsqueeze(own, 2), ops.unsqueeze(x, 1), 0)
    return ops.matmul(ops.reshape(masked, [rows, experts * inner]), ops.reshape(weight, [experts * inner, columns]))
