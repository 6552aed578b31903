"""Normalizations for inference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hidet import ops
from hidet.graph import Tensor
from hidet.ir.dtypes import float32, float64

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import to_dtype


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int | None = None) -> Tensor:
    """``x * weight + bias``; with ``dim`` the two are vectors along it, otherwise they broadcast from the last dim."""
    for vector, combine in ((weight, elementwise.mul), (bias, elementwise.add)):
        if vector is not None:
            aligned = vector if dim is None else ops.reshape(vector, [vector.shape[0], *[1] * (len(x.shape) - dim - 1)])
            x = combine(x, aligned)
    return x


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalization over the last dims, scaled and shifted."""
    return _affine(ops.layer_norm(x, len(normalized_shape), eps), weight, bias)


def native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer norm, the mean and the reciprocal standard deviation."""
    dims = [len(x.shape) - len(normalized_shape) + d for d in range(len(normalized_shape))]
    variance, mean = reductions.var_mean(x, dims, 0, keepdim=True)
    deviation = ops.rsqrt(elementwise.add(variance, eps))
    return layer_norm(x, normalized_shape, weight, bias, eps), mean, deviation


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalization over the channels (dim 1) of each group and all dims after them, scaled and shifted by channel."""
    batch, channels, *inner = x.shape
    grouped = ops.reshape(x, [batch, num_groups, channels // num_groups * math.prod(inner)])
    normal = ops.reshape(ops.layer_norm(grouped, 1, eps), [batch, channels, *inner])
    return _affine(normal, weight, bias, 1)


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalization over the dims after the channels (dim 1), scaled and shifted by channel."""
    return group_norm(x, int(x.shape[1]), weight, bias, eps)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """Normalization of each channel (dim 1) by known statistics, scaled and shifted."""
    scale = ops.rsqrt(elementwise.add(running_var, eps))
    scale = scale if weight is None else elementwise.mul(scale, weight)
    shift = elementwise.neg(elementwise.mul(running_mean, scale))
    shift = shift if bias is None else elementwise.add(shift, bias)
    return to_dtype(_affine(x, scale, shift, 1), x.dtype)


def batch_norm_of_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Normalization of each channel (dim 1) by the statistics of the batch, scaled and shifted."""
    dims = [d for d in range(len(x.shape)) if d != 1]
    variance, mean = reductions.var_mean(x, dims, 0, keepdim=True)
    normal = elementwise.mul(elementwise.sub(x, mean), ops.rsqrt(elementwise.add(variance, eps)))
    return _affine(normal, weight, bias, 1)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``x`` divided by the root of the mean of its squares over the last dims, and scaled.

    Halves are computed in float32, in which their squares do not overflow. ``eps`` is the machine epsilon of the dtype
    of the computation by default.
    """
    dims = [len(x.shape) - len(normalized_shape) + d for d in range(len(normalized_shape))]
    wide = x if x.dtype == float64 else to_dtype(x, float32)
    eps = float(np.finfo(wide.dtype.name).eps) if eps is None else eps
    squares = reductions.mean(ops.square(wide), dims, keepdim=True)
    normal = elementwise.mul(wide, ops.rsqrt(elementwise.add(squares, eps)))
    return to_dtype(_affine(normal, weight, None), x.dtype)
