"""Element-wise operators beside PyTorch's: values, dtypes and shapes."""

from __future__ import annotations

import itertools
import math

import hidet
import pytest
import torch
from tests.operators.against_torch import booleans, compare, floats, integers
from torch.nn import functional

from hidet_dist.operators import dtypes, elementwise

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
BOUNDED = ("maximum", "minimum", "fmax", "fmin", "logical_and", "logical_or", "logical_xor")
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_powers_of_integers_by_integers_are_exact_modulo_the_range(dtype):
    """Odd bases have powers other than 0 by any exponent, and only 1 and -1 have inverses."""
    least = torch.iinfo(dtype).min
    bases = torch.tensor([least, -7, -3, -2, -1, 0, 1, 2, 3, 10, torch.iinfo(dtype).max], dtype=torch.int64)
    exponents = torch.tensor([0, 1, 2, 3, 5, 19, 37, 39, 62, 63, 64, 65, 99, torch.iinfo(dtype).max])
    if dtype.is_signed:
        exponents = torch.cat([exponents, torch.tensor([-1, -2, least])])
    compare(elementwise.pow, torch.pow, bases.to(dtype)[:, None], exponents.to(dtype))
    for exponent in (63, 64, 99, *((4097,) if dtype.itemsize > 1 else ())):  # a number must be one of the dtype
        compare(lambda v, e=exponent: elementwise.pow(v, e), lambda v, e=exponent: torch.pow(v, e), bases.to(dtype))


def test_numbers_alone_are_chosen_in_the_dtype_that_they_have():
    compare(lambda c: elementwise.where(c, 1.5, 2.5), lambda c: torch.where(c, 1.5, 2.5), booleans(3, 4))
    compare(lambda c: elementwise.where(c, 1, 0), lambda c: torch.where(c, 1, 0), booleans(3, 4))


def test_halves_are_rounded_to_the_even_integer():
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49, 1e7])
    compare(elementwise.round, torch.round, x)
    compare(lambda v: elementwise.round(v, 2), lambda v: torch.round(v, decimals=2), floats(9))


def test_booleans():
    x, y = booleans(2, 4), booleans(4)
    for name in ("add", "mul", "eq", "maximum", "minimum", "fmax", "fmin", "bitwise_and", "bitwise_or", "bitwise_xor"):
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


KINDS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)  # fmt: skip


def operands():
    """A symbol and a tensor of each dtype, with and without a dim, and numbers."""
    shapes = [(kind, shape) for kind in KINDS for shape in ((2,), ())]
    tensors = [
        (hidet.symbol(list(shape), str(kind).removeprefix("torch."), "cpu"), torch.ones(shape, dtype=kind))
        for kind, shape in shapes
    ]
    return [*tensors, *((number, number) for number in (True, 2, 2.5))]


def test_dtypes_are_promoted_as_pytorch_promotes_them():
    for (own_a, torch_a), (own_b, torch_b) in itertools.product(operands(), operands()):
        if isinstance(torch_a, torch.Tensor) or isinstance(torch_b, torch.Tensor):
            wanted = str(torch.result_type(torch_a, torch_b)).removeprefix("torch.")
            assert dtypes.promoted_dtype(own_a, own_b).name == wanted, (torch_a, torch_b)


OF_TWO = {
    **{
        name: (getattr(elementwise, name), getattr(torch, name))
        for name in (
            *("add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum", "atan2"),
            *("eq", "lt", "ge", "logical_or", "bitwise_and"),
        )
    },
    "scaled": (lambda a, b: elementwise.add(a, b, 2), lambda a, b: torch.add(a, b, alpha=2)),
    "truncated": (lambda a, b: elementwise.div(a, b, "trunc"), lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "at least": (elementwise.clamp, torch.clamp),
    "at most": (lambda a, b: elementwise.clamp(a, None, b), lambda a, b: torch.clamp(a, max=b)),
    "where": (
        lambda a, b: elementwise.where(hidet.symbol([2], "bool", "cpu"), a, b),
        lambda a, b: torch.where(torch.tensor([True, False]), a, b),
    ),
}


def test_results_have_pytorchs_dtypes_for_operands_of_any():
    pairs = list(itertools.product(operands(), operands()))
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        for number, (name, (own, peer)) in enumerate(OF_TWO.items()):
            for (own_a, torch_a), (own_b, torch_b) in pairs[number % 5 :: 5]:  # other operands for each function
                if name != "where" and not any(isinstance(x, torch.Tensor) for x in (torch_a, torch_b)):
                    continue
                try:
                    wanted = peer(torch_a, torch_b)
                except (TypeError, RuntimeError):  # PyTorch has no such function of these operands
                    continue
                got = own(own_a, own_b)
                what = f"{name} of {torch_a!r} and {torch_b!r}"
                assert got.dtype.name == str(wanted.dtype).removeprefix("torch."), what
                assert tuple(got.shape) == tuple(wanted.shape), what


def test_what_pytorch_refuses_is_refused():
    x = hidet.symbol([3], "int64", "cpu")
    with pytest.raises(ValueError, match="no power -1"):
        elementwise.pow(x, -1)
    with pytest.raises(ValueError, match="Truth values have no powers"):
        elementwise.pow(hidet.symbol([3], "bool", "cpu"), hidet.symbol([3], "bool", "cpu"))
    with pytest.raises(ValueError, match="rounding mode"):
        elementwise.div(x, 2, "up")
    with pytest.raises(ValueError, match="integers and booleans"):
        elementwise.bitwise_and(x, 1.5)
    with pytest.raises(ValueError, match="min and max"):
        elementwise.clamp(x)
