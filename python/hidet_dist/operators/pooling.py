"""Pooling over windows, and adaptive pooling to a given size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.compute import ReduceOperation
from hidet.ir.dtypes import boolean, int32
from hidet.ir.expr import Expr, cast, convert, if_then_else, logical_and

from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.dtypes import constant
from hidet_dist.traits import has_traits


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else [int(v) for v in value]
    return values * dims if len(values) == 1 else values


@has_traits(kernel="reduction", in_any_layout=True)
class WindowPoolOp(Operator):
    """The maximum or the mean of windows over the last dims of ``x``.

    Parameters
    ----------
    x: Tensor
        [..., *inner], with as many inner dims as the sequences have entries.
    kind: str
        ``"max"`` or ``"avg"``.
    out: sequence of int
        The number of windows along each inner dim.
    counts_padding: bool
        Whether padding counts as elements of a mean; elements beyond the padding do not.
    divisor: int, optional
        The divisor of sums, instead of the number of elements.
    """

    def __init__(
        self,
        x: Tensor,
        kind: str,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        out: Sequence[int],
        counts_padding: bool = True,
        divisor: int | None = None,
    ):
        data, dtype, dims = input_like(x, "x"), x.dtype, len(kernel)
        inner = data.shape[len(data.shape) - dims :]
        outer = data.shape[: len(data.shape) - dims]
        operation = "max" if kind == "max" else "sum"
        outside = ReduceOperation.from_name(operation).initial_value(dtype)

        def read(position: tuple[Expr, ...], window: tuple[Expr, ...]) -> Expr:
            at = [position[len(outer) + d] * stride[d] + window[d] * dilation[d] - padding[d] for d in range(dims)]
            inside = logical_and(*[logical_and(i >= 0, i < size) for i, size in zip(at, inner, strict=True)])
            return if_then_else(inside, data[[*position[: len(outer)], *at]], outside)

        def elements(position: tuple[Expr, ...]) -> Expr:
            count: Expr = int32(1)
            for d in range(dims):
                first = position[len(outer) + d] * stride[d] - padding[d]
                last = primitives.min(first + kernel[d], inner[d] + padding[d])
                if not counts_padding:
                    first, last = primitives.max(first, int32(0)), primitives.min(last, convert(inner[d]))
                count = count * (last - first)
            return count

        def element(*position: Expr) -> Expr:
            total = reduce(list(kernel), lambda *window: read(position, window), operation, dtype.name)
            if kind == "max":
                return total
            return total / (dtype(divisor) if divisor is not None else cast(elements(position), dtype))

        attributes = {
            "kind": kind,
            "kernel": list(kernel),
            "stride": list(stride),
            "padding": list(padding),
            "dilation": list(dilation),
            "out": list(out),
            "counts_padding": counts_padding,
            "divisor": divisor,
        }
        y = compute("y", [*outer, *out], element)
        super().__init__([x], attributes, Task(f"{kind}_pool", [data], [y], attributes=attributes))
        self.name = f"{kind.capitalize()}Pool"


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Count the windows along a dim; with ``ceil_mode`` also one that begins within it and ends beyond."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _pooled(
    x: Tensor,
    kind: str,
    dims: int,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
    counts_padding: bool = True,
    divisor: int | None = None,
) -> Tensor:
    size, pads, gaps = (_each(value, dims) for value in (kernel, padding, dilation))
    step = size if stride is None or stride == [] else _each(stride, dims)
    inner = [int(n) for n in x.shape[len(x.shape) - dims :]]
    out = [_windows(*window, ceil_mode) for window in zip(inner, size, step, pads, gaps, strict=True)]
    return WindowPoolOp(x, kind, size, step, pads, gaps, out, counts_padding, divisor).outputs[0]


def max_pool(
    x: Tensor,
    dims: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of windows over the last ``dims`` dims."""
    return _pooled(x, "max", dims, kernel_size, stride, padding, dilation, ceil_mode)


