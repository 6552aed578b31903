"""Resampling of images and signals.

Interpolation along a dim is a product with a constant matrix of weights; a row has two nonzero weights for linear
interpolation, and four for cubic. Nearest neighbours are a lookup at constant indices, or repeated elements if the
factor is an integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hidet.graph import Tensor
from hidet.ir.dtypes import float64

from hidet_dist.operators import shaping
from hidet_dist.operators.pooling import along_dim

CUBIC = -0.75
"""The coefficient of PyTorch's cubic kernel (a in Keys 1981)."""


def _steps(
    x: Tensor,
    sizes: Sequence[int],
    scales: Sequence[float | None] | float | None,
    align_corners: bool,
    precision: type[np.floating[Any]] | None = None,
) -> list[np.floating[Any]]:
    """Compute the distance in the input between two neighbours of the output, along each dim.

    That of double precision tensors is computed in double precision, as in PyTorch, and others in single precision.
    """
    precision = precision or (np.float64 if x.dtype == float64 else np.float32)
    dims = len(sizes)
    factors = [scales] * dims if scales is None or isinstance(scales, int | float) else list(scales)
    steps = []
    for size, out, scale in zip(x.shape[len(x.shape) - dims :], sizes, factors, strict=True):
        if align_corners:
            steps.append(precision(int(size) - 1) / precision(out - 1) if out > 1 else precision(0))
        elif scale is not None and float(scale) > 0:
            steps.append(precision(1.0 / float(scale)))
        else:
            steps.append(precision(int(size)) / precision(out))
    return steps


