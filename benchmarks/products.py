"""Products by weights in panels beside the copy bandwidth, the arithmetic peak, OpenBLAS and PyTorch, one thread each.

    python -m benchmarks.products [--precisions float32 ...] [--rows 1 8 ...] [--out benchmarks/results/products.json]

Few rows read weights of 4 to 64 MiB, each time others, so that they come from memory: the rate at which they do is
compared with that of a copy, which counts bytes read and written. More rows are compared with the arithmetic peak,
that of float32 multiplications and additions in registers. Weights are stored in several precisions, with activations
in float32; PyTorch has both in bfloat16 beside those of bfloat16, and otherwise in float32. Times are of the processor,
and the least of some in turns.
The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before anything starts threads

import argparse
import ctypes
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import hidet
import torch
from hidet import ops
from rich.console import Console
from rich.table import Table

from benchmarks.serving.host import describe
from hidet_dist.compile import compile_program
from hidet_dist.compile.targets import default_backend
from hidet_dist.files import write_text
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.storage import with_storages
from hidet_dist.partitioning import partition_graph
from hidet_dist.runtime.libraries import load_needed
from hidet_dist.runtime.openblas import load_openblas
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import PanelLayout, StoredPrecision

ROUNDS = 9
SAMPLE_SECONDS = 0.02  # at least, of one measurement
FEW_ROWS = (1, 2, 4, 8, 16)
MANY_ROWS = (128, 512, 4096)
SIDES = (1024, 2048, 4096)  # of square float32 weights of 4 to 64 MiB
MOST_ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "int8": 2e-2, "int4": 0.15}  # of the norm
COLD_BYTES = 2**28  # of weights that are read in turns: more than caches hold
MOST_BYTES_OF_MANY = 2**26

_PEAK = """
#include <stdint.h>
typedef float Vector __attribute__((vector_size(WIDTH)));
extern "C" float peak(int64_t rounds, float factor) {
  Vector sums[10] = {};
  for (int j = 0; j < 10; ++j) sums[j] += static_cast<float>(j);  // equal ones would be computed once
  const Vector a = Vector{} + factor, b = Vector{} + 0.5f;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 10
    for (int j = 0; j < 10; ++j) sums[j] = sums[j] * a + b;
  }
  Vector sum = {};
  for (int j = 0; j < 10; ++j) sum += sums[j];
  return sum[0];
}
"""


class Product:
    """Our kernel of ``x @ w + bias``, and the same product by OpenBLAS (of float32) and by PyTorch.

    Each call reads the next of several copies of the weight, of about ``nbytes`` together.
    """

    def __init__(self, rows: int, side: int, precision: str, nbytes: int):
        generator = torch.Generator().manual_seed(0)
        self.x, weight = torch.randn(rows, side, generator=generator), torch.randn(side, side, generator=generator)
        weight /= side**0.5
        self.bias = torch.randn(side, generator=generator)
        self.y = torch.empty(rows, side)
        symbols = [hidet.symbol([rows, side], "float32", "cpu"), hidet.symbol([side], "float32", "cpu")]
        y = ops.matmul(symbols[0], hidet.from_torch(weight)) + symbols[1]
        self.precision = precision
        graph = normalize(hidet.trace_from(y, symbols))
        if precision != "float32":
            stored, target = StoredPrecision(precision), default_backend()
            graph = with_storages(
                graph, ("float32",), lambda x, transposed: target.storage(stored, len(x.shape), transposed)
            ).graph
        program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
        compiled = compile_program(program)
        (name,) = compiled.data
        layout = compiled.layouts[name]
        assert len(compiled.kernels) == 1 and isinstance(layout, PanelLayout)
        load_needed(compiled.libraries, Path())
        self.function = ctypes.CDLL(str(compiled.kernels[0])).hidet_launch_0
        panels = packed(weight, layout.panels)
        self.nbytes = layout.nbytes
        self.panels = itertools.cycle([panels.clone() for _ in range(max(1, nbytes // self.nbytes))])
        theirs = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.tensors = [self.x.to(theirs), self.bias.to(theirs), torch.empty_like(self.y, dtype=theirs)]
        weight = weight.to(theirs)
        self.weights = itertools.cycle([weight.clone() for _ in range(max(1, nbytes // weight.nbytes))])
        self.blas = load_openblas()
        self.blas.scipy_openblas_set_num_threads(1)

    def ours(self) -> None:
        """Call our kernel, with no launch path around it."""
        tensors = (self.x, next(self.panels), self.bias, self.y)
        self.function(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors))

    def openblas(self) -> None:
        """Multiply, and leave the bias out."""
        x, w, y = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.x, next(self.weights), self.tensors[2]))
        rows, side = self.x.shape
        one, none = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.blas.scipy_cblas_sgemm(101, 111, 111, rows, side, side, one, x, side, w, side, none, y, side)

    def pytorch(self) -> None:
        """Multiply and add the bias."""
        x, bias, y = self.tensors
        torch.addmm(bias, x, next(self.weights), out=y)

    def check(self) -> None:
        """Compare results."""
        self.ours()
        self.pytorch()
        error = torch.linalg.norm(self.y - self.tensors[2]) / torch.linalg.norm(self.y)
        assert error < MOST_ERROR[self.precision], error


def copy() -> Callable[[], None]:
    """Return a copy of 64 MiB."""
    source, target = torch.ones(2**24), torch.empty(2**24)

    def call() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), 2**26)

    return call


def peak_flops() -> float:
    """Measure the float32 operations per second of a core, each multiplication and each addition one."""
    flags = Path("/proc/cpuinfo").read_text()
    width = 64 if " avx512f " in flags else 32 if " avx2 " in flags else 16
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.cpp", Path(folder) / "peak.so"
        source.write_text(_PEAK)
        command = ["g++", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", f"-DWIDTH={width}"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        peak = ctypes.CDLL(str(library)).peak
        rounds = 10**6
        least = least_seconds({"peak": lambda: peak(ctypes.c_int64(rounds), ctypes.c_float(0.5))})["peak"]
    return 10 * 2 * (width // 4) * rounds / least


def least_seconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Measure the least processor seconds of each call, in turns."""
    least = {}
    for name, call in calls.items():
        begin = time.process_time()
        call()
        least[name] = max(time.process_time() - begin, 1e-7)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times = max(1, int(SAMPLE_SECONDS / least[name]))
            begin = time.process_time()
            for _ in range(times):
                call()
            least[name] = min(least[name], (time.process_time() - begin) / times)
    return least


