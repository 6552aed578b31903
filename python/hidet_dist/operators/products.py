"""Matrix products, and products by experts."""

from __future__ import annotations

import numpy as np
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import PermuteDimsOp

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import Scalar, constant, to_dtype


def matmul(x: Tensor, y: Tensor, transposed: bool = False) -> Tensor:
    """``x @ y``, or with the last two dims of ``y`` swapped; leading dims broadcast; of vectors their dot product."""
    if len(x.shape) == 1 and len(y.shape) == 1:
        return reductions.sum(elementwise.mul(x, y), dtype=x.dtype)
    if x.dtype.is_float():
        if not transposed and (source := _swapped_from(y)) is not None:
            y, transposed = source, True  # what was transposed only to be multiplied by is read as it lies
        return MatmulOp(x, y, transpose_b=transposed).outputs[0]
    # hidet sums integers up in float32.
    if transposed:
        rank = len(y.shape)
        y = ops.permute_dims(y, [*range(rank - 2), rank - 1, rank - 2])
    if len(x.shape) == 1:
        return ops.squeeze(matmul(ops.unsqueeze(x, 0), y), len(y.shape) - 2)
    if len(y.shape) == 1:
        return reductions.sum(elementwise.mul(x, y), -1, dtype=x.dtype)
    products = elementwise.mul(ops.unsqueeze(x, len(x.shape)), ops.unsqueeze(y, len(y.shape) - 2))
    return reductions.sum(products, -2, dtype=x.dtype)


mm = bmm = mv = dot = matmul


def _swapped_from(y: Tensor) -> Tensor | None:
    """The tensor whose last two dims were swapped to give ``y``, where ``y`` is nothing else."""
    rank = len(y.shape)
    if rank < 2 or not isinstance(y.op, PermuteDimsOp):
        return None
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return y.op.inputs[0] if list(y.op.attrs["axes"]) == swapped else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` of ``weight[out, in]``, or of ``weight[in]``."""
    y = matmul(x, weight, transposed=len(weight.shape) > 1)
    return y if bias is None else elementwise.add(y, bias)


def addmm(x: Tensor, a: Tensor, b: Tensor, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """``beta * x + alpha * (a @ b)``; ``x`` is not read where beta is 0."""
    y = matmul(a, b)
    y = y if alpha == 1 else elementwise.mul(y, alpha)
    if beta == 0:
        return y
    return elementwise.add(y, x if beta == 1 else elementwise.mul(x, beta))


baddbmm = addmv = addmm


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
