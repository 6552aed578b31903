"""What kernels take from the project's headers for CUDA, compiled by NVIDIA's compiler: the emulator's takes more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hidet.graph import FlowGraph
from tests.compile.test_row_attention import PLAIN, Case, graph_of

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
from hidet_dist.toolchain.cuda import Toolkit
from hidet_dist.weights.panels import StoredPrecision

from .elf import architectures
from .test_experts import graph_of as experts_of

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])


def kernels_of(graph: FlowGraph, **sizes: int) -> tuple[str, ...]:
    """The names of a graph's kernels, which all have code for the GPU."""
    symbols = {name: SymbolSize(size) for name, size in sizes.items()}
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols=symbols).plan
    compiled = compile_program(partition_graph(graph, plan.stages[0], target=H100), H100)
    for library in compiled.kernels:
        assert architectures(library) == {90}
    return tuple(compiled.kernel_names)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_products_by_few_bits_compile(nvcc: Toolkit, precision: str) -> None:
    rows = torch.export.Dim("rows", min=1)
    linear = torch.nn.Linear(128, 64, bias=False).eval()
    graph = hidet_dist.from_torch(linear, (torch.zeros(3, 128),), ({0: rows},))
    graph = normalize(in_precision(graph, "float16").graph)
    stored = StoredPrecision(precision, 32)
    dtypes = H100.record.quantized_dtypes
    graph = with_storages(graph, dtypes, lambda _, transposed: H100.storage(stored, 2, transposed)).graph
    assert "QuantizedMatmul" in kernels_of(graph, rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_experts_compile(nvcc: Toolkit, transposed: bool) -> None:
    assert kernels_of(normalize(experts_of("float16", transposed, shared=True)), tokens=64) == ("ExpertProduct",)


HALVES = replace(PLAIN, size_k=128, size_v=128, dtype="float16", pool="float16")
LATENTS = Case(16, 1, 576, 512, values_in_keys=True, dtype="bfloat16", pool="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, HALVES, LATENTS])
def test_attention_over_rows_compiles(nvcc: Toolkit, case: Case) -> None:
    sizes = {"tokens": 64, "sequences": 64, "columns": 64}
    assert kernels_of(normalize(graph_of(case)), **sizes) == ("RowAttentionChunks", "RowAttention")
