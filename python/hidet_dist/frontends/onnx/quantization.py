"""Lowerings of quantized operators: integers that stand for ``(value - zero point) * scale``.

Values are rounded to the nearest integer, of two equally near ones to the even one, and limited to the range of their
dtype. Products and convolutions of integers are exact, in int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.initializers import dtype_name
from hidet_dist.frontends.onnx.layers import average_pool, groups_of, pads_of
from hidet_dist.frontends.onnx.nodes import MICROSOFT, ONNX, Node, dim_of, lowers, rank_of, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.dtypes import Operand, to_dtype
from hidet_dist.spec.extents import extents_of, same_shape

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32")


def _float(x: Operand) -> Operand:
    """Convert a scale, or integers, to float32."""
    return to_dtype(x, "float32") if isinstance(x, Tensor) else float(x)  # type: ignore[arg-type]


def _aligned(values: Operand | None, x: Tensor, axis: int, block: int = 0) -> Operand | None:
    """Align a scale or a zero point: one for all, one for each place of ``axis``, or one for each block along it.

    Raises Invalid for an axis that ``x`` lacks, and for blocks that are not those of ``x``.
    """
    if not isinstance(values, Tensor) or rank_of(values) == 0:
        return values
    rank = rank_of(x)
    if math.prod(extents_of(values)) == 1:
        return ops.reshape(values, [1] * rank)
    axis = dim_of(axis, rank)
    if block:
        size = static(x, axis, "the dim of blocks")
        blocks = [-(-size // block) if dim == axis else extent for dim, extent in enumerate(extents_of(x))]
        if not same_shape(extents_of(values), blocks):
            raise Invalid(f"blocks of {block} elements need scales of the shape {blocks}, not {list(values.shape)}")
        wide = shaping.repeat_interleave(values, block, axis)
        return wide if static(wide, axis, "blocks") == size else ops.strided_slice(wide, [0], [size], [axis])
    if rank_of(values) != 1:
        raise Invalid(f"a scale or a zero point along an axis has one dim, not the shape {list(values.shape)}")
    count = static(values, 0, "the number of scales")
    return ops.reshape(values, [count if dim == axis else 1 for dim in range(rank)])


def _centred(x: Tensor, zero_point: Operand | None) -> Tensor:
    """Subtract a zero point: int32, or ``x`` itself where there is none."""
    if zero_point is None or (not isinstance(zero_point, Tensor) and zero_point == 0):
        return x
    zero_point = to_dtype(zero_point, "int32") if isinstance(zero_point, Tensor) else int(zero_point)  # type: ignore[arg-type]
    return elementwise.sub(to_dtype(x, "int32"), zero_point)


def _dequantized(x: Tensor, scale: Operand, zero_point: Operand | None) -> Tensor:
    """The numbers that integers stand for: float32."""
    return elementwise.mul(to_dtype(_centred(x, zero_point), "float32"), _float(scale))


def _quantized(scaled: Tensor, zero_point: Operand | None, dtype: str) -> Tensor:
    """Round numbers that are divided by their scale already, and add their zero point."""
    rounded = to_dtype(elementwise.round(scaled), "float32")
    shifted = rounded if zero_point is None else elementwise.add(rounded, _float(zero_point))
    limits = np.iinfo(dtype)
    return to_dtype(elementwise.clamp(shifted, float(limits.min), float(limits.max)), dtype)


def _dtype_of(node: Node, position: int, default: str) -> str:
    """The dtype of a zero point. Raises Refused for one that nothing is quantized to."""
    value = node.value(position)
    name = default if value is None else value.dtype.name
    if name not in _INTEGERS:
        raise Refused(f"quantization to {name} is not supported")
    return name


def _zero_point(node: Node, position: int) -> Operand | None:
    """A zero point: a number if all are equal, as those of symmetric weights are; None if there is none."""
    if node.value(position) is None:
        return None
    zero_point = node.operand(position)
    known = node.weight_values(zero_point) if isinstance(zero_point, Tensor) else None
    if known is not None and known.size and (known == known.flat[0]).all():
        return int(known.flat[0])
    return zero_point


@lowers("QuantizeLinear", domains=(ONNX, MICROSOFT))
def _quantize_linear(node: Node) -> Tensor:
    x, scale, zero_point = node.tensor(0), node.operand(1), _zero_point(node, 2)
    default = dtype_name(node.get("output_dtype", 0)) if node.get("output_dtype", 0) else "uint8"
    dtype = _dtype_of(node, 2, default)
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    scale, zero_point = _aligned(scale, x, axis, block), _aligned(zero_point, x, axis, block)
    if node.get("precision", 0):
        kind = dtype_name(node.get("precision", 0))
        x, scale = to_dtype(x, kind), to_dtype(scale, kind) if isinstance(scale, Tensor) else scale
    x = x if x.dtype.is_float() else to_dtype(x, "float32")
    return _quantized(elementwise.div(x, scale), zero_point, dtype)


@lowers("DequantizeLinear", domains=(ONNX, MICROSOFT))
def _dequantize_linear(node: Node) -> Tensor:
    x, scale, zero_point = node.tensor(0), node.operand(1), _zero_point(node, 2)
    if x.dtype.name not in _INTEGERS:
        raise Refused(f"dequantization of {x.dtype.name} is not supported")
    given = node.value(1)
    dtype = dtype_name(node.get("output_dtype", 0)) if node.get("output_dtype", 0) else given.dtype.name
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    scale, zero_point = _aligned(scale, x, axis, block), _aligned(zero_point, x, axis, block)
    return to_dtype(_dequantized(x, scale, zero_point), dtype)


@lowers("DynamicQuantizeLinear")
def _dynamic_quantize_linear(node: Node) -> tuple[Tensor, ...]:
    return _dynamically(node.tensor(0))


def _dynamically(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to uint8 by the range of the numbers: the integers, the scale and the zero point."""
    low, high = elementwise.clamp_max(reductions.amin(x), 0.0), elementwise.clamp_min(reductions.amax(x), 0.0)
    span = elementwise.div(elementwise.sub(high, low), 255.0)
    scale = elementwise.where(elementwise.eq(span, 0.0), 1.0, span)  # all numbers are 0
    zero_point = _quantized(elementwise.neg(elementwise.div(low, scale)), None, "uint8")
    return _quantized(elementwise.div(x, scale), zero_point, "uint8"), scale, zero_point


