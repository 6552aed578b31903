"""Elements moved: padding, rolling, windows, triangles, and pixels from channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.transform import PadOp
from hidet.ir.dtypes import int64

from hidet_dist.limits import MOST_PLACES
from hidet_dist.operators.dtypes import Scalar, constant
from hidet_dist.spec.extents import Extent, extents_of, same_shape

_MOST_JOINED = 64
"""Tensors that one operator joins: its elements test for each of them, and making it takes their number squared."""

_MOST_SIZE = 2**30
"""The most elements of a symbolic dim whose diagonals are told apart; sums of two such indices have 32 bits."""


def reshaped(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    """Reshape a tensor; return the tensor itself if it has that shape."""
    return x if same_shape(extents_of(x), tuple(shape)) else ops.reshape(x, list(shape))


def permuted(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute a tensor's dims; return the tensor itself if they stay."""
    return x if list(axes) == list(range(len(x.shape))) else ops.permute_dims(x, list(axes))


def expanded(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    """Broadcast a tensor; return the tensor itself if it has that shape."""
    return x if same_shape(extents_of(x), tuple(shape)) else ops.broadcast(x, list(shape))


def take_along(x: Tensor, places: Sequence[int] | np.ndarray, dim: int) -> Tensor:
    """The slices of ``x`` along ``dim`` at known places; they become the dims of ``places``."""
    return ops.take(x, constant(np.asarray(places, np.int64), int64, x), dim % len(x.shape))


def select(x: Tensor, dim: int, place: int) -> Tensor:
    """The slice of ``x`` at a place of a dim, without that dim."""
    return ops.squeeze(ops.strided_slice(x, [place], [place + 1], [dim]), [dim])


def concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors one after the other along a dim; a single one as it is."""
    while len(tensors) > 1:
        groups = [tensors[start : start + _MOST_JOINED] for start in range(0, len(tensors), _MOST_JOINED)]
        tensors = [ops.concat(list(group), dim) if len(group) > 1 else group[0] for group in groups]
    return tensors[0]


def stack(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors of one shape along a new dim."""
    return concat([ops.unsqueeze(x, [dim]) for x in tensors], dim)


def constant_pad_nd(x: Tensor, pad: Sequence[int], value: Scalar = 0) -> Tensor:
    """``x`` with ``pad`` elements of ``value`` (before, after) for the last dim, the one before it and so on.

    Negative numbers cut elements off.
    """
    rank = len(x.shape)
    before, after = [0] * rank, [0] * rank
    for number in range(len(pad) // 2):
        before[rank - 1 - number], after[rank - 1 - number] = pad[2 * number], pad[2 * number + 1]
    cut = [d for d in range(rank) if before[d] < 0 or after[d] < 0]
    if cut:
        starts = [max(-before[d], 0) for d in cut]
        ends = [x.shape[d] - max(-after[d], 0) for d in cut]
        x = ops.strided_slice(x, starts, ends, cut)
    widths = [max(size, 0) for size in (*before, *after)]
    if not any(widths):
        return x
    return PadOp(x, widths, value=bool(value) if x.dtype.is_boolean() else value).outputs[0]


def _mirrored(size: int, before: int, after: int) -> np.ndarray:
    places = np.abs(np.arange(-before, size + after))
    return (size - 1) - np.abs((size - 1) - places)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Scalar | None = None) -> Tensor:
    """``x`` padded as ``torch.nn.functional.pad``: ``constant``, ``reflect``, ``replicate`` or ``circular``.

    Raises ValueError for other modes, where there are not enough elements to reflect or repeat, and where a dim would
    have more than :data:`hidet_dist.limits.MOST_PLACES` of them.
    """
    if mode == "constant":
        return constant_pad_nd(x, pad, 0 if value is None else value)
    if mode not in ("reflect", "replicate", "circular"):
        raise ValueError(f"There is no padding mode {mode!r}.")
    rank = len(x.shape)
    if mode == "circular" and min(pad, default=0) < 0:
        # What is cut off is not repeated.
        x, pad = constant_pad_nd(x, [min(size, 0) for size in pad]), [max(size, 0) for size in pad]
    for number in range(len(pad) // 2):
        before, after, dim = int(pad[2 * number]), int(pad[2 * number + 1]), rank - 1 - number
        if not before and not after:
            continue
        size = int(x.shape[dim])
        longest = {"reflect": size - 1, "circular": size}.get(mode)
        if longest is not None and max(before, after) > longest:
            raise ValueError(f"A dim of {size} cannot be padded with {before} and {after} elements by mode {mode!r}.")
        if size + before + after > MOST_PLACES:
            raise ValueError(
                f"A dim padded by mode {mode!r} would have {size + before + after} elements; at most {MOST_PLACES} are "
                "supported."
            )
        places = np.arange(-before, size + after)
        known = {
            "reflect": _mirrored(size, before, after) if size > 1 else places * 0,
            "replicate": np.clip(places, 0, size - 1),
            "circular": places % size,
        }[mode]
        x = take_along(x, known, dim)
    return x


def reflection_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Padding by what lies on the other side of the border."""
    return pad(x, padding, "reflect")


def replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Padding by the element at the border."""
    return pad(x, padding, "replicate")


reflection_pad1d = reflection_pad2d = reflection_pad3d = reflection_pad
replication_pad1d = replication_pad2d = replication_pad3d = replication_pad


def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Elements moved along dims, those behind the last place to the first; without dims those of the flat tensor."""
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    named = [dims] if isinstance(dims, int) else list(dims)
    if not named:
        if not x.shape:
            return x
        return ops.reshape(roll(ops.reshape(x, [int(np.prod([int(n) for n in x.shape]))]), shifts, [0]), list(x.shape))
    if len(shifts) != len(named):
        raise ValueError(f"roll has {len(shifts)} shifts for {len(named)} dims.")
    for shift, given in zip(shifts, named, strict=True):
        dim = given % len(x.shape)
        size = x.shape[dim]
        if shift % size:
            cut = size - shift % size
            parts = [(cut, size), (0, cut)]
            x = ops.concat([ops.strided_slice(x, [a], [b], [dim]) for a, b in parts], dim)
    return x


def flip(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Elements along dims in reverse."""
    if not x.shape:
        return x
    named = sorted(d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims))
    return ops.flip(x, named) if named else x


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of ``size`` elements, ``step`` apart, along a dim; the elements of a window become the last dim.

    A tensor without dims has windows of up to one element, and one dim of them.
    """
    rank = len(x.shape)
    if rank == 0:
        return ops.reshape(x, [size])
    dim = dimension % rank
    count = (int(x.shape[dim]) - size) // step + 1
    places = np.arange(count).reshape(-1, 1) * step + np.arange(size)
    windows = take_along(x, places, dim)
    return ops.permute_dims(windows, [*range(dim + 1), *range(dim + 2, rank + 1), dim + 1])


def _two(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))


def im2col(
    x: Tensor,
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    stride: int | Sequence[int] = 1,
) -> Tensor:
    """The patches of images [batch, channels, height, width] as columns: [batch, channels * kernel, patches]."""
    return ops.im2col(x, _two(kernel_size), _two(dilation), _two(padding), _two(stride))


def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """[..., c * r * r, h, w] as [..., c, h * r, w * r]."""
    *batch, channels, height, width = x.shape
    r, n = upscale_factor, len(batch)
    split = ops.reshape(x, [*batch, channels // (r * r), r, r, height, width])
    moved = ops.permute_dims(split, [*range(n + 1), n + 3, n + 1, n + 4, n + 2])
    return ops.reshape(moved, [*batch, channels // (r * r), height * r, width * r])


def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """[..., c, h * r, w * r] as [..., c * r * r, h, w]."""
    *batch, channels, height, width = x.shape
    r, n = downscale_factor, len(batch)
    split = ops.reshape(x, [*batch, channels, height // r, r, width // r, r])
    moved = ops.permute_dims(split, [*range(n + 1), n + 2, n + 4, n + 1, n + 3])
    return ops.reshape(moved, [*batch, channels * r * r, height // r, width // r])


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels (dim 1) of several groups, one of each group in turn."""
    batch, channels, *rest = x.shape
    split = ops.reshape(x, [batch, groups, channels // groups, *rest])
    moved = ops.permute_dims(split, [0, 2, 1, *range(3, 3 + len(rest))])
    return ops.reshape(moved, [batch, channels, *rest])


def _diagonal(x: Tensor, diagonal: int) -> int:
    """A diagonal with the same elements above and below it, which indices of 32 bits can be compared with."""
    rows, columns = (size if isinstance(size, int) else _MOST_SIZE for size in extents_of(x)[-2:])
    return max(-rows, min(diagonal, columns))


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """``x[..., i, j]`` where ``j <= i + diagonal``, else 0."""
    return ops.tril(x, _diagonal(x, diagonal))


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """``x[..., i, j]`` where ``j >= i + diagonal``, else 0."""
    return ops.triu(x, _diagonal(x, diagonal))


def repeat_interleave(x: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    """Each element (or slice along ``dim``) ``repeats`` times in turn."""
    if dim is None:
        x, dim = ops.reshape(x, [int(np.prod([int(n) for n in x.shape]))]), 0
    dim %= len(x.shape)
    shape = list(x.shape)
    wide = ops.broadcast(ops.unsqueeze(x, dim + 1), [*shape[: dim + 1], repeats, *shape[dim + 1 :]])
    shape[dim] = shape[dim] * repeats
    return ops.reshape(wide, shape)


def repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """``x`` as often along each dim as ``repeats`` says, which may have more dims in front."""
    x = ops.reshape(x, [*[1] * (len(repeats) - len(x.shape)), *x.shape])
    for dim, times in enumerate(repeats):
        if times != 1:
            shape = list(x.shape)
            wide = ops.broadcast(ops.unsqueeze(x, dim), [*shape[:dim], times, *shape[dim:]])
            shape[dim] = shape[dim] * times
            x = ops.reshape(wide, shape)
    return x


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The elements ``x[..., i, i + offset]`` of two dims, as the last dim."""
    rank = len(x.shape)
    dim1, dim2 = dim1 % rank, dim2 % rank
    order = [*(d for d in range(rank) if d not in (dim1, dim2)), dim1, dim2]
    x = ops.permute_dims(x, order)
    *batch, rows, columns = map(int, x.shape)
    first = (max(-offset, 0), max(offset, 0))
    count = max(min(rows - first[0], columns - first[1]), 0)
    flat = ops.reshape(x, [*batch, rows * columns])
    return take_along(flat, (np.arange(count) + first[0]) * columns + np.arange(count) + first[1], -1)
