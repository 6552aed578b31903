"""Products by panels in the native library: sums in one order, whatever the number of rows, at each level."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hidet_dist import native
from hidet_dist.native.signatures import PANELS, PanelProduct, QuantizedProduct
from hidet_dist.runtime.processor import LEVELS, features
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import FEW_BITS, PANEL_WIDTHS, Panels, groups_of

LEVEL_OF = {"x86-64": "X86_64", "x86-64-v3": "X86_64_V3", "x86-64-v4": "X86_64_V4"}
ROWS = (1, 2, 3, 4, 6, 7, 13, 14, 15, 16, 29, 200)
SIZES = ((1, 1), (7, 5), (8, 8), (9, 33), (520, 130), (300, 257), (1030, 40), (1024, 24))  # depth, columns
DTYPES = ("float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")))


@pytest.fixture(params=LEVEL_OF)
def level(request: pytest.FixtureRequest) -> str:
    """A level that the processor has."""
    if not features() >= set(LEVELS[request.param]):
        pytest.skip(f"the processor is none of {request.param}")
    return str(request.param)


def multiply(
    level: str,
    a: torch.Tensor,
    w: torch.Tensor,
    transposed: bool = False,
    layout: str = "IN_PANELS",
    runs: tuple[np.ndarray, int] | None = None,
) -> np.ndarray:
    """Multiply rows, which may lie column by column or in runs, by a matrix that is first brought into a layout."""
    library, code = native.library(), PANELS.constants[LEVEL_OF[level]]
    (depth, columns), rows = w.shape, a.shape[0]
    dtype = str(w.dtype).removeprefix("torch.")
    panels = packed(w, Panels(1, depth, columns, False, PANEL_WIDTHS[level]))
    right, step = {"IN_PANELS": (panels, 0), "IN_ROWS": (w, columns), "IN_COLUMNS": (w.t(), depth)}[layout]
    right = right.contiguous()
    left = a.t().contiguous() if transposed else a.contiguous()
    result = np.full((rows, columns), 7.0, np.float32)
    scratch = np.empty(library.hidet_dist_panels_scratch(code) + 64, np.uint8)
    part = PanelProduct(
        left.data_ptr(),
        1 if transposed else depth,
        rows if transposed else 1,
        rows,
        columns,
        depth,
        right.data_ptr(),
        PANELS.constants[layout],
        step,
        native.dtype_code(str(a.dtype).removeprefix("torch.")),
        native.dtype_code(dtype),
        result.ctypes.data,
        columns,
        scratch.ctypes.data + -scratch.ctypes.data % 64,
        *(() if runs is None else (runs[0].ctypes.data_as(ctypes.POINTER(ctypes.c_void_p)), runs[1])),
    )
    assert library.hidet_dist_multiply_panels(code, ctypes.byref(part)) == native.OK
    return result


def by_dots(level: str, dtype: str) -> bool:
    """Whether products of a dtype by panels are those of the processor's dot products."""
    return level == "x86-64-v4" and dtype == "bfloat16" and "avx512_bf16" in features()