# Products


def _by_rows(values: Operand | None) -> Operand | None:
    """Align what belongs to the rows of a matrix."""
    if isinstance(values, Tensor) and rank_of(values) == 1:
        return ops.reshape(values, [static(values, 0, "the rows"), 1])
    return values


def _product(a: Tensor, a_zero: Operand | None, b: Tensor, b_zero: Operand | None) -> Tensor:
    return operators.integer_matmul(_centred(a, _by_rows(a_zero)), _centred(b, b_zero), "int32")


@lowers("MatMulInteger")
def _matmul_integer(node: Node) -> Tensor:
    return _product(node.tensor(0), _zero_point(node, 2), node.tensor(1), _zero_point(node, 3))


@lowers("QLinearMatMul")
def _qlinear_matmul(node: Node) -> Tensor:
    dtype = _dtype_of(node, 7, "uint8")
    total = _product(node.tensor(0), _zero_point(node, 2), node.tensor(3), _zero_point(node, 5))
    factors = [_by_rows(node.operand(1)), node.operand(4)]
    return _requantized(total, factors, _by_rows(node.operand(6)), _by_rows(_zero_point(node, 7)), dtype)


def _requantized(
    total: Tensor, factors: Sequence[Operand | None], scale: Operand, zero_point: Operand | None, dtype: str
) -> Tensor:
    """Quantize sums of products, given the scales of the factors and that of the result."""
    known = [_float(f) for f in (*factors, scale) if f is not None]
    multiplier: Any
    if any(isinstance(f, Tensor) for f in known):
        product = reduce(elementwise.mul, known[:-1]) if len(known) > 2 else known[0]
        multiplier = elementwise.div(product, known[-1])
    else:
        first, second, last = (np.float32(f) for f in known)  # type: ignore[arg-type]
        multiplier = float(first * second / last)
    return _quantized(elementwise.mul(to_dtype(total, "float32"), multiplier), zero_point, dtype)


def _mul(x: Operand, y: Operand) -> Operand:
    return elementwise.mul(x, y) if isinstance(x, Tensor) or isinstance(y, Tensor) else x * y


@lowers("MatMulIntegerToFloat", domains=(MICROSOFT,))
def _matmul_integer_to_float(node: Node) -> Tensor:
    total = _product(node.tensor(0), _zero_point(node, 4), node.tensor(1), _zero_point(node, 5))
    scale = _mul(_float(_by_rows(node.operand(2))), _float(node.operand(3)))
    return _biased(elementwise.mul(to_dtype(total, "float32"), scale), node.optional(6))


@lowers("DynamicQuantizeMatMul", domains=(MICROSOFT,))
def _dynamic_quantize_matmul(node: Node) -> Tensor:
    x, scale, zero_point = _dynamically(node.tensor(0))
    total = _product(x, zero_point, node.tensor(1), _zero_point(node, 3))
    return _biased(elementwise.mul(to_dtype(total, "float32"), _mul(scale, _float(node.operand(2)))), node.optional(4))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else elementwise.add(x, bias)


@lowers("QGemm", domains=(MICROSOFT,))
def _qgemm(node: Node) -> Tensor:
    a, b = node.tensor(0), node.tensor(3)
    a = ops.transpose(a, [1, 0]) if node.get("transA", 0) else a
    b = ops.transpose(b, [1, 0]) if node.get("transB", 0) else b
    total = _product(a, _zero_point(node, 2), b, _zero_point(node, 5))
    bias = node.optional(6)
    total = total if bias is None else elementwise.add(total, bias)
    scale = _mul(_mul(_float(node.operand(1)), _float(node.operand(4))), float(node.get("alpha", 1.0)))
    if node.value(7) is None:
        return elementwise.mul(to_dtype(total, "float32"), scale)
    return _requantized(total, [scale, 1.0], node.operand(7), _zero_point(node, 8), _dtype_of(node, 8, "uint8"))


