"""Types, numbers and variables of definitions: those that hidet's own functions make."""

from __future__ import annotations

from typing import Any

import hidet
import pytest
from hidet.ir import dtypes, tools
from hidet.ir import expr as ir
from hidet.ir.compute import GridCompute, compute, primitives, reduce, tensor_input
from hidet.ir.layout import RowMajorLayout
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.compat import quick_types

pytestmark = pytest.mark.usefixtures("quick")

SHAPES = st.lists(st.integers(1, 400), max_size=4)


def described(tensor_type: Any) -> Any:
    layout = tensor_type.layout
    assert type(layout) is RowMajorLayout
    shape = [(type(size), size.value, size.type) for size in tensor_type.shape]
    return tensor_type.dtype, shape, layout.shape, layout.size, layout.strides


@given(SHAPES)
def test_types_of_tensors_are_those_of_hidet(shape: list[int]) -> None:
    ours = primitives.tensor_type(dtypes.float16, shape)
    assert described(ours) == described(quick_types.hidet_tensor_type(dtypes.float16, shape))


P, Q = (hidet.symbol_var(name) for name in ("types_p", "types_q"))
EXTENTS = st.sampled_from(
    [1, 6, P, Q, 4 * P, 2 * (3 * P), P * Q * 2, 0 + P, (P * 4) // 4, (P + 3) // 4, P - 1, Q % 3, dtypes.int32(5)]
)


@given(st.lists(EXTENTS, min_size=1, max_size=4))
def test_types_of_tensors_with_symbolic_dims_are_those_of_hidet(shape: list[Any]) -> None:
    def texts(tensor_type: Any) -> Any:
        layout = tensor_type.layout
        assert type(layout) is RowMajorLayout
        return [list(map(str, part)) for part in (tensor_type.shape, layout.shape, layout.strides, [layout.size])]

    theirs = texts(quick_types.hidet_tensor_type(dtypes.float16, shape))
    for _ in range(2):
        assert texts(primitives.tensor_type(dtypes.float16, shape)) == theirs


def test_an_extent_that_is_used_again_is_another_one_than_a_number() -> None:
    shapes = [[4 * P, P], *([4 * P, number] for number in range(4))]
    layouts = [primitives.tensor_type(dtypes.float16, shape).layout for shape in shapes]
    assert [str(layout.shape[1]) for layout in layouts] == [P.name, "0", "1", "2", "3"]


def test_other_types_are_made_by_hidet() -> None:
    n = ir.var("n")
    assert str(primitives.tensor_type("float32", [n, 4])) == str(quick_types.hidet_tensor_type("float32", [n, 4]))
    assert str(primitives.tensor_type(dtypes.float32, [n])) == str(quick_types.hidet_tensor_type("float32", [n]))
    assert primitives.tensor_type("float32", [2]).dtype is dtypes.float32
    with pytest.raises(ValueError, match="either shape or layout"):
        primitives.tensor_type(dtypes.float32)


@given(st.integers(-(2**33), 2**33) | st.booleans() | st.floats(allow_nan=False) | st.none())
def test_values_become_the_same_numbers(value: Any) -> None:
    ours, theirs = ir.convert(value), quick_types.hidet_convert(value)
    assert type(ours) is type(theirs)
    if theirs is not None:
        assert (ours.value, type(ours.value), ours.type) == (theirs.value, type(theirs.value), theirs.type)


def test_dtypes_and_variables() -> None:
    assert ir.data_type("float16") is ir.data_type(dtypes.float16) is dtypes.float16
    with pytest.raises(ValueError, match="Unknown data type"):
        ir.data_type("float17")
    for hint, dtype in ((None, "int32"), ("v", "int32"), ("w", "int32"), (None, "int64")):
        ours, theirs = primitives.var(hint, dtype), quick_types.hidet_var(hint, dtype)
        assert (ours.hint, ours.name, ours.type) == (theirs.hint, theirs.name, theirs.type)


def test_types_of_definitions_are_those_that_hidet_infers() -> None:
    x, y, n = (tensor_input(dtype, dtype, [4, 6]) for dtype in ("float32", "float16", "int64"))
    sums = compute("sums", [4], lambda i: reduce([6], lambda j: x[i, j] * x[i, j], "sum"))
    definitions = [
        sums,
        compute("scaled", [4, 6], lambda i, j: x[i, j] * 3.0 - sums[i]),
        compute("mixed", [4, 6], lambda i, j: x[i, j] + y[i, j]),
        compute("whole", [4, 6], lambda i, j: n[i, j] + 1),
        compute("index", [4, 6], lambda i, j: i + j),
        compute("chosen", [4, 6], lambda i, j: ir.if_then_else(i < j, x[i, j], 0.0)),
        compute("number", [4], lambda i: dtypes.boolean.true),
    ]
    for definition in definitions:
        assert isinstance(definition, GridCompute)
        assert described(tools.infer_type(definition)) == described(quick_types.hidet_infer_type(definition))
