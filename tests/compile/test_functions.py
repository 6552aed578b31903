"""Elementary functions and conversions of the CPU target's kernels, over all of their range.

Each bit pattern of a half, and every few hundredth of a float, against float64 and PyTorch's conversions.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from hidet import ops

import hidet_dist

STEP = 601  # between the bit patterns of floats that are tried; a prime, so that all of their digits come up
HALVES = np.arange(2**16, dtype=np.uint16)


# Kernels that hidet builds by itself, which other tests load, have the process flush subnormal numbers to zero. So
# results are computed in a process of their own, and checked in a single thread, for which that is set right.
SERVE = """
import sys, torch, hidet_dist
folder, data = sys.argv[1:]
with hidet_dist.load_partition(folder) as model:
    torch.save(model.run([torch.load(data)]), data)
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch's other threads may flush subnormal numbers to zero."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def floats() -> np.ndarray:
    """Floats of all sizes, those that are no numbers among them."""
    sample = np.arange(0, 2**32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38], np.float32)
    edges = np.array([0.9, 3.93, 0.625, 88.72283, -87.33655, -103.97, 65504, 65519.996, 65520, 2**-24, 2**-25], "f")
    near = np.concatenate([np.nextafter(edges, np.float32(side)) for side in (-np.inf, np.inf)])
    return np.concatenate([sample, special, edges, -edges, near, -near])


def computed(
    folder: Path, functions: Iterable[Callable[[hidet.Tensor], hidet.Tensor]], x: torch.Tensor, arch: str
) -> list[torch.Tensor]:
    """The outputs of a program of these functions of one input, compiled for ``arch``."""
    own = hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu")
    graph = hidet.trace_from([function(own) for function in functions], [own])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"arch": arch}, folder)
    data = folder.with_suffix(".pt")
    torch.save(x, data)
    subprocess.run([sys.executable, "-c", SERVE, folder, data], check=True, timeout=600)
    results: list[torch.Tensor] = torch.load(data)
    return results


def error_in_ulps(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error of results in units in the last place; 0 if both are NaN or the same infinity."""
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    with np.errstate(over="ignore", invalid="ignore"):
        same = (result == exact.astype(np.float32)) | (np.isnan(result) & np.isnan(exact))
        off = np.abs(result.astype(np.float64) - exact) / unit
    return np.where(same & ~np.isfinite(result), 0.0, np.nan_to_num(off, nan=1e9))


ARCHS = pytest.mark.parametrize("arch", ["native", pytest.param("x86-64-v2", marks=pytest.mark.slow)])


@ARCHS
def test_functions_are_within_two_ulps(tmp_path: Path, arch: str) -> None:
    x = floats()
    exact = torch.from_numpy(x).double()
    functions = {
        ops.exp: torch.exp(exact),
        ops.log: torch.log(exact),
        ops.tanh: torch.tanh(exact),
        ops.erf: torch.erf(exact),
    }
    results = computed(tmp_path / "artifacts", functions, torch.from_numpy(x), arch)
    for (function, expected), y in zip(functions.items(), results, strict=True):
        result = y.numpy()
        off = error_in_ulps(result, expected.numpy())
        worst = int(np.argmax(off))
        assert off[worst] <= 2, (function.__name__, off[worst], x[worst], result[worst])


@ARCHS
def test_activations_are_within_four_ulps(tmp_path: Path, arch: str) -> None:
    """Of a result of the size of their terms: where those cancel, as left of GELU's minimum, fewer digits are left."""
    x = floats()
    x = x[~(np.abs(x) > 80)]
    exact = torch.from_numpy(x).double()
    gelu = torch.nn.functional.gelu(exact)
    functions = {ops.sigmoid: torch.sigmoid(exact), ops.silu: torch.nn.functional.silu(exact), ops.gelu: gelu}
    results = computed(tmp_path / "artifacts", functions, torch.from_numpy(x), arch)
    for (function, expected), y in zip(functions.items(), results, strict=True):
        result = y.numpy()
        with np.errstate(invalid="ignore"):
            size = np.abs(x.astype(np.float64) if function is ops.gelu else expected.numpy())
            off = np.abs(result - expected.numpy()) / np.maximum(size * 2.0**-23, 2.0**-149)
        assert np.array_equal(np.isnan(result), np.isnan(x))
        assert np.nanmax(off) <= 4, (function.__name__, x[np.nanargmax(off)])


@ARCHS
def test_halves_are_converted_exactly(tmp_path: Path, arch: str) -> None:
    """Rounded to the nearest, ties to even, subnormal numbers and infinities included; NaN stays NaN."""
    x = floats()
    to = [lambda y: ops.cast(y, "float16"), lambda y: ops.cast(y, "bfloat16")]
    half, brain = computed(tmp_path / "to", to, torch.from_numpy(x), arch)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    number = ~np.isnan(x)
    assert np.array_equal(np.isnan(half.numpy()), ~number)
    np.testing.assert_array_equal(half.numpy()[number].view(np.uint16), expected[number].view(np.uint16))
    wanted = torch.from_numpy(x).bfloat16()
    assert torch.equal(brain.isnan(), ~torch.from_numpy(number))
    assert torch.equal(brain[number].view(torch.int16), wanted[number].view(torch.int16))

    for kind in (torch.float16, torch.bfloat16):
        halves = torch.from_numpy(HALVES).view(kind)
        (wide,) = computed(tmp_path / f"{kind}", [lambda y: ops.cast(y, "float32")], halves, arch)
        assert torch.equal(wide.isnan(), halves.isnan())
        assert torch.equal(wide[~wide.isnan()].view(torch.int32), halves.float()[~wide.isnan()].view(torch.int32))


def test_halves_in_rows_columns_and_slices(tmp_path: Path) -> None:
    """Runs of halves that are converted together, and those that cannot be."""
    x = torch.randn(5, 37, 300, generator=torch.Generator().manual_seed(0)).half()
    cases = {
        lambda y: ops.sum(y, [2]): lambda y: y.sum(2),
        lambda y: ops.max(y, [1]): lambda y: y.amax(1),
        lambda y: ops.softmax(y, -1): lambda y: y.softmax(-1),
        lambda y: ops.gelu(y[:, 3:31, 7:]) * 2.0: lambda y: torch.nn.functional.gelu(y[:, 3:31, 7:]) * 2.0,
        lambda y: ops.relu(ops.transpose(y, [2, 0, 1])): lambda y: y.permute(2, 0, 1).relu(),
        lambda y: ops.transpose(y, [0, 2, 1]): lambda y: y.permute(0, 2, 1),
        lambda y: ops.concat([y, ops.tanh(y)], 2): lambda y: torch.cat([y, y.tanh()], 2),
        lambda y: ops.cast(y[:, :, ::2], "float32"): lambda y: y[:, :, ::2].float(),
        lambda y: ops.pad(y, [1, 2]): lambda y: torch.nn.functional.pad(y, [1, 2]),
    }
    results = computed(tmp_path / "artifacts", cases, x, "native")
    for result, theirs in zip(results, cases.values(), strict=True):
        expected = theirs(x.float())
        torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-3)