# Convolutions


def _convolved(node: Node, x: Tensor, weight: Tensor) -> Tensor:
    """Convolve integers from which the zero points are subtracted already: int32."""
    kernel = [int(n) for n in extents_of(weight)[2:]]
    ones = [1] * len(kernel)
    stride, dilation = list(node.get("strides", ones)), list(node.get("dilations", ones))
    pads = pads_of(node, x, kernel, stride, dilation)
    pairs = list(zip(pads[: len(kernel)], pads[len(kernel) :], strict=True))
    return operators.integer_convolution(x, weight, stride, pairs, dilation, groups_of(node))


@lowers("ConvInteger")
def _conv_integer(node: Node) -> Tensor:
    x, weight = node.tensor(0), node.tensor(1)
    return _convolved(
        node, _centred(x, _zero_point(node, 2)), _centred(weight, _aligned(_zero_point(node, 3), weight, 0))
    )


@lowers("QLinearConv")
def _qlinear_conv(node: Node) -> Tensor:
    x, weight, bias = node.tensor(0), node.tensor(3), node.optional(8)
    total = _convolved(
        node, _centred(x, _zero_point(node, 2)), _centred(weight, _aligned(_zero_point(node, 5), weight, 0))
    )
    if bias is not None:
        total = elementwise.add(total, ops.reshape(bias, [-1, *[1] * (rank_of(x) - 2)]))
    factors = [node.operand(1), _aligned(node.operand(4), total, 1)]
    return _requantized(total, factors, node.operand(6), _zero_point(node, 7), _dtype_of(node, 7, "uint8"))


# Operators on the numbers that integers stand for, as ONNX Runtime's quantizer writes them


def _number(node: Node, position: int) -> Tensor:
    """The numbers of an input that has its scale and its zero point behind it."""
    return _dequantized(node.tensor(position), node.operand(position + 1), _zero_point(node, position + 2))


def _result(node: Node, y: Tensor, scale: int) -> Tensor:
    """Quantize a result by the scale and the zero point at ``scale`` and behind it."""
    dtype = _dtype_of(node, scale + 1, node.value(0).dtype.name)
    return _quantized(elementwise.div(y, _float(node.operand(scale))), _zero_point(node, scale + 1), dtype)


_OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"QLinearAdd": elementwise.add, "QLinearMul": elementwise.mul}
_OF_ONE: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "QLinearSigmoid": lambda node, x: elementwise.sigmoid(x),
    "QLinearLeakyRelu": lambda node, x: elementwise.leaky_relu(x, node.get("alpha", 0.01)),
    "QLinearAveragePool": average_pool,
    "QLinearReduceMean": lambda node, x: reductions.mean(x, node.get("axes", None), bool(node.get("keepdims", 1))),
}


@lowers(*_OF_TWO, domains=(MICROSOFT,))
def _qlinear_binary(node: Node) -> Tensor:
    return _result(node, _OF_TWO[node.operator](_number(node, 0), _number(node, 3)), 6)


@lowers(*_OF_ONE, domains=(MICROSOFT,))
def _qlinear_unary(node: Node) -> Tensor:
    if node.get("channels_last", 0):
        raise Refused("channels in the last dim are not supported")
    return _result(node, _OF_ONE[node.operator](node, _number(node, 0)), 3)


@lowers("QLinearGlobalAveragePool", domains=(MICROSOFT,))
def _qlinear_global_average_pool(node: Node) -> Tensor:
    x = _number(node, 0)
    dims = range(1, rank_of(x) - 1) if node.get("channels_last", 0) else range(2, rank_of(x))
    return _result(node, reductions.mean(x, list(dims), True), 3)


@lowers("QLinearSoftmax", domains=(MICROSOFT,))
def _qlinear_softmax(node: Node) -> Tensor:
    if node.get("opset", 13) < 13:
        raise Refused("the softmax of opsets before 13 is not supported of integers")
    return _result(node, reductions.softmax(_number(node, 0), node.get("axis", -1)), 3)


@lowers("QLinearWhere", domains=(MICROSOFT,))
def _qlinear_where(node: Node) -> Tensor:
    y = elementwise.where(node.tensor(0), _number(node, 1), _number(node, 4))
    dtype = _dtype_of(node, 8, "uint8")
    return _quantized(elementwise.div(y, _float(node.operand(7))), _zero_point(node, 8), dtype)


@lowers("QLinearConcat", domains=(MICROSOFT,))
def _qlinear_concat(node: Node) -> Tensor:
    parts = [_number(node, position) for position in range(2, len(node.inputs), 3)]
    y = shaping.concat(parts, node.get("axis", 0) % rank_of(parts[0]))
    return _quantized(elementwise.div(y, _float(node.operand(0))), _zero_point(node, 1), _dtype_of(node, 1, "uint8"))
