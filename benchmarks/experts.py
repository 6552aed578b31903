"""Layers of experts beside the products of the chosen experts alone, and beside PyTorch; one thread.

    python -m benchmarks.experts [--rows 1 16 512] [--out benchmarks/results/experts.json]

A layer has two projections, an activation, a projection back, and the weighted sum of each token's choices. Its time is
compared with that of the products alone: of each chosen expert's rows, which lie one after the other already, with its
three matrices in panels, by the library's product of panels. So what is compared is the sorting of rows, the
activation, the sum, and what copies of rows take. PyTorch's time is that of the fastest of transformers'
implementations of the layer.

Each call takes other experts' weights from memory where there are few tokens: choices are uniform, and change from call
to call. Times are of the processor, medians of calls in turns. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before anything starts threads

import argparse
import ctypes
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hidet_dist
from benchmarks.serving.host import describe
from hidet_dist.artifacts import Manifest
from hidet_dist.files import write_text
from hidet_dist.native import DTYPE_CODES, library
from hidet_dist.native.signatures import PanelProduct
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import PANEL_WIDTHS, Panels

ROUNDS = 15
INPUTS = 7  # sets of choices that calls take in turns
MOST_ERROR = 1e-5
LEVELS = {"x86-64-v4": 4, "x86-64-v3": 3}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
MOST_GATHERED = 2**31  # bytes of matrices that an implementation may copy for each row


@dataclass(frozen=True)
class Shape:
    """A layer: its experts, how many of them a token chooses, and the sizes of tokens and of experts."""

    experts: int
    choices: int
    size: int
    inner: int


SHAPES = {"mixtral": Shape(8, 2, 1024, 3584), "qwen3-moe": Shape(64, 8, 1024, 384)}
"""Those of Mixtral and of Qwen3-30B-A3B, with a quarter and a half of their sizes."""


class Layer:
    """One layer, ours and transformers', for a number of tokens."""

    def __init__(self, shape: Shape, folder: Path):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        self.shape = shape
        self.config = MixtralConfig(
            hidden_size=shape.size, intermediate_size=shape.inner, num_local_experts=shape.experts
        )
        self.config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        self.module = MixtralExperts(self.config).eval()
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.normal_(0.0, weight.shape[2] ** -0.5)
        tokens = torch.export.Dim("tokens", min=1)
        graph = hidet_dist.from_torch(self.module, self.inputs(4, 0), ({0: tokens}, {0: tokens}, {0: tokens}))
        hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"symbols": {"tokens": 64}}, folder)
        self.partition = hidet_dist.load_partition(folder)
        arch = Manifest.load(folder).arch
        self.level, self.width = LEVELS.get(arch or "", 1), PANEL_WIDTHS[arch or "x86-64"]
        gate_up, down = self.module.gate_up_proj.data, self.module.down_proj.data
        self.panels = [self._packed(one) for one in (*gate_up.chunk(2, 1), down)]
        self.scratch = torch.empty(library().hidet_dist_panels_scratch(self.level) + 64, dtype=torch.uint8)

    def _packed(self, weight: torch.Tensor) -> torch.Tensor:
        experts, columns, depth = weight.shape
        return packed(weight, Panels(experts, depth, columns, True, self.width))

    def inputs(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, their experts, uniformly, and the weights of these."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(tokens, self.shape.experts, generator=generator).topk(self.shape.choices).indices
        weights = torch.rand(tokens, self.shape.choices, generator=generator)
        return torch.randn(tokens, self.shape.size, generator=generator), chosen, weights

    def products(self, chosen: torch.Tensor) -> Callable[[], None]:
        """The products of the chosen experts alone."""
        multiply, made = library().hidet_dist_multiply_panels, []
        float32 = DTYPE_CODES["float32"]
        address = -self.scratch.data_ptr() % 64 + self.scratch.data_ptr()
        counts = torch.bincount(chosen.reshape(-1), minlength=self.shape.experts).tolist()
        most, sides = max(counts), (self.shape.size, self.shape.inner)
        left, right = torch.randn(most, max(sides)), torch.empty(most, max(sides))
        for expert, rows in enumerate(counts):
            for panels, back in zip(self.panels, (False, False, True), strict=True):
                depth, columns = reversed(sides) if back else sides
                part = PanelProduct(
                    left.data_ptr(), depth, 1, rows, columns, depth, panels[expert].data_ptr(), 0, 0, float32, float32,
                    right.data_ptr(), columns, address,
                )  # fmt: skip
                if rows:
                    made.append(part)

        def call() -> None:
            for part in made:
                multiply(self.level, ctypes.byref(part))

        call.kept = left, right  # type: ignore[attr-defined]
        return call

    def calls(self, tokens: int) -> dict[str, Callable[[], Any]]:
        """What is measured for this number of tokens."""
        given = [self.inputs(tokens, seed) for seed in range(INPUTS)]
        calls: dict[str, Callable[[], Any]] = {
            "ours": _in_turns([partial(self.partition, *x) for x in given]),
            "products": _in_turns([self.products(chosen) for _, chosen, _ in given]),
        }
        gathered = 4 * tokens * self.shape.choices * 2 * self.shape.size * self.shape.inner
        for name in IMPLEMENTATIONS:
            if name != "batched_mm" or gathered <= MOST_GATHERED:
                calls[name] = _in_turns([partial(self.pytorch, name, *x) for x in given])
        ours, theirs = self.partition(*given[0]), self.pytorch("eager", *given[0])
        error = torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs)
        assert error < MOST_ERROR, error
        return calls

    def pytorch(self, implementation: str, *inputs: torch.Tensor) -> torch.Tensor:
        """The layer by one of transformers' implementations."""
        self.config._experts_implementation = implementation
        with torch.inference_mode():
            result: torch.Tensor = self.module(*inputs)
        return result


def _in_turns(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    turns: Iterator[Callable[[], Any]] = itertools.cycle(calls)

    def one() -> Any:
        return next(turns)()

    return one


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Measure the median processor seconds of each call, in turns."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.process_time()
            for _ in range(INPUTS):
                call()
            seconds[name].append((time.process_time() - begin) / INPUTS)
    return {name: statistics.median(own) for name, own in seconds.items()}


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 512], help="numbers of tokens")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Layers of experts, milliseconds of one thread")
    for column in ("layer", "tokens", "ours", "products alone", "ratio", "PyTorch", "by", "PyTorch / ours"):
        table.add_column(column, justify="right")
    results = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            layer = Layer(shape, Path(folder) / "out")
            for tokens in arguments.rows:
                found = medians(layer.calls(tokens))
                own = {key: found[key] for key in IMPLEMENTATIONS if key in found}
                best = min(own, key=lambda key: own[key])
                ratio = found["ours"] / found["products"]
                results.append({"layer": name, "tokens": tokens, "ratio": ratio, "seconds": found})
                times = [f"{seconds * 1e3:.2f}" for seconds in (found["ours"], found["products"], own[best])]
                faster = own[best] / found["ours"]
                table.add_row(name, str(tokens), *times[:2], f"{ratio:.2f}", times[2], best, f"{faster:.2f}")
            layer.partition.close()
    Console(width=120).print(table)
    if arguments.out is not None:
        write_text(arguments.out, json.dumps({"machine": describe(), "layers": results}, indent=1) + "\n")
    print(json.dumps({"layers": results}))


if __name__ == "__main__":
    main()
