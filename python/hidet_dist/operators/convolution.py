"""Convolutions of one to three spatial dims, also transposed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.dtypes import int32
from hidet.ir.expr import Expr, cast

from hidet_dist.operators import elementwise, shaping
from hidet_dist.traits import has_traits


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else [int(v) for v in value]
    return values * dims if len(values) == 1 else values


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
) -> Tensor:
    """Convolve ``x[batch, channels, ...]`` with ``weight[out, channels / groups, ...]``, and add the bias [out].

    The weight of a transposed convolution is [channels, out / groups, ...].

    Raises ValueError for other than one to three spatial dims.
    """
    dims = len(weight.shape) - 2
    if not 1 <= dims <= 3 or len(x.shape) != dims + 2:
        raise ValueError(f"There is no convolution of {list(x.shape)} with filters {list(weight.shape)}.")
    stride, padding, dilation, extra = (_each(value, dims) for value in (stride, padding, dilation, output_padding))
    if transposed:
        y = _transposed(x, weight, stride, padding, dilation, extra, groups)
    else:
        y = _convolved(x, weight, stride, [(p, p) for p in padding], dilation, groups)
    return y if bias is None else elementwise.add(y, ops.reshape(bias, [bias.shape[0], *[1] * dims]))


def _convolved(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    dims = len(stride)
    if dims == 2 and all(before == after >= 0 for before, after in padding):
        pads = [before for before, _ in padding]
        return ops.conv2d(x, weight, list(stride), list(dilation), groups, pads)
    x = shaping.constant_pad_nd(x, [size for pair in reversed(padding) for size in pair])
    build = {1: ops.conv1d, 2: ops.conv2d, 3: ops.conv3d}[dims]
    return build(x, weight, list(stride), list(dilation), groups)


@has_traits(kernel="reduction")
class IntegerConvolutionOp(Operator):
    """A convolution of integers without padding, summed up in int32; hidet's sum up in float32.

    Parameters
    ----------
    x: Tensor
        [batch, channels, *inner].
    weight: Tensor
        [out, channels / groups, *kernel].
    stride, dilation: sequence of int
        One number for each spatial dim.
    groups: int
        The groups of channels.
    """

    def __init__(self, x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int):
        data, filters, dims = input_like(x, "x"), input_like(weight, "weight"), len(stride)
        out, channels, *kernel = filters.shape
        sizes = [
            (size - d * (k - 1) - 1) // s + 1
            for size, k, s, d in zip(data.shape[2:], kernel, stride, dilation, strict=True)
        ]

        def element(image: Expr, filter: Expr, *place: Expr) -> Expr:
            def term(channel: Expr, *window: Expr) -> Expr:
                at = [place[n] * stride[n] + window[n] * dilation[n] for n in range(dims)]
                source = channel if groups == 1 else (filter // (out // groups)) * channels + channel
                return cast(data[[image, source, *at]], int32) * cast(filters[[filter, channel, *window]], int32)

            return reduce([channels, *kernel], term, "sum", accumulate_dtype="int32")

        attributes = {"stride": list(stride), "dilation": list(dilation), "groups": groups}
        y = compute("y", [data.shape[0], out, *sizes], element)
        super().__init__([x, weight], attributes, Task("integer_conv", [data, filters], [y], attributes=attributes))


def integer_convolution(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve integers ``x[batch, channels, ...]`` with ``weight[out, channels / groups, ...]``: int32.

    ``padding`` has the zeros before and after each spatial dim.
    """
    x = shaping.constant_pad_nd(x, [size for pair in reversed(padding) for size in pair])
    return IntegerConvolutionOp(x, weight, stride, dilation, groups).outputs[0]


def _transposed(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute a transposed convolution as a convolution of the input, spread with zeros, with mirrored filters."""
    dims, kernel = len(stride), [int(size) for size in weight.shape[2:]]
    if groups == 1 and list(stride) == kernel and not any((*padding, *extra)) and set(dilation) == {1}:
        return _tiles(x, weight, kernel)
    for dim, step in enumerate(stride, 2):
        x = _spread(x, dim, step)
    widths = []
    for k, p, d, e in zip(kernel, padding, dilation, extra, strict=True):
        reach = d * (k - 1) - p
        widths.append((reach, reach + e))
    channels, out = int(weight.shape[0]), int(weight.shape[1])
    turned = ops.reshape(weight, [groups, channels // groups, out, *kernel])
    turned = ops.permute_dims(turned, [0, 2, 1, *range(3, 3 + dims)])
    turned = ops.reshape(turned, [groups * out, channels // groups, *kernel])
    turned = shaping.flip(turned, range(2, 2 + dims)) if math.prod(kernel) > 1 else turned
    return _convolved(x, turned, [1] * dims, widths, dilation, groups)


def _spread(x: Tensor, dim: int, step: int) -> Tensor:
    """Insert ``step - 1`` zeros between the elements along ``dim``."""
    if step == 1:
        return x
    shape = list(x.shape)
    wide = shaping.constant_pad_nd(ops.unsqueeze(x, dim + 1), [*[0, 0] * (len(shape) - 1 - dim), 0, step - 1])
    size = shape[dim] * step
    flat = ops.reshape(wide, [*shape[:dim], size, *shape[dim + 1 :]])
    return ops.strided_slice(flat, [0], [size - step + 1], [dim])


def _tiles(x: Tensor, weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """Compute a transposed convolution whose output tiles do not overlap, as one matrix product."""
    batch, channels, *inner = x.shape
    out, dims = int(weight.shape[1]), len(kernel)
    area = math.prod(int(size) for size in inner)
    filters = ops.permute_dims(ops.reshape(weight, [channels, out * math.prod(kernel)]), [1, 0])
    y = ops.matmul(filters, ops.reshape(x, [batch, channels, area]))
    y = ops.reshape(y, [batch, out, *kernel, *inner])
    order = [0, 1]
    for dim in range(dims):
        order += [2 + dims + dim, 2 + dim]
    sizes = [size * k for size, k in zip(inner, kernel, strict=True)]
    return ops.reshape(ops.permute_dims(y, order), [batch, out, *sizes])


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """The transposed convolution, without a bias; see :func:`convolution`."""
    return convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)
