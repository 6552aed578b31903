"""Convolutions with channels last in the native library, at each level, against PyTorch's."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidet_dist import native
from hidet_dist.native.signatures import PANELS, Convolution, ConvolutionPart, WinogradPart
from hidet_dist.runtime.processor import LEVELS, features
from hidet_dist.weights.packing import packed, winograd_filters
from hidet_dist.weights.panels import PANEL_WIDTHS, Panels

LEVEL_OF = {"x86-64": "X86_64", "x86-64-v3": "X86_64_V3", "x86-64-v4": "X86_64_V4"}
KNOWN = [level for level in LEVEL_OF if features() >= set(LEVELS[level])]


@dataclass(frozen=True)
class Case:
    """The sizes of a convolution of three spatial dims."""

    images: int
    size: tuple[int, ...]
    groups: int
    inner: int
    outer: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad: tuple[int, ...]
    dtype: str = "float32"

    @property
    def out(self) -> list[int]:
        """The spatial dims of the result."""
        sizes = zip(self.size, self.kernel, self.stride, self.dilation, self.pad, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in sizes]

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The input, with channels second, and the filters."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.images, self.groups * self.inner, *self.size, generator=generator)
        w = torch.randn(self.groups * self.outer, self.inner, *self.kernel, generator=generator)
        dtype = getattr(torch, self.dtype)
        return x.to(dtype), w.to(dtype)


def convolve(case: Case, level: str, x: torch.Tensor, w: torch.Tensor, cut: int) -> torch.Tensor:
    """Convolve in parts of at most ``cut`` pixels and of two panels; the result has the channels second."""
    library, code, width = native.library(), PANELS.constants[LEVEL_OF[level]], PANEL_WIDTHS[level]
    depthwise, taps = case.inner == case.outer == 1 < case.groups, math.prod(case.kernel)
    if depthwise:
        panels = Panels(1, taps, case.groups, True, width)
    else:
        panels = Panels(case.groups, case.inner * taps, case.outer, True, width, taps=taps)
    stored, images = packed(w, panels).contiguous(), x.permute(0, 2, 3, 4, 1).contiguous()
    dtype = native.dtype_code(case.dtype)
    channels = (case.images, case.groups * case.inner, case.groups * case.outer, case.groups)
    dims = [(ctypes.c_int64 * 3)(*v) for v in (case.size, case.out, case.kernel, case.stride, case.dilation, case.pad)]
    convolution = Convolution(*channels, *dims, images.data_ptr(), stored.data_ptr(), dtype, dtype)
    assert bool(library.hidet_dist_is_depthwise(ctypes.byref(convolution))) == depthwise
    pixels = case.images * math.prod(case.out)
    groups, columns = (1, case.groups) if depthwise else (case.groups, case.outer)
    whole = np.full((pixels, groups * columns), np.nan, np.float32)
    nbytes = library.hidet_dist_convolution_scratch(code, ctypes.byref(convolution), cut)
    scratch = np.full(nbytes + 64, 255, np.uint8)
    step = -(-2 * width // 16) * 16
    tile = np.empty((cut, step), np.float32)
    for group in range(groups):
        for first in range(0, pixels, cut):
            for column in range(0, columns, 2 * width):
                rows, across = min(cut, pixels - first), min(2 * width, columns - column)
                address = scratch.ctypes.data + -scratch.ctypes.data % 64
                part = ConvolutionPart(group, first, rows, column, across, tile.ctypes.data, step, address)
                assert library.hidet_dist_convolve(code, ctypes.byref(convolution), ctypes.byref(part)) == native.OK
                begin = group * columns + column
                whole[first : first + rows, begin : begin + across] = tile[:rows, :across]
    return torch.from_numpy(whole).reshape(case.images, *case.out, -1).permute(0, 4, 1, 2, 3)


def check(case: Case, level: str, cut: int) -> torch.Tensor:
    x, w = case.operands()
    result = convolve(case, level, x, w, cut)
    expected = torch.conv3d(x.double(), w.double(), None, case.stride, case.pad, case.dilation, case.groups)
    error = float((result - expected).abs().max())
    assert error <= 2e-6 * max(1.0, float(expected.abs().max()))
    return result


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups, inner, outer = draw(
        st.one_of(
            st.tuples(st.just(1), st.integers(1, 40), st.integers(1, 75)),
            st.tuples(st.integers(2, 3), st.integers(1, 20), st.integers(1, 40)),
            st.tuples(st.integers(2, 75), st.just(1), st.just(1)),
        )
    )
    kernel, stride, dilation, pad, size = [], [], [], [], []
    for dim in range(3):
        kernel.append(draw(st.integers(1, 2 if dim == 0 else 4)))
        stride.append(draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 2)))
        pad.append(draw(st.integers(0, 3)))
        least = max(1, dilation[-1] * (kernel[-1] - 1) + 1 - 2 * pad[-1])
        size.append(draw(st.integers(least, least + (1 if dim == 0 else 9))))
    sizes = (tuple(value) for value in (kernel, stride, dilation, pad))
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"]))
    return Case(draw(st.integers(1, 2)), tuple(size), groups, inner, outer, *sizes, dtype)


@pytest.mark.parametrize("level", KNOWN)
@given(case=cases(), cut=st.integers(1, 70))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_any_convolution_is_right(case: Case, cut: int, level: str) -> None:
    check(case, level, cut)


@pytest.mark.parametrize("level", KNOWN)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, (1, 37, 35), 1, 3, 33, (1, 7, 7), (1, 2, 2), (1, 1, 1), (0, 3, 3)),
        Case(2, (1, 15, 14), 1, 130, 70, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1)),
        Case(2, (1, 14, 14), 1, 600, 40, (1, 1, 1), (1, 2, 2), (1, 1, 1), (0, 0, 0)),
        Case(2, (1, 28, 28), 83, 1, 1, (1, 5, 5), (1, 2, 2), (1, 1, 1), (0, 2, 2)),
        Case(1, (1, 2, 2), 1, 2, 4, (1, 5, 5), (1, 1, 1), (1, 1, 1), (0, 4, 4)),
    ],
    ids=["stem", "deep", "strided point", "depthwise", "more padding than input"],
)
def test_layers_of_models_are_right_whatever_the_parts(case: Case, level: str) -> None:
    pixels = case.images * math.prod(case.out)
    whole = check(case, level, pixels)
    for cut in (1, 50):
        assert torch.equal(check(case, level, cut), whole)


@st.composite
def lines(draw: st.DrawFn) -> Case:
    """Convolutions of each channel by itself, by kernels of so many taps along a line that each has a kernel."""
    taps, stride = draw(st.sampled_from([(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)]))
    height, width = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    pad = draw(st.integers(max(0, (taps - width + 1) // 2), taps - 1))
    size, kernel = (1, draw(st.integers(height, 6)), width), (1, height, taps)
    strides, pads = (1, draw(st.integers(1, 2)), stride), (0, draw(st.integers(0, height - 1)), pad)
    return Case(draw(st.integers(1, 2)), size, draw(st.integers(2, 75)), 1, 1, kernel, strides, (1, 1, 1), pads)


@pytest.mark.parametrize("level", KNOWN)
@given(case=lines(), cut=st.integers(1, 70))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_a_line_at_once_is_right_for_any_number_of_channels(case: Case, cut: int, level: str) -> None:
    check(case, level, cut)


@st.composite
def squares(draw: st.DrawFn) -> Case:
    """Convolutions by Winograd's filtering."""
    size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    least = [max(0, (3 - n + 1) // 2) for n in size]
    pad = tuple(draw(st.integers(low, 3)) for low in least)
    inner, outer = draw(st.integers(16, 40)), draw(st.integers(16, 75))
    return Case(draw(st.integers(1, 2)), (1, *size), 1, inner, outer, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, *pad))


def by_winograd(case: Case, level: str, x: torch.Tensor, w: torch.Tensor, lines: int) -> torch.Tensor:
    """Convolve by ``lines`` lines of tiles at once; the products are PyTorch's. The result has the channels second."""
    library, code = native.library(), PANELS.constants[LEVEL_OF[level]]
    images = x.permute(0, 2, 3, 4, 1).contiguous()
    channels = (case.images, case.inner, case.outer, 1)
    dims = [(ctypes.c_int64 * 3)(*v) for v in (case.size, case.out, case.kernel, case.stride, case.dilation, case.pad)]
    dtype = native.dtype_code(case.dtype)
    convolution = Convolution(*channels, *dims, images.data_ptr(), None, dtype, dtype)
    down, across = -(-case.out[1] // 2), -(-case.out[2] // 2)
    filters, zeros, results = winograd_filters(w[:, :, 0]), torch.zeros(case.inner), []
    for line in range(0, case.images * down, lines):
        count = min(lines, case.images * down - line)
        tiles = torch.full((16, count * across + 1, case.inner), math.nan)
        part = WinogradPart(line, count, tiles.data_ptr(), tiles[0].numel(), zeros.data_ptr(), None, 0)
        assert library.hidet_dist_winograd_read(code, ctypes.byref(convolution), ctypes.byref(part)) == native.OK
        products = (tiles[:, :-1].double() @ filters.mT.double()).float().contiguous()
        pixels = sum(min(2, case.out[1] - 2 * (one % down)) for one in range(line, line + count)) * case.out[2]
        result = torch.full((pixels, case.outer + 3), math.nan)
        part = WinogradPart(
            line, count, products.data_ptr(), products[0].numel(), None, result.data_ptr(), case.outer + 3
        )
        assert library.hidet_dist_winograd_write(code, ctypes.byref(convolution), ctypes.byref(part)) == native.OK
        assert bool(result[:, case.outer :].isnan().all())
        assert bool(tiles[:, -1].isnan().all())
        results.append(result[:, : case.outer])
    return torch.cat(results).reshape(case.images, *case.out, -1).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize("level", KNOWN)
@given(case=squares(), lines=st.integers(1, 4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_tiles_are_transformed_for_winograds_filtering(case: Case, lines: int, level: str) -> None:
    x, w = case.operands()
    expected = torch.conv3d(x.double(), w.double(), None, case.stride, case.pad)
    result = by_winograd(case, level, x, w, lines)
    assert float((result - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    "case",
    [
        Case(1, (1, 6, 6), 1, 16, 16, (1, 3, 3), (1, 2, 1), (1, 1, 1), (0, 1, 1)),
        Case(1, (1, 6, 6), 1, 16, 16, (1, 3, 3), (1, 1, 1), (1, 1, 2), (0, 1, 1)),
        Case(1, (1, 6, 6), 2, 16, 16, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1)),
        Case(1, (1, 6, 6), 1, 15, 16, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1)),
        Case(1, (1, 6, 6), 1, 16, 16, (1, 3, 1), (1, 1, 1), (1, 1, 1), (0, 1, 1)),
        Case(1, (1, 6, 6), 1, 16, 16, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), "float16"),
    ],
    ids=["stride", "dilation", "groups", "few channels", "other taps", "half precision"],
)
def test_other_convolutions_are_refused(case: Case) -> None:
    channels = (case.images, case.groups * case.inner, case.groups * case.outer, case.groups)
    dims = [(ctypes.c_int64 * 3)(*v) for v in (case.size, case.out, case.kernel, case.stride, case.dilation, case.pad)]
    dtype = native.dtype_code(case.dtype)
    convolution, part = Convolution(*channels, *dims, None, None, dtype, dtype), WinogradPart()
    for call in (native.library().hidet_dist_winograd_read, native.library().hidet_dist_winograd_write):
        assert call(1, ctypes.byref(convolution), ctypes.byref(part)) == native.INVALID_ARGUMENT
        assert call(1, None, None) == native.INVALID_ARGUMENT


def test_unknown_levels_are_refused() -> None:
    library = native.library()
    assert library.hidet_dist_convolution_scratch(2, ctypes.byref(Convolution()), 1) == 0
    refused = library.hidet_dist_convolve(2, ctypes.byref(Convolution()), ctypes.byref(ConvolutionPart()))
    assert refused == native.INVALID_ARGUMENT
    assert library.hidet_dist_convolve(1, None, None) == native.INVALID_ARGUMENT
