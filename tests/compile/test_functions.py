"""Tests of the elementary functions of kernels: their errors, and which floating-point exceptions they raise."""

import ctypes
import subprocess

import numpy as np
import pytest

from hidet_dist import native

SOURCE = """
#include <fenv.h>
#include <hidet_dist/kernels/functions.h>
extern "C" int exponentials(const float *x, float *y, int64_t count) {
  feclearexcept(FE_ALL_EXCEPT);
  for (int64_t i = 0; i < count; ++i) y[i] = hd::exp(x[i]);
  return fetestexcept(FE_UNDERFLOW);
}
extern "C" void logistics(const float *x, float *y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = hd::logistic(x[i]);
}
extern "C" void products(const float *x, float *y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = hd::times_logistic(x[i], x[i]);
}
"""


@pytest.fixture(scope="module", params=["native", "x86-64"])
def library(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.cc").write_text(SOURCE)
    flags = ["-O3", f"-march={request.param}", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
    files = [str(folder / "functions.cc"), "-o", str(folder / "functions.so")]
    subprocess.run(["g++", *flags, f"-I{native.include_dir()}", *files], check=True, timeout=120)
    return ctypes.CDLL(str(folder / "functions.so"))


def exponentials(library, x):
    """Return the exponentials of the elements, and whether computing them underflowed."""
    y = np.empty_like(x)
    underflow = library.exponentials(*(ctypes.c_void_p(a.ctypes.data) for a in (x, y)), ctypes.c_int64(x.size))
    return y, bool(underflow)


def test_exponentials_of_masked_scores_are_0_without_underflow(library):
    """A processor takes a hundred cycles for an underflow; half of the scores of causal attention are masked."""
    masks = [-104.5, -1e4, -1e9, np.finfo(np.float32).min, -np.inf]
    y, underflow = exponentials(library, np.repeat(np.array(masks, np.float32), 16))
    assert (y == 0).all() and not underflow


def test_exponentials_down_to_the_smallest_number(library):
    x = np.linspace(-104, -80, 997, dtype=np.float32)
    y, underflow = exponentials(library, x)
    expected = np.exp(x.astype(np.float64))
    assert underflow
    assert (np.abs(y - expected) <= 2e-7 * expected + 2**-149).all()


def computed(function, x):
    y = np.empty_like(x)
    function(*(ctypes.c_void_p(a.ctypes.data) for a in (x, y)), ctypes.c_int64(x.size))
    return y


def test_logistic_functions_are_within_6_units_in_the_last_place(library):
    x = np.concatenate([np.linspace(-87.0, 100.0, 300_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    for function, expected in ((library.logistics, exact), (library.products, exact * x)):
        error = np.abs(computed(function, x) - expected)
        allowed = np.where(np.abs(x) < 10, 3, 6)
        assert (error <= allowed * np.spacing(np.abs(expected).astype(np.float32))).all()


def test_logistic_functions_have_their_limits_and_keep_nan(library):
    x = np.array([-np.inf, -1e30, -88.5, 88.5, 1e30, np.inf, np.nan, 0.0], np.float32)
    np.testing.assert_array_equal(computed(library.logistics, x), np.array([0, 0, 0, 1, 1, 1, np.nan, 0.5], np.float32))
    np.testing.assert_array_equal(
        computed(library.products, x), np.array([np.nan, 0, 0, 88.5, 1e30, np.inf, np.nan, 0], np.float32)
    )
