"""Lowerings of operators that move elements: reshapes, transposes, slices, concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hidet.graph import Operator, Tensor, ops
from hidet.graph.ops.transform import StridedSliceOp, StridedSliceTask
from hidet.graph.ops.utils import input_like

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, constant, lower_plainly, lowers, operand, static, whole_dims
from hidet_dist.operators import shaping, to_dtype
from hidet_dist.operators.shaping import expanded, permuted, reshaped
from hidet_dist.spec.extents import extents_of, same_extent
from hidet_dist.weights.states import is_value_of_state


@lowers(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "view_copy.default",
    "flatten.using_ints",
    "unflatten.int",
    "view_as.default",
    "reshape_as.default",
    "_reshape_copy.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
)
def _reshape(call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return reshaped(x, call.shape)


@lowers("unsqueeze.default")
def _unsqueeze(call: Call, x: Tensor, dim: int) -> Tensor:
    return ops.unsqueeze(x, [dim % (len(x.shape) + 1)])


@lowers("permute.default")
def _permute(call: Call, x: Tensor, dims: Sequence[int]) -> Tensor:
    return permuted(x, whole_dims(dims, len(x.shape)))


@lowers("transpose.int", "swapaxes.default", "swapdims.default")
def _transpose(call: Call, x: Tensor, a: int, b: int) -> Tensor:
    axes = list(range(len(x.shape)))
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return permuted(x, axes)


@lowers("t.default", "numpy_T.default", "mT.default", "adjoint.default", "mH.default")
def _matrix_transpose(call: Call, x: Tensor) -> Tensor:
    axes = list(range(len(x.shape)))
    if call.name == "aten.numpy_T.default":
        return permuted(x, axes[::-1])
    return permuted(x, [*axes[:-2], *axes[:-3:-1]])


@lowers("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def _movedim(call: Call, x: Tensor, source: Any, destination: Any) -> Tensor:
    rank = len(x.shape)
    if rank == 0:
        return x
    sources, destinations = whole_dims(source, rank), whole_dims(destination, rank)
    axes = [dim for dim in range(rank) if dim not in sources]
    for target, origin in sorted(zip(destinations, sources, strict=True)):
        axes.insert(target, origin)
    return permuted(x, axes)


@lowers("expand.default", "expand_as.default", "broadcast_to.default")
def _expand(call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return expanded(x, call.shape)


@lowers("broadcast_tensors.default")
def _broadcast_tensors(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(expanded(x, result.shape) for x, result in zip(tensors, call.results, strict=True))


@lowers("slice.Tensor", "slice_copy.Tensor")
def _slice(call: Call, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    dim %= len(x.shape)
    return sliced(x, dim, _start(call, x, dim, start, 2), call.shape[dim], step)


def _start(call: Call, x: Tensor, dim: int, start: Any, place: int) -> Any:
    """Count the start of a slice, the argument of a call at ``place``, from the front of the dim; 0 for None.

    Where sizes of symbols decide whether it is counted from the end, or lies outside, it is as in the example inputs:
    PyTorch has followed that branch, and knows for which other sizes it holds.
    """
    if start is None:
        return 0
    size = extents_of(x)[dim]
    begin = _example(call.fakes[place] if place < len(call.fakes) else start)
    count = _example(call.fakes[0].shape[dim])
    if begin is None or count is None:  # a size that depends on values
        return start
    from_front = begin + count if begin < 0 else begin
    if not 0 <= from_front <= count:
        return 0 if from_front < 0 else size
    return size + start if begin < 0 else start


def _example(size: Any) -> int | None:
    """Return a size as it is in the example inputs; None if it is not known from their shapes."""
    found: int | None = size.node.hint if isinstance(size, torch.SymInt) else int(size)
    return found


def sliced(x: Tensor, dim: int, start: Any, count: Any, step: int = 1) -> Tensor:
    """Slice ``count`` elements of a dim from ``start`` on; return the tensor itself if these are all."""
    size = extents_of(x)[dim]
    if isinstance(start, int) and start == 0 and step == 1 and same_extent(size, count):
        return x
    # An end that is a multiple of the step after the start gives the shape ``count``.
    end = start + count * step
    if isinstance(end, int) and isinstance(size, int):
        end = min(end, size)
    if all(isinstance(extent, int) for extent in (start, end, size)):
        return ops.strided_slice(x, [start], [end], [dim], [step])
    return _SliceOp(x, [start], [end], [dim], [step]).outputs[0]


class _SliceOp(StridedSliceOp):
    """A slice whose symbolic bounds lie within the dim. Without that hidet takes a minimum with the dim's size."""

    def __init__(self, data: Tensor, starts: list[Any], ends: list[Any], axes: list[int], strides: list[int]):
        task = StridedSliceTask(input_like(data, "data"), starts, ends, axes, strides)
        attributes = {"starts": starts, "ends": ends, "axes": axes, "strides": strides}
        Operator.__init__(self, inputs=[data], attributes=attributes, task=task)


