"""Sampling of images and volumes at the points of a grid.

The elements around a point are looked up in the flattened image, and added up with weights that depend on the point. So
the batch, the channels and the points shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hidet import ops
from hidet.graph import Tensor

from hidet_dist.operators import elementwise, shaping
from hidet_dist.operators.dtypes import to_dtype
from hidet_dist.operators.resampling import CUBIC

MODES = ("linear", "nearest", "cubic")
PADDINGS = ("zeros", "border", "reflection")


def _reflected(x: Tensor, size: int, align_corners: bool) -> Tensor:
    """Reflect a coordinate at the borders of a dim as often as is needed to come to lie within it."""
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span == 0:
        return elementwise.mul(x, 0.0)
    distance = elementwise.abs(elementwise.sub(x, low))
    # A period leads there and back.
    rest = elementwise.fmod(distance, 2 * span)
    folded = elementwise.sub(span, elementwise.abs(elementwise.sub(rest, span)))
    return elementwise.add(folded, low)


def _padded_coordinate(x: Tensor, size: int, padding: str, align_corners: bool) -> Tensor:
    """Move a coordinate into a dim as the mode of padding says; zeros are put in later."""
    if padding == "zeros":
        return x
    if padding == "reflection":
        x = _reflected(x, size, align_corners)
    return elementwise.clamp(x, 0.0, float(size - 1))


def _weights(x: Tensor, mode: str) -> list[tuple[Tensor, Tensor | None]]:
    """The whole coordinates around ``x`` along a dim, and their weights; None for a weight of 1."""
    if mode == "nearest":
        return [(elementwise.round(x), None)]
    left = elementwise.floor(x)
    t = elementwise.sub(x, left)
    if mode == "linear":
        return [(left, elementwise.sub(1.0, t)), (elementwise.add(left, 1.0), t)]
    a = CUBIC

    def near(d: Tensor) -> Tensor:
        inner = elementwise.sub(elementwise.mul(d, a + 2), a + 3)
        return elementwise.add(elementwise.mul(elementwise.mul(inner, d), d), 1.0)

    def far(d: Tensor) -> Tensor:
        inner = elementwise.mul(elementwise.sub(elementwise.mul(d, a), 5 * a), d)
        return elementwise.sub(elementwise.mul(elementwise.add(inner, 8 * a), d), 4 * a)

    taps = (
        (-1.0, far(elementwise.add(t, 1.0))),
        (0.0, near(t)),
        (1.0, near(elementwise.sub(1.0, t))),
        (2.0, far(elementwise.sub(2.0, t))),
    )
    return [(elementwise.add(left, offset), weight) for offset, weight in taps]


def grid_sample(x: Tensor, grid: Tensor, mode: str, padding: str, align_corners: bool) -> Tensor:
    """Sample ``x[batch, channels, *inner]`` at the points ``grid[batch, *outer, dims]``: [batch, channels, *outer].

    Parameters
    ----------
    x: Tensor
        Images or volumes, of known inner sizes.
    grid: Tensor
        Coordinates from -1 to 1, that of the last inner dim first.
    mode: str
        ``"linear"``, ``"nearest"`` (of two equally near the even one) or ``"cubic"``.
    padding: str
        What lies outside of -1 to 1: ``"zeros"``, the ``"border"``, or a ``"reflection"`` of what lies inside.
    align_corners: bool
        Whether -1 and 1 are the centres of the first and the last element, or their outer edges.

    Raises
    ------
    ValueError
        For another mode or padding, or a grid of other dims.
    """
    if mode not in MODES or padding not in PADDINGS:
        raise ValueError(f"There is no grid sampling by mode {mode!r} with padding {padding!r}.")
    batch, channels, *inner = x.shape
    *_, dims = grid.shape
    if len(inner) != int(dims) or len(grid.shape) != len(x.shape):
        raise ValueError(f"A grid {list(grid.shape)} does not fit {list(x.shape)}.")
    outer = grid.shape[1:-1]
    sizes = [int(size) for size in inner]
    along: list[list[tuple[Tensor, Tensor | None]]] = []
    for number, size in enumerate(sizes):
        # The grid has the coordinate of the last dim first.
        at = shaping.select(grid, len(grid.shape) - 1, len(sizes) - 1 - number)
        if align_corners:
            place = elementwise.mul(elementwise.add(at, 1.0), (size - 1) / 2)
        else:
            place = elementwise.div(elementwise.sub(elementwise.mul(elementwise.add(at, 1.0), float(size)), 1.0), 2.0)
        if mode != "cubic":  # a cubic kernel reaches beyond the borders: its places are moved, not its centre
            place = _padded_coordinate(place, size, padding, align_corners)
        along.append(_weights(place, mode))
    flat = ops.reshape(x, [batch, channels, math.prod(sizes)])
    total: Tensor | None = None
    for corner in itertools.product(*along):
        part = _corner(flat, corner, sizes, mode, padding, align_corners)
        total = part if total is None else elementwise.add(total, part)
    assert total is not None
    return ops.reshape(total, [batch, channels, *outer])


def _corner(
    flat: Tensor,
    corner: Sequence[tuple[Tensor, Tensor | None]],
    sizes: Sequence[int],
    mode: str,
    padding: str,
    align_corners: bool,
) -> Tensor:
    """One element for each point, [batch, channels, points], times its weight and 0 where it lies outside."""
    batch, channels, _ = flat.shape
    index: Tensor | None = None
    inside: Tensor | None = None
    weight: Tensor | None = None
    for (place, fraction), size in zip(corner, sizes, strict=True):
        if padding == "zeros":
            here = elementwise.logical_and(elementwise.ge(place, 0.0), elementwise.le(place, float(size - 1)))
            inside = here if inside is None else elementwise.logical_and(inside, here)
        moved = _padded_coordinate(place, size, padding, align_corners) if mode == "cubic" else place
        # Comparisons are false of NaN, which is no index.
        known = elementwise.where(elementwise.ge(moved, 0.0), moved, 0.0)
        whole = to_dtype(elementwise.clamp(known, 0.0, float(size - 1)), "int64")
        index = whole if index is None else elementwise.add(elementwise.mul(index, size), whole)
        weight = fraction if weight is None or fraction is None else elementwise.mul(weight, fraction)
    assert index is not None
    points = math.prod(int(n) for n in index.shape[1:])
    wide = ops.broadcast(ops.reshape(index, [batch, 1, points]), [batch, channels, points])
    found = ops.gather(flat, wide, 2)
    if inside is not None:
        found = elementwise.where(ops.reshape(inside, [batch, 1, points]), found, 0.0)
    if weight is None:
        return found
    return elementwise.mul(found, ops.reshape(to_dtype(weight, found.dtype), [batch, 1, points]))