def upsample_nearest(
    x: Tensor, sizes: Sequence[int], scales: Sequence[float | None] | float | None = None, exact: bool = False
) -> Tensor:
    """Resample the last dims to ``sizes`` by the nearest element of the input.

    ``exact`` measures between the centres of elements, otherwise between their beginnings.
    """
    dims, rank = len(sizes), len(x.shape)
    # PyTorch looks for the nearest elements in single precision, whatever the dtype.
    for number, (out, step) in enumerate(zip(sizes, _steps(x, sizes, scales, False, np.float32), strict=True)):
        dim = rank - dims + number
        size = int(x.shape[dim])
        at = (np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0.0)) * step
        places = np.minimum(np.floor(at).astype(np.int64), size - 1)
        if out == size and (places == np.arange(size)).all():
            continue
        if out % size == 0 and (places == np.arange(out) // (out // size)).all():
            x = shaping.repeat_interleave(x, out // size, dim)
        else:
            x = shaping.take_along(x, places, dim)
    return x


def _sources(out: int, step: np.floating[Any], align_corners: bool) -> np.ndarray:
    places, half = np.arange(out, dtype=step.dtype), step.dtype.type(0.5)
    return step * places if align_corners else step * (places + half) - half


def linear_weights(size: int, source: np.ndarray) -> np.ndarray:
    """[size, out]: the fraction of each element of the input in each of the output, in the dtype of its ``source``.

    ``source`` are places in the input, float32[out] or float64[out].
    """
    dtype, out = source.dtype, len(source)
    source = np.maximum(source, dtype.type(0))
    left = np.minimum(source.astype(np.int64), size - 1)
    fraction = np.clip(source - left.astype(dtype), dtype.type(0), dtype.type(1))
    weights = np.zeros([size, out], dtype)
    np.add.at(weights, (left, np.arange(out)), dtype.type(1) - fraction)
    np.add.at(weights, (np.minimum(left + 1, size - 1), np.arange(out)), fraction)
    return weights


def cubic_weights(size: int, source: np.ndarray, coefficient: float = CUBIC) -> np.ndarray:
    """[size, out]: as :func:`linear_weights`, by the cubic kernel with this ``coefficient``."""
    dtype, out = source.dtype, len(source)
    left = np.floor(source)
    t, a = source - left, dtype.type(coefficient)

    def near(d: np.ndarray) -> np.ndarray:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: np.ndarray) -> np.ndarray:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    weights = np.zeros([size, out], dtype)
    for offset, fraction in ((-1, far(t + 1)), (0, near(t)), (1, near(1 - t)), (2, far(2 - t))):
        places = np.clip(left.astype(np.int64) + offset, 0, size - 1)
        np.add.at(weights, (places, np.arange(out)), fraction)
    return weights


def _cubic_kernel(d: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel at distances ``d`` (Keys 1981)."""
    d = np.abs(d)
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def stretched_weights(
    size: int, source: np.ndarray, stretch: float, coefficient: float | None = None, within: bool = True
) -> np.ndarray:
    """float64[size, out]: the weights of interpolation by a kernel that is ``stretch`` times as wide.

    A kernel as wide as the step between two outputs takes all elements in between into account (antialiasing).

    Parameters
    ----------
    size: int
        The elements of the input.
    source: array
        Where each element of the output lies in the input.
    stretch: float
        The factor of the kernel's width, at least 1.
    coefficient: float, optional
        That of a cubic kernel; without it the kernel is linear.
    within: bool
        Whether elements beyond the borders have no weight; otherwise they equal the element at the border.
    """
    radius = (1.0 if coefficient is None else 2.0) * stretch
    source = np.asarray(source, np.float64)
    first = np.floor(source - radius).astype(np.int64) + 1
    places = first + np.arange(math.ceil(2 * radius) + 1).reshape(-1, 1)
    distance = (places - source) / stretch
    fraction = np.maximum(1 - np.abs(distance), 0) if coefficient is None else _cubic_kernel(distance, coefficient)
    if within:
        fraction = np.where((places >= 0) & (places < size), fraction, 0.0)
    weights = np.zeros([size, len(source)])
    columns = np.broadcast_to(np.arange(len(source)), places.shape)
    np.add.at(weights, (np.clip(places, 0, size - 1), columns), fraction / fraction.sum(0))
    return weights


def upsample_antialiased(
    x: Tensor, sizes: Sequence[int], align_corners: bool, scales: Sequence[float | None] | float | None, cubic: bool
) -> Tensor:
    """Resample the last dims to ``sizes`` by linear or cubic interpolation that is wide enough for the step."""
    dims, rank = len(sizes), len(x.shape)
    for number, (out, step) in enumerate(zip(sizes, _steps(x, sizes, scales, align_corners), strict=True)):
        dim = rank - dims + number
        source = float(step) * (np.arange(out) + 0.5) - 0.5
        matrix = stretched_weights(int(x.shape[dim]), source, max(float(step), 1.0), -0.5 if cubic else None)
        if matrix.shape[0] != matrix.shape[1] or (matrix != np.eye(len(matrix))).any():
            x = along_dim(x, dim, matrix)
    return x


def upsample_linear(
    x: Tensor, sizes: Sequence[int], align_corners: bool, scales: Sequence[float | None] | float | None = None
) -> Tensor:
    """Resample the last dims to ``sizes`` by linear interpolation along each."""
    return _interpolated(x, sizes, align_corners, scales, cubic=False)


def upsample_cubic(
    x: Tensor, sizes: Sequence[int], align_corners: bool, scales: Sequence[float | None] | float | None = None
) -> Tensor:
    """Resample the last dims to ``sizes`` by cubic interpolation along each."""
    return _interpolated(x, sizes, align_corners, scales, cubic=True)


def _interpolated(
    x: Tensor,
    sizes: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None] | float | None,
    cubic: bool,
) -> Tensor:
    dims, rank = len(sizes), len(x.shape)
    steps = _steps(x, sizes, scales, align_corners)
    weights = cubic_weights if cubic else linear_weights
    for number in reversed(range(dims)):
        dim = rank - dims + number
        size, out = int(x.shape[dim]), int(sizes[number])
        matrix = weights(size, _sources(out, steps[number], align_corners))
        if size != out or (matrix != np.eye(size)).any():
            x = along_dim(x, dim, matrix)
    return x


def interpolate(
    x: Tensor,
    sizes: Sequence[int],
    mode: str = "nearest",
    align_corners: bool = False,
    scales: Sequence[float | None] | float | None = None,
) -> Tensor:
    """Resample the last dims to ``sizes``: nearest, nearest-exact, linear, bilinear, trilinear or bicubic.

    ``scales`` are the requested factors, if the steps follow from them rather than from the sizes.

    Raises ValueError for other modes.
    """
    if mode in ("nearest", "nearest-exact"):
        return upsample_nearest(x, sizes, scales, exact=mode != "nearest")
    if mode in ("linear", "bilinear", "trilinear"):
        return upsample_linear(x, sizes, align_corners, scales)
    if mode in ("cubic", "bicubic"):
        return upsample_cubic(x, sizes, align_corners, scales)
    raise ValueError(f"There is no interpolation by mode {mode!r}.")
