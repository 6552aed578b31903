"""Element-wise operators beside PyTorch's: values, dtypes and shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.against_torch import booleans, compare, floats, integers
from torch.nn import functional

from hidet_dist.operators import dtypes, elementwise

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
BOUNDED = ("maximum", "minimum", "logical_and", "logical_or", "logical_xor")
BINARY = ("add", "sub", "mul", "div", "remainder", "fmod", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge", *BOUNDED)
UNARY = (
    *("exp", "sqrt", "rsqrt", "log", "sin", "cos", "tanh", "erf", "sigmoid", "reciprocal", "expm1", "log1p", "log2"),
    *("exp2", "floor", "ceil", "trunc", "round", "abs", "neg", "sign", "square", "logical_not", "isnan", "isinf"),
    "isfinite",
)  # fmt: skip
POSITIVE = ("sqrt", "rsqrt", "log", "log1p", "log2", "reciprocal")
ACTIVATIONS = (
    *("relu", "silu", "mish", "elu", "celu", "selu", "softplus", "hardtanh", "relu6", "hardswish", "hardsigmoid"),
    *("softsign", "softshrink", "hardshrink", "tanhshrink", "gelu", "leaky_relu", "glu"),
)  # fmt: skip


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return floats(*shape).to(dtype) if dtype.is_floating_point else integers(-9, 10, *shape).to(dtype)


def nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_operators_of_two_operands(name, dtype):
    own, peer = getattr(elementwise, name), getattr(torch, name)
    x, y = numbers(dtype, 3, 4), nonzero(numbers(dtype, 4))
    compare(own, peer, x, y)
    if name in BOUNDED:
        return
    compare(own, peer, x, torch.tensor(3))
    compare(own, peer, x, torch.tensor(1.5))
    for scalar in (2, -3, 2.5):
        compare(lambda v, s=scalar: own(v, s), lambda v, s=scalar: peer(v, s), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_operators_of_one_operand(name, dtype):
    x = numbers(dtype, 3, 4)
    x = nonzero(x).abs() if name in POSITIVE else x
    compare(getattr(elementwise, name), getattr(torch, name), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    compare(getattr(elementwise, name), getattr(functional, name), floats(3, 8) * 4)


def test_activations_with_parameters():
    x = floats(3, 8) * 4
    compare(lambda v: elementwise.gelu(v, "tanh"), lambda v: functional.gelu(v, approximate="tanh"), x)
    compare(elementwise.log_sigmoid, functional.logsigmoid, x * 30)
    compare(lambda v: elementwise.elu(v, 0.5), lambda v: functional.elu(v, 0.5), x)
    compare(lambda v: elementwise.softplus(v, 2.0, 3.0), lambda v: functional.softplus(v, 2.0, 3.0), x)
    compare(elementwise.prelu, functional.prelu, floats(2, 3, 4), floats(3))
    compare(lambda v: elementwise.threshold(v, 0.5, 9.0), lambda v: functional.threshold(v, 0.5, 9.0), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_clamps_and_choices(dtype):
    x, y = numbers(dtype, 3, 4), nonzero(numbers(dtype, 4))
    for power in (0, 1, 2, 3, 7):
        compare(lambda v, p=power: elementwise.pow(v, p), lambda v, p=power: torch.pow(v, p), x.clamp(-4, 4))
    for power in (0.5, -0.5, 1.7):
        compare(lambda v, p=power: elementwise.pow(elementwise.abs(v), p), lambda v, p=power: torch.pow(v.abs(), p), y)
    compare(lambda v: elementwise.pow(2.0, v), lambda v: torch.pow(2.0, v), x)
    compare(elementwise.pow, torch.pow, x.abs(), y.abs())
    compare(lambda v: elementwise.clamp(v, -1, 1), lambda v: v.clamp(-1, 1), x)
    compare(lambda v: elementwise.clamp(v, None, 1.5), lambda v: v.clamp(None, 1.5), x)
    compare(elementwise.clamp, torch.clamp, x, y)
    compare(elementwise.where, torch.where, booleans(3, 4), x, y)
    compare(lambda c, v: elementwise.where(c, v, 1.5), lambda c, v: torch.where(c, v, 1.5), booleans(3, 4), x)
    compare(lambda c, v: elementwise.where(c, 0, v), lambda c, v: torch.where(c, 0, v), booleans(3, 4), x)
    compare(lambda v, m: elementwise.masked_fill(v, m, -7), lambda v, m: v.masked_fill(m, -7), x, booleans(3, 1))
    compare(lambda a, b: elementwise.add(a, b, 2), lambda a, b: torch.add(a, b, alpha=2), x, y)
    compare(lambda v: elementwise.rsub(v, 2), lambda v: torch.rsub(v, 2), x)
    compare(lambda a, b: elementwise.div(a, b, "trunc"), lambda a, b: torch.div(a, b, rounding_mode="trunc"), x, y)


def test_numbers_alone_are_chosen_in_the_dtype_that_they_have():
    compare(lambda c: elementwise.where(c, 1.5, 2.5), lambda c: torch.where(c, 1.5, 2.5), booleans(3, 4))
    compare(lambda c: elementwise.where(c, 1, 0), lambda c: torch.where(c, 1, 0), booleans(3, 4))


def test_halves_are_rounded_to_the_even_integer():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49, 1e7])
    compare(elementwise.round, torch.round, x)
    compare(lambda v: elementwise.round(v, 2), lambda v: torch.round(v, decimals=2), floats(9))


def test_booleans():
    x, y = booleans(2, 4), booleans(4)
    for name in ("add", "mul", "eq", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"):
        compare(getattr(elementwise, name), getattr(torch, name), x, y)
    compare(elementwise.bitwise_not, torch.bitwise_not, x)
    compare(elementwise.add, torch.add, x, floats(4))


def test_bits_of_integers():
    x = integers(0, 99, 5)
    compare(lambda v: elementwise.bitwise_or(v, 3), lambda v: torch.bitwise_or(v, 3), x)
    compare(elementwise.bitwise_xor, torch.bitwise_xor, x, integers(0, 99, 5))
    compare(elementwise.bitwise_not, torch.bitwise_not, x)


def test_nan_stays_nan():
    x = torch.tensor([math.nan, 1.0, -math.inf, math.inf])
    compare(lambda v: elementwise.clamp(v, -2.0, 2.0), lambda v: v.clamp(-2, 2), x)
    compare(lambda v: elementwise.maximum(v, 0.0), lambda v: torch.maximum(v, torch.tensor(0.0)), x)
    compare(elementwise.nan_to_num, torch.nan_to_num, x)
    for name in ("isnan", "isinf", "isfinite"):
        compare(getattr(elementwise, name), getattr(torch, name), x)


@pytest.mark.parametrize("source", ["float32", "int64", "bool", "float16", "int32"])
@pytest.mark.parametrize("target", ["float32", "int64", "bool", "float16", "int32", "uint8"])
def test_conversions(source, target):
    x = (floats(9) * 3).abs().to(getattr(torch, source))
    compare(lambda v: dtypes.to_dtype(v, target), lambda v: v.to(getattr(torch, target)), x)


KINDS = st.sampled_from(
    [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.float64]
)
OPERANDS = st.one_of(
    st.tuples(KINDS, st.sampled_from([(), (2,)])), st.sampled_from([(None, True), (None, 2), (None, 2.5)])
)


@given(a=st.tuples(KINDS, st.sampled_from([(), (2,)])), b=OPERANDS)
def test_dtypes_are_promoted_as_pytorch_promotes_them(a, b):
    import hidet

    def both(kind, value):
        if kind is None:
            return value, value
        name = str(kind).removeprefix("torch.")
        return hidet.symbol(list(value), name, "cpu"), torch.zeros(value, dtype=kind)

    (own_a, torch_a), (own_b, torch_b) = both(*a), both(*b)
    wanted = str(torch.result_type(torch_a, torch_b)).removeprefix("torch.")
    assert dtypes.promoted_dtype(own_a, own_b).name == wanted


def test_what_pytorch_refuses_is_refused():
    import hidet

    x = hidet.symbol([3], "int64", "cpu")
    with pytest.raises(ValueError, match="no power -1"):
        elementwise.pow(x, -1)
    with pytest.raises(ValueError, match="rounding mode"):
        elementwise.div(x, 2, "up")
    with pytest.raises(ValueError, match="integers and booleans"):
        elementwise.bitwise_and(x, 1.5)
    with pytest.raises(ValueError, match="min and max"):
        elementwise.clamp(x)
