"""The CPU's kernel of attention over rows: its results are the definition's, and a token's are its own alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from hidet.ffi import runtime_api
from hidet.graph import FlowGraph, Tensor

from hidet_dist.compile import compile_program
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.operators.row_attention import RowAttentionOp, RowAttentionPartsOp
from hidet_dist.partitioning import partition_graph
from hidet_dist.runtime.libraries import load_needed
from hidet_dist.search import search
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize

ROWS = 3060  # of each pool


@dataclass(frozen=True)
class Case:
    """A kernel: the sizes of queries and pools, options of the operator, and the level of the processor."""

    heads: int
    groups: int
    size_k: int
    size_v: int
    page: int = 1
    softcap: float = 0.0
    values_in_keys: bool = False
    sinks: bool = False
    parts: int = 0
    dtype: str = "float32"
    pool: str = "float32"
    arch: str = "native"

    @property
    def options(self) -> dict[str, Any]:
        value_size = self.size_v if self.values_in_keys else 0
        own: dict[str, Any] = {"scale": 0.35, "softcap": self.softcap, "page": self.page, "value_size": value_size}
        return own if self.parts else {**own, "has_sinks": self.sinks}


PLAIN = Case(6, 2, 64, 64, page=4)
CASES = {
    "plain": PLAIN,
    "odd sizes, pools of halves": Case(5, 5, 7, 9, softcap=2.0, sinks=True, dtype="float16", pool="float16"),
    "values in keys": Case(7, 1, 40, 32, page=3, values_in_keys=True, dtype="bfloat16", pool="bfloat16"),
    "parts": Case(6, 3, 16, 24, page=2, softcap=3.0, parts=3, pool="bfloat16"),
}
LEVELS = {
    f"{name}, {arch}": Case(**{**vars(case), "arch": arch})
    for name, case in CASES.items()
    for arch in ("x86-64", "x86-64-v3")
}


def graph_of(case: Case) -> FlowGraph:
    """The operator alone; the tokens of a step, its sequences, and the columns of its table are symbolic."""
    lead = [case.parts] if case.parts else []

    def symbol(*shape: Any, dtype: str = "int32") -> Tensor:
        return hidet.symbol(list(shape), dtype, "cpu")

    pools = [case.size_k] if case.values_in_keys else [case.size_k, case.size_v]
    inputs = [
        symbol("tokens", case.heads, case.size_k, dtype=case.dtype),
        *(symbol(*lead, ROWS, case.groups, size, dtype=case.pool) for size in pools),
        symbol("sequences", *lead, "columns"),
        symbol("tokens"),
        symbol("tokens", *lead),
        symbol("tokens", *lead),
        *[symbol(case.heads, dtype="float32")] * case.sinks,
    ]
    operator = RowAttentionPartsOp if case.parts else RowAttentionOp
    return hidet.trace_from(operator(*inputs, **case.options).outputs[0], inputs)


class Kernel:
    """The kernel of a case, for steps of any size."""

    def __init__(self, case: Case):
        self.case, self.graph = case, graph_of(case)
        graph = normalize(self.graph)
        symbols = {name: SymbolSize(64) for name in ("tokens", "sequences", "columns")}
        plan = search(graph, builtin("cpu", DeviceMesh((1,))), symbols=symbols).plan
        compiled = compile_program(partition_graph(graph, plan.stages[0]), CpuTarget(case.arch))
        assert compiled.kernel_names == ["RowAttention"]
        load_needed(compiled.libraries, Path())
        self.function = ctypes.CDLL(str(compiled.kernels[0])).hidet_launch_0

    def __call__(self, x: Sequence[torch.Tensor]) -> torch.Tensor:
        case, table = self.case, x[-4 - self.case.sinks]
        sizes = {"tokens": len(x[0]), "sequences": len(table), "columns": table.shape[-1]}
        for name, size in sizes.items():
            runtime_api.set_symbol_value(name, size)
        shape = [*[case.parts] * bool(case.parts), len(x[0]), case.heads, case.size_v + bool(case.parts)]
        dtype = torch.float32 if case.parts else getattr(torch, case.dtype)
        y = torch.full(shape, math.nan, dtype=dtype)
        arguments = [one.contiguous() for one in (*x, y)]
        self.function(*(ctypes.c_void_p(one.data_ptr()) for one in arguments))
        return y

    def wanted(self, x: Sequence[torch.Tensor]) -> np.ndarray:
        """The definition, in double precision."""
        (y,) = evaluate_graph(self.graph, [v.double().numpy() if v.is_floating_point() else v.numpy() for v in x])
        return y


def step(case: Case, lengths: Sequence[Sequence[int]], window: int = 0, seed: int = 0) -> list[torch.Tensor]:
    """Inputs of a step that has tokens of these lengths for each sequence, whose pages lie anywhere in the pools."""
    generator = torch.Generator().manual_seed(seed)
    page, parts = case.page, max(case.parts, 1)
    most = max((length for own in lengths for length in own), default=1)
    columns = math.ceil(most / page / parts) + 1
    pages = torch.stack([torch.randperm(ROWS // page, generator=generator) for _ in range(parts)])
    table = pages[:, : len(lengths) * columns].reshape(parts, len(lengths), columns).transpose(0, 1)
    sequences = torch.tensor([number for number, own in enumerate(lengths) for _ in own], dtype=torch.int32)
    ends = torch.tensor([length for own in lengths for length in own])[:, None]
    begins = (ends - window).clamp_min(0) if window else 0 * ends
    if case.parts:  # as the rows of a part are among the first ones of its sequence
        starts = torch.arange(parts) * page
        begins, ends = (
            x // (parts * page) * page + (x % (parts * page) - starts).clamp(0, page) for x in (begins, ends)
        )
    lead = [parts] if case.parts else []
    pools = [case.size_k] if case.values_in_keys else [case.size_k, case.size_v]

    def normal(*shape: int, dtype: str = "float32") -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(getattr(torch, dtype))

    return [
        normal(len(sequences), case.heads, case.size_k, dtype=case.dtype),
        *(normal(*lead, ROWS, case.groups, size, dtype=case.pool) for size in pools),
        (table if case.parts else table[:, 0]).to(torch.int32),
        sequences,
        *(x.to(torch.int32) if case.parts else x[:, 0].to(torch.int32) for x in (begins, ends)),
        *[normal(case.heads)] * case.sinks,
    ]


# Prompts of lengths beside chunks of the kernel and of its blocks of tokens, decoding, and tokens that see nothing.
STEPS: dict[str, tuple[list[list[int]], int]] = {
    "decoding": ([[1], [127], [0], [128], [300]], 0),
    "prompts": ([list(range(1, 61)), [0], list(range(120, 151))], 0),
    "windows": ([list(range(230, 270)), [5], [1000]], 37),
}
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def check(case: Case) -> None:
    kernel = Kernel(case)
    for lengths, window in STEPS.values():
        x = step(case, lengths, window)
        y = kernel(x)
        tolerance = TOLERANCES["float32" if case.parts else case.dtype]
        np.testing.assert_allclose(y.double().numpy(), kernel.wanted(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "odd sizes, pools of halves",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("values in keys", "parts")),
    ],
)
def test_results_are_those_of_the_definition(name: str) -> None:
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_results_are_those_of_the_definition_at_each_level_of_processors(name: str) -> None:
    check(LEVELS[name])


REAL = {
    "LLaMA 3 8B": Case(32, 8, 128, 128, page=12, dtype="bfloat16", pool="bfloat16"),
    "Gemma 2 9B": Case(16, 8, 256, 256, page=12, softcap=50.0, dtype="bfloat16", pool="bfloat16"),
    "gpt-oss 20B": Case(64, 8, 64, 64, page=12, sinks=True, dtype="bfloat16", pool="bfloat16"),
    "DeepSeek-V2-Lite": Case(16, 1, 576, 512, page=12, values_in_keys=True, dtype="bfloat16", pool="bfloat16"),
    "DeepSeek-V3": Case(128, 1, 576, 512, page=12, values_in_keys=True, dtype="bfloat16", pool="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_results_are_right_at_the_sizes_of_models(name: str) -> None:
    """Beside a computation for each token by PyTorch, in double precision."""
    case = REAL[name]
    x = step(case, [[1], [300], [127, 128, 129], [700]])
    y = Kernel(case)(x)
    query, keys = x[0].double(), x[1].double()
    values = keys[..., : case.size_v] if case.values_in_keys else x[2].double()
    table, sequences, begins, ends = x[-4 - case.sinks : len(x) - case.sinks]
    sinks = x[-1].double() if case.sinks else torch.full((case.heads,), -math.inf)
    for t in range(len(query)):
        seen = torch.arange(int(begins[t]), int(ends[t]))
        rows = table[int(sequences[t])].long()[seen // case.page] * case.page + seen % case.page
        grouped = query[t].reshape(case.groups, -1, case.size_k)
        scores = 0.35 * torch.einsum("ghk,rgk->ghr", grouped, keys[rows])
        scores = case.softcap * torch.tanh(scores / case.softcap) if case.softcap else scores
        weights = torch.cat([scores, sinks.reshape(case.groups, -1, 1)], -1).softmax(-1)[..., :-1]
        wanted = torch.einsum("ghr,rgv->ghv", weights, values[rows]).reshape(case.heads, case.size_v)
        np.testing.assert_allclose(y[t].double().numpy(), wanted.numpy(), rtol=2e-2, atol=2e-2)


def test_a_tokens_result_has_the_same_bits_whatever_is_beside_it() -> None:
    """Alone, among other tokens of its sequence, beside other sequences, and with a wider table and any rest in it."""
    kernel = Kernel(PLAIN)
    lengths, window = STEPS["windows"]
    query, keys, values, table, sequences, begins, ends = step(PLAIN, lengths, window)
    whole = kernel([query, keys, values, table, sequences, begins, ends])
    wider = torch.cat([table, torch.full((len(table), 40), -1, dtype=torch.int32)], 1)
    for number in (0, 1, 30, 40, 41):
        own = slice(number, number + 1)
        (sequence,) = sequences[own]
        first = torch.zeros(1, dtype=torch.int32)
        alone = [query[own], keys, values, wider[sequence : sequence + 1], first, begins[own], ends[own]]
        assert torch.equal(kernel(alone)[0], whole[number])
    some = slice(3, 42)
    assert torch.equal(
        kernel([query[some], keys, values, wider, *(x[some] for x in (sequences, begins, ends))]), whole[some]
    )


def test_rows_that_no_pool_has_are_no_numbers_where_they_are_seen() -> None:
    """Also those of a sequence that the table does not have; a token that does not see them has its result."""
    kernel = Kernel(PLAIN)
    x = step(PLAIN, [[4, 9], [40, 41], [6]])
    wanted = kernel(x)
    table, sequences = x[3], x[4]
    table[0, 1], table[1, 10] = ROWS, -5  # rows 4 to 7, and 40 to 43
    sequences[4] = 3
    y = kernel(x)
    assert torch.equal(y[[0, 2]], wanted[[0, 2]])
    assert y[[1, 3, 4]].isnan().all()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    kernel = Kernel(PLAIN)
    steps = [step(PLAIN, lengths, window) for lengths, window in STEPS.values()] + [step(PLAIN, [[2500]])]
    openmp = ctypes.CDLL("libgomp.so.1")  # that of kernels; PyTorch has its own
    before = openmp.omp_get_max_threads()
    results = []
    for threads in (1, 2, 3):
        openmp.omp_set_num_threads(threads)
        results.append([kernel(x) for x in steps])
    openmp.omp_set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
