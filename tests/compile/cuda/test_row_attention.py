"""CUDA's kernels of attention over rows, on the emulator, beside the operator's definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.compile.test_row_attention import CASES, PLAIN, STEPS, TOLERANCES, Case, graph_of, step
from tests.emulator import emulated
from tests.emulator.emulated import Emulator

from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import evaluate, extents_of
from hidet_dist.spec.symbols import SymbolSize

GPU = GPUS["H100-SXM5-80GB"]
MANY, FEW, ONE = 10**6, 4, 1
"""Multiprocessors, by which a step's chunks are blocks of their own, its tokens are, or several tokens are a block."""

Kernels = Callable[..., torch.Tensor]


def bits(x: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16."""
    array: np.ndarray = (
        x.contiguous().view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.contiguous().numpy()
    )
    return array


@pytest.fixture
def kernels(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, int], Kernels]:
    """The kernels of a case for a GPU of so many multiprocessors, as a function of a step's tensors."""
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))

    def build(case: Case, multiprocessors: int) -> Kernels:
        target = CudaTarget(replace(GPU, multiprocessors=multiprocessors))
        graph = normalize(graph_of(case))
        symbols = {name: SymbolSize(64) for name in ("tokens", "sequences", "columns")}
        plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols=symbols)
        compiled = compile_program(partition_graph(graph, plan.stages[0], target=target), target)
        assert [node.name for node in compiled.graph.nodes] == ["RowAttentionChunks", "RowAttention"]

        def run(x: Sequence[torch.Tensor], environment: dict[str, str] | None = None) -> torch.Tensor:
            sizes = {"tokens": len(x[0]), "sequences": len(x[-4 - case.sinks]), "columns": x[-4 - case.sinks].shape[-1]}
            values = dict(zip(compiled.graph.inputs, map(bits, x), strict=True))
            for node, kernel in zip(compiled.graph.nodes, compiled.kernel_of_node, strict=True):
                (y,) = node.outputs
                shape = [evaluate(extent, sizes) for extent in extents_of(y)]
                dtype = getattr(torch, y.dtype.name)
                given = [values[one] for one in node.inputs]
                empty = bits(torch.full(shape, torch.nan, dtype=dtype))
                found = emulated.run(compiled.kernels[kernel], *given, empty, environment=environment, sizes=sizes)
                values[y] = found[-1]
            (y,) = compiled.graph.outputs
            return torch.from_numpy(values[y]).view(getattr(torch, y.dtype.name))

        return run

    return build


def wanted(case: Case, x: Sequence[torch.Tensor]) -> np.ndarray:
    (y,) = evaluate_graph(graph_of(case), [v.double().numpy() if v.is_floating_point() else v.numpy() for v in x])
    return np.asarray(y)


def check(case: Case, run: Kernels, name: str) -> None:
    x = step(case, *STEPS[name])
    tolerance = TOLERANCES["float32" if case.parts else case.dtype]
    np.testing.assert_allclose(run(x).double().numpy(), wanted(case, x), rtol=tolerance, atol=tolerance)


def test_tokens_are_those_of_the_definition(kernels: Callable[[Case, int], Kernels]) -> None:
    """A short step of an odd size, in halves, with sinks and a soft cap."""
    case = CASES["odd sizes, pools of halves"]
    check(case, kernels(case, MANY), "decoding")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("multiprocessors", [MANY, FEW, ONE])
def test_results_are_those_of_the_definition(
    kernels: Callable[[Case, int], Kernels], name: str, multiprocessors: int
) -> None:
    run = kernels(CASES[name], multiprocessors)
    for own in STEPS:
        check(CASES[name], run, own)


@pytest.mark.slow
def test_a_tokens_result_has_the_same_bits_however_the_work_is_divided(
    kernels: Callable[[Case, int], Kernels],
) -> None:
    """Also alone, with a wider table with any rest in it, and whatever order warps and copies come in."""
    x = step(PLAIN, *STEPS["windows"])
    results = [kernels(PLAIN, multiprocessors)(x) for multiprocessors in (MANY, FEW, ONE)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    split = kernels(PLAIN, MANY)
    assert torch.equal(split(x, {"EMULATED_WARPS": "reverse"}), results[0])
    query, keys, values, table, sequences, begins, ends = x
    wider = torch.cat([table, torch.full((len(table), 40), -1, dtype=torch.int32)], 1)
    for number in (0, 30, 41):
        own = slice(number, number + 1)
        (sequence,) = sequences[own]
        first = torch.zeros(1, dtype=torch.int32)
        alone = [query[own], keys, values, wider[sequence : sequence + 1], first, begins[own], ends[own]]
        assert torch.equal(split(alone)[0], results[0][number])


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [MANY, FEW])
def test_rows_that_no_pool_has_are_no_numbers_where_they_are_seen(
    kernels: Callable[[Case, int], Kernels], multiprocessors: int
) -> None:
    run = kernels(PLAIN, multiprocessors)
    x = step(PLAIN, [[4, 9], [40, 41], [6]])
    before = run(x)
    rows = x[1].shape[0]
    table, sequences = x[3], x[4]
    table[0, 1], table[1, 10] = rows, -5  # rows 4 to 7, and 40 to 43
    sequences[4] = 3
    y = run(x)
    assert torch.equal(y[[0, 2]], before[[0, 2]])
    assert y[[1, 3, 4]].isnan().all()
