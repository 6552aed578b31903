"""Convolutions that take fewer multiplications by Winograd's minimal filtering F(2 x 2, 3 x 3).

A tile of 2 x 2 pixels takes 16 multiplications for an input and an output channel, instead of 36 (Lavin and Gray, Fast
Algorithms for Convolutional Neural Networks, 2015, https://arxiv.org/abs/1509.09308). CPUs compute it by
``hidet_dist/winograd.h``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hidet_dist.native.signatures import WINOGRAD

if TYPE_CHECKING:  # serving imports this module, and not hidet
    from hidet.graph import Operator

    from hidet_dist.spec.extents import Extent

_TILE: int = WINOGRAD.constants["WINOGRAD_TILE"]
MATRICES: int = WINOGRAD.constants["WINOGRAD_MATRICES"]
"""The matrices that filters are transformed to: one for each pixel that a tile reads."""

_KERNEL = (3, 3)
_LEAST_CHANNELS: int = WINOGRAD.constants["WINOGRAD_LEAST_CHANNELS"]  # of the input and of the result
# The most multiplications over those of a convolution tap by tap: there are more where tiles reach beyond the image.
_MOST_MULTIPLICATIONS = 0.75
_READ_OPERATIONS, _WRITE_OPERATIONS = 32, 24  # additions of the transforms of a tile, for each channel (section 4.1)


def has_winograd(
    filters: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int, out: Sequence[Extent]
) -> bool:
    """Whether a convolution by float32 filters [out_channels, channels / groups, ...] takes fewer multiplications.

    ``out`` are the spatial dims of the result.
    """
    out_channels, channels, *kernel = filters
    if tuple(kernel) != _KERNEL or groups != 1 or min(out_channels, channels) < _LEAST_CHANNELS:
        return False
    if any(step != 1 for step in (*stride, *dilation)) or not all(isinstance(size, int) for size in out):
        return False
    sizes = [int(size) for size in out]
    return MATRICES * _tiles(sizes) <= _MOST_MULTIPLICATIONS * math.prod(kernel) * math.prod(sizes)


def winograd_operations(images: int, filters: Sequence[int], out: Sequence[int]) -> int:
    """Count the scalar operations of a convolution that has it: those of the products, and of the transforms."""
    out_channels, channels, *_ = filters
    products = 2 * MATRICES * channels * out_channels
    return images * _tiles(out) * (products + _READ_OPERATIONS * channels + _WRITE_OPERATIONS * out_channels)


def each_dim(op: Operator, name: str) -> list[int]:
    """Return an attribute of a convolution of hidet for each spatial dim."""
    value, dims = op.attrs[name], len(op.outputs[0].shape) - 2
    values = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (values * dims if len(values) == 1 else values)]


def _tiles(out: Sequence[int]) -> int:
    return math.prod(-(-size // _TILE) for size in out)
