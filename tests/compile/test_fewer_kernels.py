"""Kernels that a program does without: permutations that undo others, and duplicates."""

from __future__ import annotations

from collections import Counter

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph
from hidet.ir.expr import symbol_var

from hidet_dist.compile import optimize_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.compile.duplicates import merge_duplicates
from hidet_dist.compile.permutations import cancel_permutations
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing.models import run_whole


def names(graph: FlowGraph) -> Counter[str]:
    return Counter(op.name for op in graph.nodes)


def heads(tokens: int | str, order: tuple[int, ...]) -> FlowGraph:
    """[1, tokens, 4, 8] head by head, without the batch, then permuted."""
    x = hidet.symbol([1, symbol_var(tokens) if isinstance(tokens, str) else tokens, 4, 8], "float32", "cpu")
    y = ops.transpose(x, [0, 2, 1, 3])
    return hidet.trace_from(ops.transpose(ops.squeeze(y, [0]), list(order)), [x])


@pytest.mark.parametrize("tokens", [3, "tokens"])
def test_a_permutation_that_undoes_an_earlier_one_is_a_reshape(tokens: int | str) -> None:
    graph = heads(tokens, (1, 0, 2))
    cancelled = cancel_permutations(graph)
    assert names(graph)["PermuteDims"] == 2
    assert set(names(cancelled)) == {"Reshape"}
    if tokens == 3:
        x = np.arange(96, dtype=np.float32).reshape(1, 3, 4, 8)
        np.testing.assert_array_equal(run_whole(cancelled, [x])[0], x.reshape(3, 4, 8))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_other_permutations_stay(order: tuple[int, ...]) -> None:
    graph = heads(3, order)
    assert cancel_permutations(graph) is graph


def test_what_others_read_stays() -> None:
    x = hidet.symbol([2, 3, 4], "float32", "cpu")
    y = ops.transpose(x, [1, 0, 2])
    graph = hidet.trace_from([y, ops.transpose(y, [1, 0, 2])], [x])
    cancelled = cancel_permutations(graph)
    assert names(cancelled) == Counter(PermuteDims=1, Reshape=1)
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for found, expected in zip(run_whole(cancelled, [data]), (data.transpose(1, 0, 2), data), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_operators_that_compute_the_same_are_one() -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    # Equal chains, one behind the other, and one that differs by a number.
    first, second, third = (ops.exp(ops.exp(x) + shift) for shift in (1.0, 1.0, 2.0))
    graph = hidet.trace_from(first * second - third, [x])
    once = merge_duplicates(graph)
    assert names(graph) == Counter(Exp=6, AddScalar=3, Multiply=1, Subtract=1)
    assert names(once) == Counter(Exp=3, AddScalar=2, Multiply=1, Subtract=1)
    data = np.random.default_rng(0).random((4, 8), np.float32)
    for found, expected in zip(run_whole(once, [data]), run_whole(graph, [data]), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_kernels_that_compute_the_same_are_one_unless_memory_is_short() -> None:
    x = hidet.symbol([64, 32], "float32", "cpu")
    weights = [hidet.asarray(np.full((32, 32), number, np.float32)) for number in range(2)]
    y = ops.matmul(ops.softmax(x, 1), weights[0]) - ops.matmul(ops.softmax(x, 1), weights[1])
    graph, target = normalize(hidet.trace_from(y, [x])), CudaTarget(GPUS["H100-SXM5-80GB"])
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,)))).plan.stages[0]
    program = partition_graph(graph, plan, target=target)
    for frugal, count in ((False, 1), (True, 2)):
        fused = names(optimize_program(program, target, frugal=frugal))
        assert sum(number for name, number in fused.items() if "Softmax" in name) == count


def test_outputs_are_not_merged() -> None:
    x = hidet.symbol([8], "float32", "cpu")
    graph = hidet.trace_from([ops.exp(x), ops.exp(x)], [x])
    assert merge_duplicates(graph) is graph