@lowers("narrow.default")
def _narrow(call: Call, x: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    dim %= len(x.shape)
    return sliced(x, dim, _start(call, x, dim, start, 2), length)


@lowers("select.int", "select_copy.int")
def _select(call: Call, x: Tensor, dim: int, index: Any) -> Tensor:
    dim %= len(x.shape)
    return reshaped(sliced(x, dim, _start(call, x, dim, index, 2), 1), call.shape)


@lowers("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", "tensor_split.sections")
def _split(call: Call, x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    parts, start = [], 0
    for result in call.results:
        parts.append(sliced(x, dim, start, result.shape[dim]))
        start = start + result.shape[dim]
    return tuple(parts)


@lowers("unbind.int")
def _unbind(call: Call, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.shape)
    return tuple(reshaped(sliced(x, dim, number, 1), result.shape) for number, result in enumerate(call.results))


@lowers("cat.default", "concat.default")
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [to_dtype(x, call.dtype) for x in tensors if 0 not in extents_of(x)]
    if not parts:
        return filled(call, 0)
    return shaping.concat(parts, dim % len(parts[0].shape))


@lowers("diff.default")
def _diff(call: Call, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Subtract each element from the next one, ``n`` times; of truth values say whether they differ."""
    dim %= len(x.shape)
    parts = [part for part in (prepend, x, append) if part is not None]
    y = to_dtype(shaping.concat(parts, dim) if len(parts) > 1 else x, call.dtype)
    for _ in range(n):
        count = extents_of(y)[dim] - 1
        before, after = sliced(y, dim, 0, count), sliced(y, dim, 1, count)
        y = ops.not_equal(after, before) if call.dtype == "bool" else after - before
    return y


@lowers("stack.default")
def _stack(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(tensors[0].shape) + 1
    parts = [ops.unsqueeze(to_dtype(x, call.dtype), [dim]) for x in tensors]
    return shaping.concat(parts, dim)


@lowers("repeat.default", "tile.default")
def _repeat(call: Call, x: Tensor, repeats: Sequence[Any]) -> Tensor:
    missing = len(repeats) - len(x.shape)
    if missing > 0:
        x = reshaped(x, [*[1] * missing, *extents_of(x)])
    repeats = [1] * max(0, -missing) + list(repeats)
    shape = extents_of(x)
    if all(same_extent(count, 1) or same_extent(size, 1) for count, size in zip(repeats, shape, strict=True)):
        return expanded(x, call.shape)
    return ops.tile(x, repeats)


@lowers("repeat_interleave.self_int")
def _repeat_interleave(call: Call, x: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
    if dim is None:
        x, dim = reshaped(x, [call.shape[0] // repeats]), 0
    dim %= len(x.shape)
    shape = list(extents_of(x))
    repeated = ops.broadcast(ops.unsqueeze(x, [dim + 1]), [*shape[: dim + 1], repeats, *shape[dim + 1 :]])
    return reshaped(repeated, call.shape)


@lowers("constant_pad_nd.default")
def _constant_pad(call: Call, x: Tensor, pad: Sequence[Any], value: Any = 0) -> Tensor:
    return shaping.constant_pad_nd(x, [static(size, "padding") for size in pad], value)


@lowers("pad.default")
def _pad(call: Call, x: Tensor, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Tensor:
    return shaping.pad(x, [static(size, "padding") for size in pad], mode, value)


@lowers(*(f"{kind}_pad{rank}d.default" for kind in ("reflection", "replication") for rank in (1, 2, 3)))
def _continued_pad(call: Call, x: Tensor, padding: Sequence[Any]) -> Tensor:
    mode = "reflect" if "reflection" in call.name else "replicate"
    return shaping.pad(x, [static(size, "padding") for size in padding], mode)


@lowers("meshgrid.indexing", "meshgrid.default")
def _meshgrid(call: Call, tensors: Sequence[Tensor], *, indexing: str = "ij") -> tuple[Tensor, ...]:
    grids = []
    for number, x in enumerate(tensors):
        varied = 1 - number if indexing == "xy" and number < 2 else number  # the dim along which this grid varies
        shape = [x.shape[0] if dim == varied and len(x.shape) else 1 for dim in range(len(tensors))]
        grids.append(expanded(reshaped(x, shape), call.results[number].shape))
    return tuple(grids)


@lowers("slice_scatter.default")
def _slice_scatter(
    call: Call, x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    dim %= len(x.shape)
    if step != 1:
        return operators.slice_scatter(x, source, dim, start, end, step)
    size, first, count = extents_of(x)[dim], _start(call, x, dim, start, 3), extents_of(source)[dim]
    if is_value_of_state(x) and isinstance(first, int) and isinstance(count, int) and count < size:
        return operators.slice_scatter(x, source, dim, first, first + count)
    parts = [sliced(x, dim, 0, first), source, sliced(x, dim, first + count, size - first - count)]
    kept = [part for part in parts if 0 not in extents_of(part)]
    return kept[0] if len(kept) == 1 else shaping.concat([to_dtype(part, call.dtype) for part in kept], dim)


@lowers("select_scatter.default")
def _select_scatter(call: Call, x: Tensor, source: Tensor, dim: int, index: Any) -> Tensor:
    dim %= len(x.shape)
    return _slice_scatter(call, x, ops.unsqueeze(source, [dim]), dim, index)


@lowers("copy.default", "fill.Tensor", "fill.Scalar", numbers=True)
def _copy(call: Call, x: Tensor, source: Any, *_: Any) -> Tensor:
    return filled(call, source)


@lowers("full.default", "full_like.default", "new_full.default")
def _full(call: Call, *args: Any, **__: Any) -> Tensor:
    return filled(call, args[-1])


def filled(call: Call, value: Any) -> Tensor:
    """Make a tensor of the call's shape and dtype with one value everywhere."""
    if isinstance(value, Tensor):
        return expanded(to_dtype(value, call.dtype), call.shape)
    return ops.full(call.shape, constant(value, call.dtype), call.dtype)


@lowers(
    "zeros.default",
    "zeros_like.default",
    "new_zeros.default",
    # Elements that PyTorch leaves uninitialized are zero here.
    "empty.memory_format",
    "empty_like.default",
    "new_empty.default",
    "empty_permuted.default",
    "empty_strided.default",
    "new_empty_strided.default",
)
def _zeros(call: Call, *_: Any, **__: Any) -> Tensor:
    return filled(call, 0)


@lowers("ones.default", "ones_like.default", "new_ones.default")
def _ones(call: Call, *_: Any, **__: Any) -> Tensor:
    return filled(call, 1)


@lowers("scalar_tensor.default")
def _scalar_tensor(call: Call, value: Any, **__: Any) -> Tensor:
    return filled(call, value)


@lowers("arange.default", "arange.start", "arange.start_step")
def _arange(call: Call, *args: Any, **__: Any) -> Tensor:
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else 1
    counted = ops.arange(0, call.shape[0], 1, dtype=call.dtype)
    if not (isinstance(step, int | float) and step == 1):
        counted = ops.multiply(counted, operand(step, call.dtype))
    if not (isinstance(start, int | float) and start == 0):
        counted = ops.add(counted, operand(start, call.dtype))
    return counted


@lowers("eye.default", "eye.m")
def _eye(call: Call, *_: Any, **__: Any) -> Tensor:
    rows, columns = call.shape
    ones = ops.full([rows, columns], constant(1, call.dtype), call.dtype)
    return ops.tril(ops.triu(ones))


lower_plainly(
    {
        "flip.default": shaping.flip,
        "roll.default": shaping.roll,
        "tril.default": shaping.tril,
        "triu.default": shaping.triu,
        "diagonal.default": shaping.diagonal,
        "pixel_shuffle.default": shaping.pixel_shuffle,
        "pixel_unshuffle.default": shaping.pixel_unshuffle,
        "channel_shuffle.default": shaping.channel_shuffle,
        "native_channel_shuffle.default": shaping.channel_shuffle,
    }
)
