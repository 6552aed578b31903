"""Lowerings of element-wise operators, reductions and products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor
from hidet.ir.type import data_type

from hidet_dist import operators
from hidet_dist.frontends.onnx.initializers import dtype_name
from hidet_dist.frontends.onnx.nodes import Node, check_single, dim_of, dims_of, lowers, norm_order, rank_of, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.spec.extents import Extent, extents_of


def _sign(x: Tensor) -> Tensor:
    """The sign of each element; NaN for NaN, for which PyTorch has 0."""
    signs = elementwise.sign(x)
    return elementwise.where(elementwise.isnan(x), x, signs) if x.dtype.is_float() else signs


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "Equal": elementwise.eq,
    "Less": elementwise.lt,
    "LessOrEqual": elementwise.le,
    "Greater": elementwise.gt,
    "GreaterOrEqual": elementwise.ge,
    "And": elementwise.logical_and,
    "Or": elementwise.logical_or,
    "Xor": elementwise.logical_xor,
    "BitwiseAnd": elementwise.bitwise_and,
    "BitwiseOr": elementwise.bitwise_or,
    "BitwiseXor": elementwise.bitwise_xor,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": elementwise.abs,
    "Acos": elementwise.acos,
    "Acosh": elementwise.acosh,
    "Asin": elementwise.asin,
    "Asinh": elementwise.asinh,
    "Atan": elementwise.atan,
    "Atanh": elementwise.atanh,
    "BitwiseNot": elementwise.bitwise_not,
    "Ceil": elementwise.ceil,
    "Cos": elementwise.cos,
    "Cosh": elementwise.cosh,
    "Erf": elementwise.erf,
    "Exp": elementwise.exp,
    "Floor": elementwise.floor,
    "HardSwish": elementwise.hardswish,
    "Identity": lambda x: x,
    "IsNaN": elementwise.isnan,
    "Log": elementwise.log,
    "Mish": elementwise.mish,
    "Neg": elementwise.neg,
    "Not": elementwise.logical_not,
    "Reciprocal": elementwise.reciprocal,
    "Relu": elementwise.relu,
    "Round": elementwise.round,
    "Sigmoid": elementwise.sigmoid,
    "Sign": _sign,
    "Sin": elementwise.sin,
    "Sinh": elementwise.sinh,
    "Softplus": lambda x: elementwise.softplus(x, 1.0, math.inf),
    "Softsign": elementwise.softsign,
    "Sqrt": elementwise.sqrt,
    "Tan": elementwise.tan,
    "Tanh": elementwise.tanh,
}


ELEMENTWISE = (*_BINARY, *_UNARY)
"""Operators that compute each element of their output from one of each input."""


@lowers(*_BINARY)
def _binary(node: Node) -> Tensor:
    x, y = node.operand(0), node.operand(1)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = node.tensor(0)
    return _BINARY[node.operator](x, y)


@lowers(*_UNARY)
def _unary(node: Node) -> Tensor:
    return _UNARY[node.operator](node.tensor(0))


@lowers("Div")
def _div(node: Node) -> Tensor:
    x, y = node.operand(0), node.operand(1)
    typed = x if isinstance(x, Tensor) else node.tensor(1)
    # Quotients of integers are rounded towards zero.
    return elementwise.div(x, y, None if typed.dtype.is_float() else "trunc")


@lowers("Mod")
def _mod(node: Node) -> Tensor:
    function = elementwise.fmod if node.get("fmod", 0) else elementwise.remainder
    return function(node.operand(0), node.operand(1))


@lowers("Pow")
def _pow(node: Node) -> Tensor:
    x, y = node.tensor(0), node.operand(1)
    dtype = x.dtype
    if not isinstance(y, Tensor):
        y = int(y) if not dtype.is_float() and float(y).is_integer() else y  # type: ignore[arg-type]
        is_float = isinstance(y, float)
    else:
        is_float = y.dtype.is_float()
        y = y if is_float else to_dtype(y, dtype)
    if is_float and not dtype.is_float():
        x = to_dtype(x, data_type("float64"))  # as in NumPy: float32 has not all integers
    return to_dtype(elementwise.pow(x, y), dtype)


@lowers("Max", "Min", "Sum", "Mean")
def _variadic(node: Node) -> Tensor:
    combine = {"Max": elementwise.maximum, "Min": elementwise.minimum}.get(node.operator, elementwise.add)
    total = reduce(combine, (node.tensor(n) for n in range(len(node.inputs))))
    return elementwise.div(total, float(len(node.inputs))) if node.operator == "Mean" else total


@lowers("Clip")
def _clip(node: Node) -> Tensor:
    x = node.tensor(0)
    if node.opset < 11:
        low, high = node.get("min", None), node.get("max", None)
    else:
        for n, what in ((1, "the lower bound"), (2, "the upper bound")):
            if node.value(n) is not None:
                check_single(node.value(n), what)
        low, high = (None if node.value(n) is None else node.operand(n) for n in (1, 2))
    return x if low is None and high is None else elementwise.clamp(x, low, high)


@lowers("Where")
def _where(node: Node) -> Tensor:
    x, y = node.operand(1), node.operand(2)
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        y = node.tensor(2)
    return elementwise.where(node.tensor(0), x, y)


@lowers("Cast", "CastLike")
def _cast(node: Node) -> Tensor:
    if node.operator == "CastLike":
        return to_dtype(node.tensor(0), node.tensor(1).dtype)
    return to_dtype(node.tensor(0), dtype_name(node.get("to", 0)))


@lowers("IsInf")
def _is_inf(node: Node) -> Tensor:
    x = node.tensor(0)
    if node.get("detect_positive", 1) and node.get("detect_negative", 1):
        return elementwise.isinf(x)
    if not node.get("detect_positive", 1) and not node.get("detect_negative", 1):
        return elementwise.ne(x, x) if not x.dtype.is_float() else elementwise.lt(elementwise.abs(x), 0)
    return elementwise.eq(x, math.inf if node.get("detect_positive", 1) else -math.inf)


@lowers("Gelu")
def _gelu(node: Node) -> Tensor:
    return elementwise.gelu(node.tensor(0), node.text("approximate", "none"))


@lowers("LeakyRelu")
def _leaky_relu(node: Node) -> Tensor:
    return elementwise.leaky_relu(node.tensor(0), node.get("alpha", 0.01))


@lowers("PRelu")
def _prelu(node: Node) -> Tensor:
    return ops.prelu(node.tensor(0), node.tensor(1))


@lowers("Elu")
def _elu(node: Node) -> Tensor:
    return elementwise.elu(node.tensor(0), node.get("alpha", 1.0))


@lowers("Celu")
def _celu(node: Node) -> Tensor:
    alpha = node.get("alpha", 1.0)
    if alpha == 0 or not math.isfinite(alpha):
        raise Invalid(f"alpha is {alpha:g}, by which the standard divides: it must be finite and not 0")
    return elementwise.celu(node.tensor(0), alpha)


@lowers("Selu")
def _selu(node: Node) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return elementwise.elu(node.tensor(0), alpha, gamma)


@lowers("HardSigmoid")
def _hard_sigmoid(node: Node) -> Tensor:
    line = elementwise.add(elementwise.mul(node.tensor(0), node.get("alpha", 0.2)), node.get("beta", 0.5))
    return elementwise.clamp(line, 0.0, 1.0)


@lowers("ThresholdedRelu")
def _thresholded_relu(node: Node) -> Tensor:
    x = node.tensor(0)
    return elementwise.where(elementwise.gt(x, node.get("alpha", 1.0)), x, 0.0)  # 0 for NaN, unlike PyTorch


@lowers("Shrink")
def _shrink(node: Node) -> Tensor:
    x, bound, bias = node.tensor(0), node.get("lambd", 0.5), node.get("bias", 0.0)
    real = x if x.dtype.is_float() else to_dtype(x, "float32")
    above = elementwise.where(elementwise.gt(real, bound), elementwise.sub(real, bias), 0.0)
    return to_dtype(elementwise.where(elementwise.lt(real, -bound), elementwise.add(real, bias), above), x.dtype)


@lowers("Swish")
def _swish(node: Node) -> Tensor:
    x, alpha = node.tensor(0), node.get("alpha", 1.0)
    return elementwise.mul(x, elementwise.sigmoid(x if alpha == 1 else elementwise.mul(x, alpha)))


@lowers("BitShift")
def _bit_shift(node: Node) -> Tensor:
    left = node.text("direction", "") == "LEFT"
    return (elementwise.bitwise_left_shift if left else elementwise.bitwise_right_shift)(
        node.tensor(0), node.operand(1)
    )


@lowers("Dropout")
def _dropout(node: Node) -> tuple[Tensor, Tensor | None]:
    x, training = node.tensor(0), node.value(2)
    if training is not None and bool(node.scalar(2, "the mode of dropout")):
        raise Refused("dropout in training mode is not supported: export the model in inference mode")
    if len(node.outputs) < 2 or not node.outputs[1]:
        return x, None
    mask = elementwise.SelectOp(elementwise.isnan(x), True, True, "bool").outputs[0]
    return x, mask if node.opset >= 10 else to_dtype(mask, x.dtype)


# Reductions


def _mean(x: Tensor, dims: Sequence[int] | None, keep: bool) -> Tensor:
    """The mean; that of integers is rounded towards zero."""
    if x.dtype.is_float():
        return reductions.mean(x, dims, keep)
    count = math.prod(static(x, dim, "a dim of a mean of integers") for dim in dims or range(rank_of(x)))
    return elementwise.div(reductions.sum(x, dims, keep, x.dtype), count, "trunc")


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "ReduceSum": lambda x, dims, keep: reductions.sum(x, dims, keep, x.dtype),
    "ReduceProd": lambda x, dims, keep: reductions.prod(x, dims, keep, x.dtype),
    "ReduceMean": _mean,
    "ReduceMax": reductions.amax,
    "ReduceMin": reductions.amin,
    "ReduceL1": lambda x, dims, keep: reductions.sum(elementwise.abs(x), dims, keep, x.dtype),
    "ReduceL2": lambda x, dims, keep: reductions.linalg_vector_norm(x, 2, dims, keep),
    "ReduceLogSum": lambda x, dims, keep: elementwise.log(reductions.sum(x, dims, keep)),
    "ReduceLogSumExp": reductions.logsumexp,
    "ReduceSumSquare": lambda x, dims, keep: reductions.sum(elementwise.mul(x, x), dims, keep, x.dtype),
}


# What reductions compute of each element where no dim is reduced; the others leave it as it is.
_ON_ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": elementwise.abs,
    "ReduceL2": elementwise.abs,
    "ReduceLogSum": elementwise.log,
    "ReduceSumSquare": lambda x: elementwise.mul(x, x),
}


_OF_REALS = frozenset(["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
"""Reductions whose results for integers are those for real numbers, rounded towards zero."""


@lowers(*_REDUCTIONS)
def _reduce(node: Node) -> Tensor:
    x, axes = node.tensor(0), node.integers(1, "axes")
    dims, dtype = dims_of(axes or (), rank_of(x)), x.dtype
    if node.operator in _OF_REALS and not dtype.is_float():
        x = to_dtype(x, "float64")
    if not axes and node.get("noop_with_empty_axes", 0):
        return to_dtype(_ON_ELEMENTS.get(node.operator, lambda x: x)(x), dtype)
    return to_dtype(_REDUCTIONS[node.operator](x, dims or None, bool(node.get("keepdims", 1))), dtype)


@lowers("ArgMax", "ArgMin")
def _arg_extreme(node: Node) -> Tensor:
    x, axis, keep = node.tensor(0), node.get("axis", 0), bool(node.get("keepdims", 1))
    function = reductions.argmax if node.operator == "ArgMax" else reductions.argmin
    if not node.get("select_last_index", 0):
        return function(x, axis, keep)
    last = static(x, axis, "the dim of a last index") - 1
    return elementwise.sub(last, function(shaping.flip(x, axis), axis, keep))


def _hardmax(x: Tensor, dim: int) -> Tensor:
    """1 at the first of the greatest elements along a dim, else 0."""
    dim %= rank_of(x)
    places = np.arange(static(x, dim, "the dim of Hardmax")).reshape([-1, *[1] * (rank_of(x) - 1 - dim)])
    return to_dtype(elementwise.eq(reductions.argmax(x, dim, True), constant(places, "int64", x)), x.dtype)


_ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "Softmax": reductions.softmax,
    "LogSoftmax": reductions.log_softmax,
    "Hardmax": _hardmax,
}


@lowers(*_ALONG)
def _along(node: Node) -> Tensor:
    x, function = node.tensor(0), _ALONG[node.operator]
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    # Before, the dims from the axis on are one.
    axis = node.get("axis", 1)
    axis = axis + rank_of(x) if axis < 0 else axis
    if axis == rank_of(x) - 1:
        return function(x, axis)
    extents = list(extents_of(x))
    rows: Extent = math.prod(extents[:axis])
    return ops.reshape(function(ops.reshape(x, [rows, math.prod(extents[axis:])]), 1), extents)


@lowers("CumSum")
def _cumsum(node: Node) -> Tensor:
    x = node.tensor(0)
    dim = dim_of(int(node.scalar(1, "the axis of a running sum")), rank_of(x))
    options = {"exclusive": bool(node.get("exclusive", 0)), "reverse": bool(node.get("reverse", 0))}
    return reductions.cumsum(x, dim, x.dtype, **options)


@lowers("TopK")
def _topk(node: Node) -> tuple[Tensor, Tensor]:
    count = node.attributes["k"] if node.opset < 10 else node.scalar(1, "the number of elements of TopK")
    return operators.topk(node.tensor(0), int(count), node.get("axis", -1), bool(node.get("largest", 1)))


# Products


@lowers("MatMul")
def _matmul(node: Node) -> Tensor:
    return operators.matmul(node.tensor(0), node.tensor(1))


@lowers("Gemm")
def gemm(node: Node) -> Tensor:
    """Lower the product of two matrices, scaled, plus a third one."""
    a, b, c = node.tensor(0), node.tensor(1), node.optional(2)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = ops.transpose(a, [1, 0]) if node.get("transA", 0) else a
    y = operators.linear(a, b) if node.get("transB", 0) else operators.matmul(a, b)
    y = y if alpha == 1 else elementwise.mul(y, alpha)
    if c is None or beta == 0:
        return y
    return elementwise.add(y, c if beta == 1 else elementwise.mul(c, beta))


@lowers("Einsum")
def _einsum(node: Node) -> Tensor:
    # The lowering's NotImplementedError counts as a refusal.
    return operators.einsum(node.text("equation", ""), [node.tensor(n) for n in range(len(node.inputs))])


@lowers("LpNormalization")
def _lp_normalization(node: Node) -> Tensor:
    x, order = node.tensor(0), norm_order(node)
    if order > 2:
        raise Invalid(f"p is {order}: it must be 1 or 2")
    size = reductions.linalg_vector_norm(x, order, node.axis(rank_of(x), -1), keepdim=True)
    # In the standard vectors of length 0 stay zero.
    return elementwise.where(elementwise.eq(size, 0), elementwise.mul(x, 0), elementwise.div(x, size))
