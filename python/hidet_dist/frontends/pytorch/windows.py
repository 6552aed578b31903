"""Operators over windows of an image: pooling and resampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist.frontends.pytorch.calls import Call, Refused, lowers
from hidet_dist.frontends.pytorch.shapes import reshaped


def _each(value: Any, rank: int) -> list[int]:
    values = [value] * rank if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


@lowers("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def _max_pool(
    call: Call,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    rank = int(call.name.split("d.")[0][-1])
    if any(step != 1 for step in _each(dilation, rank)) or ceil_mode:
        raise Refused("pooling with a dilation or in ceil mode is not supported")
    kernel, pads = _each(kernel_size, rank), _each(padding, rank)
    strides = _each(stride, rank) if not isinstance(stride, int) and len(stride) else _each(stride or kernel, rank)
    if rank == 1:
        wide = ops.unsqueeze(x, [len(x.shape) - 1])
        found = ops.max_pool2d(wide, [1, *kernel], [1, *strides], [0, *pads])
        return reshaped(found, call.shape)
    function = ops.max_pool2d if rank == 2 else ops.max_pool3d
    return function(x, kernel, strides, pads)


@lowers("max_pool2d_with_indices.default")
def _max_pool_with_indices(call: Call, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    inner = replace(call, name="aten.max_pool2d.default", results=call.results[:1])
    return _max_pool(inner, x, *args, **options), None


@lowers("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _avg_pool(
    call: Call,
    x: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    rank = int(call.name.split("d.")[0][-1])
    kernel, pads = _each(kernel_size, rank), _each(padding, rank)
    strides = kernel if not isinstance(stride, int) and not len(stride) else _each(stride, rank)
    if ceil_mode or divisor_override is not None or (any(pads) and not count_include_pad) or rank == 3:
        raise Refused("an average pooling in ceil mode, with a divisor, or of padding that does not count")
    if rank == 1:
        wide = ops.unsqueeze(x, [len(x.shape) - 1])
        found = ops.avg_pool2d(wide, [1, *kernel], [1, *strides], [0, *pads])
        return reshaped(found, call.shape)
    return ops.avg_pool2d(x, kernel, strides, pads)
