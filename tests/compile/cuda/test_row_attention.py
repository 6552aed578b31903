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

HALVES = {
    # Blocks of 64 queries: 16 tokens of four heads each, and 9 of seven.
    "halves": Case(8, 2, 128, 128, page=4, dtype="float16", pool="float16"),
    "heads by seven": Case(7, 1, 72, 40, page=3, softcap=2.0, sinks=True, dtype="bfloat16", pool="bfloat16"),
    # Several warps share a tile of queries: two or four.
    "long rows": Case(6, 2, 144, 200, page=2, dtype="float16", pool="float16"),
    "latents": Case(20, 1, 576, 512, values_in_keys=True, dtype="bfloat16", pool="bfloat16"),
    "parts of halves": Case(4, 2, 64, 64, page=2, softcap=3.0, parts=3, dtype="float16", pool="float16"),
}
"""Cases that tensor cores compute."""

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
        plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols=symbols).plan
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
    tolerance = TOLERANCES["float32" if case.parts and case.pool != case.dtype else case.dtype]
    np.testing.assert_allclose(run(x).double().numpy(), wanted(case, x), rtol=tolerance, atol=tolerance)


def test_tokens_are_those_of_the_definition(kernels: Callable[[Case, int], Kernels]) -> None:
    """A short step of an odd size, in halves, with sinks and a soft cap."""
    case = CASES["odd sizes, pools of halves"]
    check(case, kernels(case, MANY), "decoding")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *HALVES])
@pytest.mark.parametrize("multiprocessors", [MANY, FEW, ONE])
def test_results_are_those_of_the_definition(
    kernels: Callable[[Case, int], Kernels], name: str, multiprocessors: int
) -> None:
    case = {**CASES, **HALVES}[name]
    run = kernels(case, multiprocessors)
    for own in STEPS:
        check(case, run, own)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(np.array_equal(bits(a), bits(b)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, HALVES["halves"], HALVES["long rows"]])
def test_a_tokens_result_has_the_same_bits_however_the_work_is_divided(
    kernels: Callable[[Case, int], Kernels], case: Case
) -> None:
    """Also alone, with a wider table with any rest in it, and whatever order warps and copies come in."""
    x = step(case, *STEPS["windows"])
    results = [kernels(case, multiprocessors)(x) for multiprocessors in (MANY, FEW, ONE)]
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    for multiprocessors in (MANY, ONE):
        run = kernels(case, multiprocessors)
        for disorder in ({"EMULATED_WARPS": "reverse"}, {"EMULATED_COPIES": "eager"}):
            assert same_bits(run(x, disorder), results[0])
        query, keys, values, table, sequences, begins, ends = x
        wider = torch.cat([table, torch.full((len(table), 40), -1, dtype=torch.int32)], 1)
        for number in (0, 30, 41):
            own = slice(number, number + 1)
            (sequence,) = sequences[own]
            first = torch.zeros(1, dtype=torch.int32)
            alone = [query[own], keys, values, wider[sequence : sequence + 1], first, begins[own], ends[own]]
            assert same_bits(run(alone)[0], results[0][number])


def prompt_in_steps(run: Kernels, x: Sequence[torch.Tensor], cuts: Sequence[int]) -> torch.Tensor:
    """The results of a step's tokens, which are computed by several steps: up to each cut in turn."""
    query, keys, values, table, sequences, begins, ends = x
    parts = []
    for first, behind in zip([0, *cuts], [*cuts, len(query)], strict=True):
        own = slice(first, behind)
        parts.append(run([query[own], keys, values, table, sequences[own], begins[own], ends[own]]))
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 37])
def test_a_prompt_has_the_same_bits_in_one_step_and_in_several(
    kernels: Callable[[Case, int], Kernels], window: int
) -> None:
    """Beside other requests, of a token or of many, and with a rest that begins anywhere in a chunk of rows."""
    case = HALVES["halves"]
    prompt, others = list(range(1, 161)), [[300], [7], list(range(90, 95)), [129, 130], [64]]
    run = kernels(case, ONE)
    x = step(case, [[200], prompt, *others], window)
    whole = run(x)
    for cuts in ([40, 41, 130], [3, 64, 65, 66, 81, 150]):
        assert same_bits(prompt_in_steps(run, x, cuts), whole), cuts
    assert same_bits(prompt_in_steps(kernels(case, MANY), x, [90]), whole)
    np.testing.assert_allclose(whole.double().numpy(), wanted(case, x), rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halves", "long rows"])
def test_values_that_are_no_numbers_reach_only_tokens_that_see_them(
    kernels: Callable[[Case, int], Kernels], name: str
) -> None:
    case = HALVES[name]
    run = kernels(case, ONE)
    x = step(case, [list(range(1, 41))])
    before = run(x)
    table, page = x[3], case.page
    for place, value in ((17, torch.inf), (30, torch.nan)):
        x[2][int(table[0, place // page]) * page + place % page, 1, 5] = value
    y = run(x)
    half = case.heads // case.groups
    assert same_bits(y[:, :half], before[:, :half]) and same_bits(y[:17], before[:17])
    assert not y[17:, half:, 5].isfinite().any() and y[30:, half:, 5].isnan().all()
    y[:, half:, 5], before[:, half:, 5] = 0.0, 0.0
    assert same_bits(y, before)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, HALVES["halves"]])
@pytest.mark.parametrize("multiprocessors", [MANY, FEW, ONE])
def test_rows_that_no_pool_has_are_no_numbers_where_they_are_seen(
    kernels: Callable[[Case, int], Kernels], multiprocessors: int, case: Case
) -> None:
    run = kernels(case, multiprocessors)
    x = step(case, [[4, 9], [40, 41], [6]])
    before = run(x)
    rows = x[1].shape[0]
    table, sequences = x[3], x[4]
    table[0, 1], table[1, 10] = rows, -5  # rows 4 to 7, and 40 to 43
    sequences[4] = 3
    y = run(x)
    assert same_bits(y[[0, 2]], before[[0, 2]])
    assert y[[1, 3, 4]].isnan().all()
