"""What a machine description says of a GPU, measured on this one by PyTorch: ``python -m benchmarks.gpu.rates``.

* the rate of a copy of 1 GiB on the device, in bytes read and written a second
* the rates of products of 8192 x 8192 x 8192 by dtype, in FLOP/s, with random operands; float32 without tf32
* the seconds of products of few rows by weights of sizes that models have, with the weight read from memory, and the
  rate at which that is
* the seconds of one of many small kernels, in a CUDA graph and without

Times are medians, by events of the device. The last line is JSON, which is also written to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hidet_dist.files import write_text

COPIED = 1 << 30  # bytes
SIDE = 8192
ROWS = (1, 8, 64, 512, 4096)
WEIGHTS = ((2048, 2048), (2048, 11264), (4096, 4096), (4096, 28672), (8192, 8192))
SMALL_KERNELS, SMALL = 200, 2048  # kernels in a row, and the elements of each
WARM_UP, CALLS = 3, 15
NO_GPU = 2


def seconds(call: Callable[[], object]) -> float:
    """The median of the device's seconds of a call."""
    found = []
    for _ in range(WARM_UP + CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end))
    return statistics.median(found[WARM_UP:])


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The kernels of a call as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def products() -> dict[str, float]:
    """The rates of large products by dtype, in FLOP/s."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, y = (torch.randn(SIDE, SIDE, device="cuda", dtype=dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = 2 * SIDE**3 / seconds(partial(torch.matmul, x, y))
    return found


def _products(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.nn.functional.linear(x, w) for w in weights]


def few_rows() -> dict[str, dict[str, float]]:
    """The seconds of products in half precision by rows and weights, and the bytes or FLOP a second that this is."""
    found = {}
    for depth, columns in WEIGHTS:
        nbytes = 2 * depth * columns
        # So many weights, one after the other, that none is in the cache when its turn comes.
        count = max(4, -(-(256 << 20) // nbytes))
        weights = [torch.randn(columns, depth, device="cuda", dtype=torch.float16) for _ in range(count)]
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.float16)
            each = seconds(captured(partial(_products, x, weights))) / count
            found[f"{rows}x{depth}x{columns}"] = {
                "seconds": each,
                "bytes_per_second": (nbytes + 2 * rows * (depth + columns)) / each,
                "flop_per_second": 2 * rows * depth * columns / each,
            }
    return found


def small_kernels() -> dict[str, float]:
    """The seconds of a kernel that has next to nothing to do."""
    x = torch.zeros(SMALL, device="cuda", dtype=torch.float16)

    def run() -> None:
        for _ in range(SMALL_KERNELS):
            x.add_(1.0)

    return {"graph": seconds(captured(run)) / SMALL_KERNELS, "launches": seconds(run) / SMALL_KERNELS}


def main() -> int:
    """Measure, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU, nothing was measured", file=sys.stderr)
        return NO_GPU
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.randint(0, 127, (COPIED,), device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy_bytes_per_second": 2 * COPIED / seconds(lambda: target.copy_(source)),
        "flop_per_second": products(),
        "few_rows": few_rows(),
        "small_kernel_seconds": small_kernels(),
    }
    name = found["gpu"].replace(" ", "-").lower()
    write_text(options.out / f"gpu-rates-{name}.json", json.dumps(found, indent=1))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
