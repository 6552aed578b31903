"""What hidet takes for granted of floats: each test fails when hidet no longer needs what is bent for it."""

import numpy as np
import pytest
from hidet.ir.builders import FunctionBuilder
from hidet.ir.compute.reduce_operations import MaxReduce, MinReduce
from hidet.ir.dtypes import bfloat16, float16, float32, int32
from hidet.ir.expr import Cast, Constant, Multiply, Sub, Var
from hidet.ir.module import IRModule
from hidet.ir.primitives.func import lookup_primitive_function, primitive_func_pool
from hidet.ir.primitives.math import registered_math_function_sets
from hidet.ir.stmt import EvaluateStmt
from hidet.ir.tools import simplify
from hidet.transforms import import_primitive_functions_pass
from hidet.transforms.rule_based_simplifier import RuleBasedSimplifier

import hidet_dist  # noqa: F401  (sets hidet's definitions right)
from hidet_dist.compat import extremes, float_algebra


@pytest.mark.parametrize("kind", ["max", "min"])
def test_hidet_still_calls_functions_that_drop_nan(kind):
    plain = lookup_primitive_function(f"cpu_f32_{kind}")
    assert plain.codegen_name == f"f{kind}f", "hidet has another function: see whether extremes.py is needed"
    assert plain.function is not None
    assert lookup_primitive_function(f"cuda_bf16_{kind}").codegen_name == f"__h{kind}_nan"


@pytest.mark.parametrize("reduction", [MaxReduce(), MinReduce()], ids=str)
def test_hidet_still_starts_extremes_with_a_finite_number(reduction):
    of_hidet = extremes.hidet_initial_values[type(reduction)](reduction, float32)
    assert np.isfinite(of_hidet.value), "hidet starts with infinity: drop initial_value from extremes.py"
    for dtype in (float16, float32, "float64"):
        assert np.isinf(reduction.initial_value(dtype).value)
    assert reduction.initial_value("int32").value in (int32.min_value.value, int32.max_value.value)


def test_hidet_still_takes_products_of_floats_and_zero_for_zero():
    x, zero = Var("x", float32), float32(0)
    assert isinstance(float_algebra.hidet_binary(Multiply, x, zero), Constant), "products are kept now"
    for product in (x * 0.0, 0.0 * x, simplify(x * 0.0, enable_rules=True), simplify(Multiply(x + 1.0, zero))):
        assert isinstance(product, Multiply)
    number = Var("n", int32)
    assert isinstance(number * 0, Constant)
    assert isinstance(simplify(Multiply(number, int32(0))), int | Constant)


def test_hidet_still_takes_differences_of_floats_for_zero():
    x, number = Var("x", float32), Var("n", int32)
    of_hidet = float_algebra.hidet_apply_rule(RuleBasedSimplifier(), Sub(x, x))
    assert isinstance(of_hidet, Constant), "differences are kept now: drop the rule from float_algebra.py"
    assert isinstance(simplify(Sub(x, x), enable_rules=True), Sub)
    assert not isinstance(simplify(Sub(number, number), enable_rules=True), Sub)


def test_functions_that_kernels_call_are_added_in_order():
    extreme_functions = [f"cpu_f{bits}_{kind}" for kind in ("min", "max") for bits in (64, 32, 16)]
    with FunctionBuilder("kernel", kind="public") as builder:
        for name in extreme_functions:
            function = lookup_primitive_function(name)
            x = Var("x", function.func_type.param_types[0])
            builder.append(EvaluateStmt(function.var(x, x)))
    module = import_primitive_functions_pass().process_module(IRModule(functions={"kernel": builder.func}))
    assert list(module.functions) == ["kernel", *sorted(extreme_functions)]


def test_hidet_still_lacks_functions_of_half_precision():
    assert lookup_primitive_function("cpu_f16_mod").codegen_name == "mod", "C has a function now: see half_functions.py"
    assert not any("bf16_mod" in name for name in primitive_func_pool.name2func)
    for device in ("cpu", "cuda"):
        of_half = registered_math_function_sets[device, "bfloat16"].mod(Var("a", bfloat16), Var("b", bfloat16))
        assert isinstance(of_half, Cast) and of_half.target_type == bfloat16