def avg_pool(
    x: Tensor,
    dims: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of windows over the last ``dims`` dims."""
    return _pooled(x, "avg", dims, kernel_size, stride, padding, 1, ceil_mode, count_include_pad, divisor_override)


def _targets(x: Tensor, output_size: Sequence[int | None]) -> list[int]:
    """Return the size of each inner dim after adaptive pooling; None keeps a dim."""
    inner = x.shape[len(x.shape) - len(output_size) :]
    return [int(size) if target is None else int(target) for target, size in zip(output_size, inner, strict=True)]


def _bounds(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a dim as PyTorch's adaptive pooling does: the first and the last (exclusive) element of each part."""
    parts = np.arange(out)
    return parts * size // out, -(-(parts + 1) * size // out)


def _parts(x: Tensor, dim: int, out: int) -> tuple[Tensor, np.ndarray]:
    """Collect the elements of each part along a dim; the elements become the next dim.

    Shorter parts have their last element several times. Also returned is bool[out, longest]: which ones count.
    """
    first, last = (bound.reshape(-1, 1) for bound in _bounds(int(x.shape[dim]), out))
    places = first + np.arange(int((last - first).max()))
    return shaping.take_along(x, np.minimum(places, last - 1), dim), places < last


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int | None]) -> Tensor:
    """The means of parts of the last dims; ``output_size`` has the number of parts of each, or None to keep a dim."""
    rank, dims = len(x.shape), len(output_size)
    for number, out in enumerate(_targets(x, output_size)):
        dim = rank - dims + number
        size = int(x.shape[dim])
        if out == size:
            continue
        shape = list(x.shape)
        if size % out == 0:
            parts = ops.reshape(x, [*shape[:dim], out, size // out, *shape[dim + 1 :]])
            x = reductions.mean(parts, dim + 1)
            continue
        parts, counts = _parts(x, dim, out)
        inner = [1] * (rank - dim - 1)
        if not counts.all():
            mask = constant(counts.reshape(*counts.shape, *inner), boolean, x)
            parts = elementwise.where(mask, parts, 0.0)
        sizes = constant(counts.sum(1).reshape(out, *inner), x.dtype, x)
        x = elementwise.div(reductions.sum(parts, dim + 1), sizes)
    return x


def along_dim(x: Tensor, dim: int, matrix: np.ndarray) -> Tensor:
    """``out[..., j, ...] = sum over i of x[..., i, ...] * matrix[i, j]`` along ``dim``.

    Raises NotImplementedError for integers, which ``matrix`` would be rounded to.
    """
    if not x.dtype.is_float():
        raise NotImplementedError(
            f"interpolation between elements of {x.dtype.name} is not supported: convert them to floats first"
        )
    rank = len(x.shape)
    weights = constant(matrix, x.dtype, x)
    if dim == rank - 1:
        return ops.matmul(x, weights)
    order = [*range(dim), *range(dim + 1, rank), dim]
    moved = ops.matmul(ops.permute_dims(x, order), weights)
    return ops.permute_dims(moved, [order.index(d) for d in range(rank)])


def adaptive_max_pool(x: Tensor, output_size: Sequence[int | None]) -> Tensor:
    """The maxima of parts of the last dims; ``output_size`` has the number of parts of each, or None to keep a dim."""
    targets, rank, dims = _targets(x, output_size), len(x.shape), len(output_size)
    inner = [int(n) for n in x.shape[rank - dims :]]
    if all(size % out == 0 for size, out in zip(inner, targets, strict=True)):
        split = [part for size, out in zip(inner, targets, strict=True) for part in (out, size // out)]
        parts = ops.reshape(x, [*x.shape[: rank - dims], *split])
        return reductions.amax(parts, [rank - dims + 2 * d + 1 for d in range(dims)])
    for dim, (size, out) in enumerate(zip(inner, targets, strict=True), rank - dims):
        if size != out:
            x = reductions.amax(_parts(x, dim, out)[0], dim + 1)
    return x
