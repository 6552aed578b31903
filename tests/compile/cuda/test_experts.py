"""Products by experts for GPUs: what they become computes the same; the kernel runs on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from hidet.graph import FlowGraph
from tests.emulator import emulated
from tests.emulator.emulated import Emulator

from hidet_dist import operators
from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.experts import define_experts
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])
LABELS, CHOICES = [3, 1, 0, 6, 2], 2  # experts of this device; one is padding, and others are elsewhere
INNER, COLUMNS = 200, 136  # neither whole pieces of the depth nor whole blocks of columns

Product = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_products_of_all_experts_are_those_of_the_chosen_ones(transposed: bool) -> None:
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x = hidet.symbol([5, 6], "float32", "cpu")
        chosen, scales = hidet.symbol([5, 2], "int32", "cpu"), hidet.symbol([5, 2], "float32", "cpu")
        up = hidet.symbol([4, 7, 6] if transposed else [4, 6, 7], "float32", "cpu")
        down = hidet.symbol([4, 3, 7] if transposed else [4, 7, 3], "float32", "cpu")
        y = ops.silu(operators.expert_product(x, up, chosen, transposed=transposed))
        y = operators.expert_product(y, down, chosen, scales, transposed=transposed)
    graph = hidet.trace_from(y, [x, chosen, scales, up, down])
    defined = define_experts(graph)
    assert not any(isinstance(op, ExpertProductOp) for op in defined.nodes)
    rng = np.random.default_rng(0)
    choices = np.array([[0, 3], [3, 1], [-1, 0], [4, 3], [1, 0]], np.int32)  # the third one never, and some of none
    given = [rng.standard_normal([int(n) for n in one.shape]) for one in (x, scales, up, down)]
    given[0][1, 2] = np.inf  # must not reach other tokens
    arrays = [given[0], choices, *given[1:]]
    for got, want in zip(evaluate_graph(defined, arrays), evaluate_graph(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def graph_of(dtype: str, transposed: bool, shared: bool) -> FlowGraph:
    """The operator alone, of a symbolic number of tokens."""
    sides = [COLUMNS, INNER] if transposed else [INNER, COLUMNS]
    x = hidet.symbol(["tokens", INNER] if shared else ["tokens", CHOICES, INNER], dtype, "cpu")
    weight = hidet.symbol([len(LABELS), *sides], dtype, "cpu")
    chosen, labels = hidet.symbol(["tokens", CHOICES], "int32", "cpu"), hidet.symbol([len(LABELS)], "int32", "cpu")
    inputs = [x, weight, chosen, labels]
    product = ExpertProductOp(*inputs, count=6, transposed=transposed, is_summed=False)
    return hidet.trace_from(product.outputs[0], inputs)


def bits(x: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16."""
    array: np.ndarray = x.contiguous().view(torch.int16).numpy() if x.is_floating_point() else x.contiguous().numpy()
    return array


def built(graph: FlowGraph, dtype: torch.dtype) -> Product:
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols={"tokens": SymbolSize(64)}).plan
    compiled = compile_program(partition_graph(graph, plan.stages[0], target=H100), H100)
    assert [node.name for node in compiled.graph.nodes] == ["ExpertProduct"]

    def run(x: Sequence[torch.Tensor], environment: dict[str, str] | None = None) -> torch.Tensor:
        tokens = len(x[0])
        empty = np.full([tokens, CHOICES, COLUMNS], -1, np.int16)
        sizes = {"tokens": tokens}
        found = emulated.run(compiled.kernels[0], *map(bits, x), empty, environment=environment, sizes=sizes)
        return torch.from_numpy(found[-1]).view(dtype)

    return run


@pytest.mark.parametrize(
    ("dtype", "transposed", "shared"),
    [
        ("float16", False, True),
        pytest.param("float16", True, False, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, True, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, False, marks=pytest.mark.slow),
    ],
)
def test_rows_are_multiplied_by_the_matrices_of_their_experts(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: str, transposed: bool, shared: bool
) -> None:
    """Of many tokens of one expert, and of few: the same bits; a row that is no number reaches no other."""
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    graph, kind = normalize(graph_of(dtype, transposed, shared)), getattr(torch, dtype)
    run = built(graph, kind)
    generator, tokens = torch.Generator().manual_seed(0), 96
    sides = (COLUMNS, INNER) if transposed else (INNER, COLUMNS)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:CHOICES] - 1 for _ in range(tokens)])
    chosen[:80, 0] = 0  # more than a tile of rows
    chosen[:80, 1] = chosen[:80, 1].clamp_min(1)
    x = torch.randn(*([tokens, INNER] if shared else [tokens, CHOICES, INNER]), generator=generator).to(kind)
    x[7] = torch.nan
    weight = torch.randn(len(LABELS), *sides, generator=generator).to(kind)
    given = [x, weight, chosen.to(torch.int32), torch.tensor(LABELS, dtype=torch.int32)]
    whole = run(given)
    (wanted,) = evaluate_graph(graph, [v.double().numpy() if v.is_floating_point() else v.numpy() for v in given])
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}[dtype] * np.nanmax(np.abs(wanted))
    np.testing.assert_allclose(whole.double().numpy(), wanted, rtol=0, atol=tolerance)
    orders = ({"EMULATED_WARPS": "reverse"}, {"EMULATED_COPIES": "eager"}, None)
    for (first, behind), order in zip(((0, 1), (6, 20), (70, tokens)), orders, strict=True):
        own = slice(first, behind)
        part = run([x[own], weight, given[2][own], given[3]], order)
        assert np.array_equal(bits(part), bits(whole[own]))