def operands(depth: int, columns: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(depth)
    a, w = (torch.randn(shape, generator=generator) for shape in ((max(ROWS), depth), (depth, columns)))
    return a.to(getattr(torch, dtype)), w.to(getattr(torch, dtype))


def test_widths_are_those_that_artifacts_are_written_for() -> None:
    library = native.library()
    widths = {
        level: library.hidet_dist_panel_width(PANELS.constants[LEVEL_OF.get(level, "X86_64")]) for level in LEVELS
    }
    assert widths == {arch: width for arch, width in PANEL_WIDTHS.items() if not arch.startswith("sm_")}
    assert library.hidet_dist_panel_width(2) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_each_rows_result_is_bit_by_bit_the_same_beside_any_others(
    level: str, size: tuple[int, int], dtype: str
) -> None:
    a, w = operands(*size, dtype)
    whole = multiply(level, a, w)
    exact = a.double() @ w.double()
    bound = (a.double().abs() @ w.double().abs()).numpy() * size[0] * 2.0**-24
    assert (np.abs(whole - exact.numpy()) <= bound).all()
    for rows in ROWS:
        for transposed in (False, True):
            np.testing.assert_array_equal(multiply(level, a[:rows], w, transposed), whole[:rows])
    np.testing.assert_array_equal(multiply(level, a[5:6], w), whole[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_results_do_not_depend_on_the_layout(level: str, size: tuple[int, int], dtype: str) -> None:
    a, w = operands(*size, dtype)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 29):
        panels, by_rows, by_columns = (
            multiply(level, a[:rows], w, layout=layout) for layout in ("IN_PANELS", "IN_ROWS", "IN_COLUMNS")
        )
        np.testing.assert_array_equal(by_rows, by_columns)
        if not by_dots(level, dtype):
            np.testing.assert_array_equal(panels, by_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_in_runs_of_any_length(level: str, dtype: str) -> None:
    """Rows that lie in runs, as those of convolutions do, give what rows that lie in one piece give."""
    for rows, run, runs, columns in ((31, 3, 5, 40), (9, 8, 70, 33), (60, 7, 100, 32), (60, 16, 40, 200)):
        depth = run * runs
        a, w = operands(depth, columns, dtype)
        whole = multiply(level, a[:rows], w)
        pieces = a[:rows].reshape(rows, runs, run).transpose(0, 1).contiguous()
        addresses = np.array([piece.data_ptr() for piece in pieces.reshape(rows * runs, run)], dtype=np.uint64)
        np.testing.assert_array_equal(multiply(level, a[:rows], w, runs=(addresses, run)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_rows_and_columns(level: str, dtype: str) -> None:
    a, w = operands(40, 37, dtype)
    a[1, 3], a[2, 4], w[7, 36], w[9, 2] = float("nan"), float("inf"), float("nan"), float("-inf")
    expected = (a[:20].double() @ w.double()).numpy()
    for rows in (3, 20):
        result = multiply(level, a[:rows], w)
        assert (np.isnan(result) == np.isnan(expected[:rows])).all()
        assert (np.isposinf(result) == np.isposinf(expected[:rows])).all()
        assert (np.isneginf(result) == np.isneginf(expected[:rows])).all()
        finite = np.isfinite(expected[:rows])
        np.testing.assert_allclose(result[finite], expected[:rows][finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_half_precision_values_are_read_exactly(level: str, dtype: str) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype)).reshape(-1, 64)
    one = torch.ones(1, 1, dtype=getattr(torch, dtype))
    for row in values:
        result, expected = multiply(level, one, row.reshape(1, -1))[0], row.float().numpy()
        if by_dots(level, dtype):  # for which subnormal numbers are 0
            expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0.0, expected)
        np.testing.assert_array_equal(result, expected)


def test_unknown_levels_dtypes_and_layouts_are_refused() -> None:
    library = native.library()
    assert library.hidet_dist_multiply_panels(2, ctypes.byref(PanelProduct())) == native.INVALID_ARGUMENT
    assert library.hidet_dist_multiply_panels(1, None) == native.INVALID_ARGUMENT
    for part in (
        PanelProduct(right_dtype=native.dtype_code("int32")),
        PanelProduct(right_dtype=native.dtype_code("float32"), layout=3),
    ):
        assert library.hidet_dist_multiply_panels(1, ctypes.byref(part)) == native.INVALID_ARGUMENT


def multiply_quantized(level: str, a: torch.Tensor, stored: torch.Tensor, panels: Panels) -> np.ndarray:
    library, code = native.library(), PANELS.constants[LEVEL_OF[level]]
    rows = a.shape[0]
    result = np.full((rows, panels.columns), 7.0, np.float32)
    nbytes = library.hidet_dist_quantized_scratch(code, rows, panels.depth, panels.group)
    scratch, few = np.empty(nbytes + 64, np.uint8), FEW_BITS[panels.precision]
    part = QuantizedProduct(
        a.data_ptr(),
        panels.depth,
        1,
        rows,
        panels.columns,
        panels.depth,
        stored.data_ptr(),
        few.bits,
        PANELS.constants[("SYMMETRIC", "AFFINE", "WIDE", "WIDE_AFFINE")[few.affine + 2 * few.wide]],
        panels.group,
        result.ctypes.data,
        panels.columns,
        scratch.ctypes.data + -scratch.ctypes.data % 64,
    )
    assert library.hidet_dist_multiply_quantized(code, ctypes.byref(part)) == native.OK
    return result


def unpacked(stored: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Read panels of few bits as the header describes them, byte by byte: the weight, float64."""
    few, width, group = FEW_BITS[panels.precision], panels.width, panels.group
    bits, dtype = few.bits, np.dtype(np.float32 if few.wide else np.float16)
    groups, bytes_of = -(-panels.depth // group), stored.numpy().tobytes()
    scales = width * few.scale_bytes
    block = scales + group * width * bits // 8
    result = np.zeros((groups * group, -(-panels.columns // width) * width))
    for j, k in np.ndindex(result.shape[1], result.shape[0]):
        begin = ((j // width) * groups + k // group) * block
        row = k % group
        numbers = np.frombuffer(bytes_of, dtype, width * (1 + few.affine), begin)
        scale, minimum = numbers[j % width], float(numbers[width + j % width]) if few.affine else 0.0
        if bits == 8:
            at = begin + scales + (row // 4 * width + j % width) * 4 + row % 4
            value = np.frombuffer(bytes_of, np.int8, 1, at)[0]
        else:
            at = begin + scales + (row // 8 * width + j % width) * 4 + row % 4
            value = (bytes_of[at] >> (row % 8 // 4 * 4) & 15) - 8 * (panels.precision == "int4")
        result[k, j] = float(scale) * int(value) + minimum
    return torch.from_numpy(result[: panels.depth, : panels.columns])


def rounded(a: torch.Tensor, group: int) -> torch.Tensor:
    """Round each group of a row to 8 bits; float64."""
    padded = torch.nn.functional.pad(a, (0, -a.shape[1] % group)).unflatten(1, (-1, group))
    most = padded.abs().amax(2, keepdim=True)
    factor = torch.where(most == 0, 0.0, torch.full_like(most, 127).div(most))
    return ((padded * factor).round().double() * (most / 127).double()).flatten(1)[:, : a.shape[1]]


@pytest.mark.parametrize(
    ("precision", "group"), [(name, group) for name in FEW_BITS for group in groups_of(name) if group != 64]
)
@pytest.mark.parametrize("size", [(1, 1), (70, 33), (320, 70)])
def test_products_of_few_bits_are_those_of_the_rounded_operands(
    level: str, size: tuple[int, int], precision: str, group: int
) -> None:
    a, w = operands(*size, "float32")
    a[3] = 0
    panels = Panels(1, *size, False, PANEL_WIDTHS[level], precision, group)
    stored = packed(w, panels)
    assert stored.shape == panels.shape
    weight = unpacked(stored, panels)
    steps = w.abs().max() / (127 if FEW_BITS[precision].bits == 8 else 7)
    assert float((weight - w).abs().max()) <= float(steps)
    whole = multiply_quantized(level, a, stored, panels)
    left = rounded(a, group)
    parts = weight.abs() + 2 * w.abs().max() * FEW_BITS[precision].affine  # of which each weight is the sum
    bound = (left.abs() @ parts).numpy() * 2.0**-20 + 1e-30
    assert (np.abs(whole - (left @ weight).numpy()) <= bound).all()
    for rows in (1, 2, 3, 5, 6, 7, 13):
        np.testing.assert_array_equal(multiply_quantized(level, a[:rows], stored, panels), whole[:rows])
        np.testing.assert_array_equal(multiply_quantized(level, a[rows : rows + 1], stored, panels)[0], whole[rows])


@pytest.mark.parametrize("precision", FEW_BITS)
def test_rows_of_few_bits_that_are_not_finite_have_no_result(level: str, precision: str) -> None:
    a, w = operands(70, 33, "float32")
    a[1, 3], a[2, 69], a[4] = float("nan"), float("inf"), 1e-41
    panels = Panels(1, 70, 33, False, PANEL_WIDTHS[level], precision, groups_of(precision)[0])
    result = multiply_quantized(level, a[:5], packed(w, panels), panels)
    assert np.isnan(result).all(1).tolist() == [False, True, True, False, False]
    assert (result[4] == 0).all()