def main() -> None:
    """Measure all, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=list(MOST_ERROR))
    parser.add_argument("--rows", nargs="+", type=int, default=[*FEW_ROWS, *MANY_ROWS])
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIDES))
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peak, copied = peak_flops(), copy()
    table = Table(title=f"Products by weights, one thread; peak {peak / 1e9:.0f} Gflop/s")
    columns = (
        "precision",
        "rows",
        "side",
        "µs",
        "OpenBLAS",
        "PyTorch",
        "copy GB/s",
        "weights GB/s",
        "of copy",
        "of peak",
    )
    for column in columns:
        table.add_column(column, justify="right")
    results = []
    for precision, side, rows in itertools.product(arguments.precisions, arguments.sides, arguments.rows):
        few = rows <= max(FEW_ROWS)
        product = Product(rows, side, precision, COLD_BYTES if few else MOST_BYTES_OF_MANY)
        product.check()
        nbytes = product.nbytes
        calls = {"ours": product.ours, "pytorch": product.pytorch}
        calls |= {"openblas": product.openblas} if precision == "float32" else {}
        calls |= {"copy": copied} if few else {}
        least = least_seconds(calls)
        result = {"precision": precision, "rows": rows, "side": side, "microseconds": least["ours"] * 1e6}
        result |= {f"{name}_microseconds": least[name] * 1e6 for name in ("openblas", "pytorch") if name in least}
        result["share_of_peak"] = 2 * rows * side**2 / least["ours"] / peak
        if few:
            result["copy_bytes_per_second"] = 2 * 2**26 / least["copy"]
            result["share_of_copy"] = nbytes / least["ours"] / result["copy_bytes_per_second"]
        results.append(result)
        table.add_row(
            precision,
            str(rows),
            str(side),
            *(f"{least[name] * 1e6:.0f}" if name in least else "" for name in ("ours", "openblas", "pytorch")),
            f"{result['copy_bytes_per_second'] / 1e9:.1f}" if few else "",
            f"{nbytes / least['ours'] / 1e9:.1f}",
            f"{result['share_of_copy']:.2f}" if few else "",
            f"{result['share_of_peak']:.2f}",
        )
    Console(width=120).print(table)
    summary = {"peak_flops": peak, "products": results}
    if arguments.out is not None:
        write_text(arguments.out, json.dumps({"machine": describe(), **summary}, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
