"""CUDA's products by weights of 8 and 4 bits, on the emulator, beside products by the rounded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.emulator import emulated
from tests.emulator.emulated import Emulator

import hidet_dist
from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.normalize.storage import with_storages
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.testing.rounding import rounded_weight
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import StoredPrecision

# Of so few multiprocessors that tens of rows fill them.
SMALL = CudaTarget(replace(GPUS["H100-SXM5-80GB"], multiprocessors=2))
DEPTH, COLUMNS = 200, 72  # neither whole groups nor whole panels


Product = Callable[..., torch.Tensor]


class Sum(torch.nn.Module):
    """A linear layer, and the sum of its result and another input."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight.data = weight.float()

    def forward(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """added + linear(x)"""
        return added + self.linear(x)


@pytest.fixture
def product(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Product]:
    """A product by a weight [columns, depth] of few bits: of any number of rows; with a sum if ``added``."""
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))

    def build(weight: torch.Tensor, precision: StoredPrecision, added: bool = False) -> Product:
        module = Sum(weight).eval()
        given = [torch.zeros(3, extent) for extent in weight.shape[::-1]]
        rows = torch.export.Dim("rows", min=1)
        if added:
            given = [x.to(weight.dtype) for x in given]
            graph = normalize(hidet_dist.from_torch(module.to(weight.dtype), tuple(given), ({0: rows},) * 2))
        else:
            traced = hidet_dist.from_torch(module.linear, tuple(given[:1]), ({0: rows},))
            dtype = str(weight.dtype).removeprefix("torch.")
            graph = normalize(traced if dtype == "float32" else in_precision(traced, dtype).graph)
        storage = partial(SMALL.storage, precision, 2)
        graph = with_storages(graph, SMALL.record.quantized_dtypes, lambda _, transposed: storage(transposed)).graph
        plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols={"rows": SymbolSize(3)}).plan
        program = partition_graph(graph, plan.stages[0], target=SMALL)
        compiled = compile_program(program, SMALL)
        assert "QuantizedMatmul" in compiled.kernel_names
        ((_, panels),) = compiled.stage.panels.items()
        assert (panels.precision, panels.group) == (precision.name, precision.group)
        held = packed(weight, panels).numpy()

        def run(*xs: torch.Tensor) -> torch.Tensor:
            values = {one: x.numpy() for one, x in zip(compiled.graph.inputs, xs, strict=False)}
            for node, kernel in zip(compiled.graph.nodes, compiled.kernel_of_node, strict=True):
                (y,) = node.outputs
                shape = [len(xs[0]), int(y.shape[-1])]
                if node.share_map:
                    values[y] = values[node.inputs[0]].reshape(shape)
                    continue
                given = [values.get(one, held) for one in node.inputs]
                is_wide = y.dtype.name != "bfloat16"  # NumPy does not have it: its bits
                empty = np.full(shape, np.nan, y.dtype.name) if is_wide else np.full(shape, -1, np.int16)
                found = emulated.run(compiled.kernels[kernel], *given, empty, sizes={"rows": len(xs[0])})
                values[y] = found[-1]
            (y,) = compiled.graph.outputs
            return torch.from_numpy(values[y]).view(getattr(torch, y.dtype.name))

        return run

    return build


def check(run: Product, weight: torch.Tensor, precision: StoredPrecision, counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(max(counts), weight.shape[1], generator=generator)
    results = [run(x[:count]) for count in counts]
    exact = x.to(weight.dtype).double() @ rounded_weight(weight, precision.name, precision.group).T
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}[weight.dtype]
    for count, y in zip(counts, results, strict=True):
        assert (y.double() - exact[:count]).abs().max() <= tolerance * exact.abs().max()
        assert torch.equal(y, results[-1][:count])  # whatever rows are beside it


def random(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(COLUMNS, DEPTH, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_products_are_those_of_the_rounded_weight(
    product: Callable[[torch.Tensor, StoredPrecision], Product], name: str, group: int
) -> None:
    precision = StoredPrecision(name, group)
    check(product(random(), precision), random(), precision, (1, 2, 3, 19))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "group"), [("int4", 32), ("int4", 128), ("int8", 32), ("int8", 64)])
def test_products_are_those_of_the_rounded_weight_in_half_precision(
    product: Callable[[torch.Tensor, StoredPrecision], Product], name: str, group: int, dtype: torch.dtype
) -> None:
    """Rows in one block of few, in several, and in blocks of many: the same bits."""
    precision, weight = StoredPrecision(name, group), random(dtype)
    check(product(weight, precision), weight, precision, (1, 9, 32, 33, 70))


@pytest.mark.slow
def test_a_sum_behind_a_product_is_written_by_it(product: Callable[..., Product]) -> None:
    precision, weight = StoredPrecision("int4", 128), random(torch.float16)
    alone, summed = product(weight, precision), product(weight, precision, added=True)
    generator = torch.Generator().manual_seed(2)
    x, other = (torch.randn(70, extent, generator=generator).half() for extent in weight.shape[::-1])
    expected = other + alone(x.float()).half()
    for count in (1, 70):
        assert torch.equal(summed(x[:count], other[:count]), expected[:count])


@pytest.mark.slow
def test_rows_by_a_weight_of_four_bits(product: Callable[[torch.Tensor, StoredPrecision], Product]) -> None:
    precision, weight = StoredPrecision("int4", 32), random(torch.float16)
    check(product(weight, precision), weight, precision, (1, 40))
