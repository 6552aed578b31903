"""Attention as one kernel on CPUs, against PyTorch: what it reads in place, and what is left to products."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

import hidet_dist
from hidet_dist.compile import optimize_program
from hidet_dist.simulate import simulate

Call = Callable[..., torch.Tensor]


class Called(nn.Module):
    def __init__(self, call: Call):
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.call(*tensors)


def compiled(call: Call, *given: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """The operators of a program, and what its kernels compute."""
    graph = hidet_dist.from_torch(Called(call).eval(), given)
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [1]}))
    optimized = optimize_program(program)
    (result,) = simulate(program, [x.numpy() for x in given], optimized)
    return [node.name for node in optimized.nodes], torch.from_numpy(result)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(*x.shape[:-1], count, -1).transpose(-2, -3)


def fused(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.chunk(3, dim=-1)
    return attend(heads(q, 3), heads(k, 3), heads(v, 3)).transpose(1, 2).flatten(2)


CASES: dict[str, tuple[Call, list[list[int]]]] = {
    "plain": (attend, [[2, 3, 40, 16], [2, 3, 37, 16], [2, 3, 37, 16]]),
    "one stack": (attend, [[3, 17, 32], [3, 40, 32], [3, 40, 32]]),
    "many rows": (attend, [[1, 1, 200, 16], [1, 1, 700, 16], [1, 1, 700, 16]]),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), [[2, 2, 33, 48], [2, 2, 33, 48], [2, 2, 33, 48]]),
    "bias": (attend, [[2, 3, 20, 16], [2, 3, 9, 16], [2, 3, 9, 16], [2, 3, 20, 9]]),
    "bias of keys": (attend, [[2, 3, 20, 16], [2, 3, 9, 16], [2, 3, 9, 16], [2, 1, 1, 9]]),
    "bias of queries": (attend, [[2, 3, 20, 16], [2, 3, 9, 16], [2, 3, 9, 16], [20, 1]]),
    "groups": (
        lambda q, k, v, bias: attend(q, k, v, bias, enable_gqa=True),
        [[2, 6, 20, 16], [2, 2, 9, 16], [2, 2, 9, 16], [1, 6, 20, 9]],
    ),
    "one group": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True, scale=0.5),
        [[2, 4, 20, 16], [2, 1, 9, 16], [2, 1, 9, 16]],
    ),
    "heads of one projection": (fused, [[2, 21, 3 * 3 * 16]]),
    "transposed queries": (
        lambda q, k, v: attend(q.transpose(-1, -2), k, v),
        [[2, 3, 16, 20], [2, 3, 9, 16], [2, 3, 9, 16]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_one_kernel(name: str) -> None:
    call, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    names, result = compiled(call, *given)
    assert names.count("Attention") == 1
    assert not any("Matmul" in name or "Exp" in name for name in names)
    torch.testing.assert_close(result, call(*given), rtol=1e-5, atol=1e-5)


def test_heads_of_one_projection_are_read_in_place() -> None:
    names, _ = compiled(fused, torch.randn(2, 21, 3 * 3 * 16))
    assert names[0] == "Attention"


BATCH, QUERIES, KEYS = (torch.export.Dim(name, min=1, max=4096) for name in ("batch", "queries", "keys"))
OF_QUERIES, OF_KEYS = {0: BATCH, 2: QUERIES}, {0: BATCH, 2: KEYS}
SYMBOLIC: dict[str, tuple[Call, list[dict[int, torch.export.Dim]], Callable[[int, int, int], list[list[int]]]]] = {
    "plain": (attend, [OF_QUERIES, OF_KEYS, OF_KEYS], lambda b, q, k: [[b, 3, q, 16], [b, 3, k, 16], [b, 3, k, 16]]),
    "groups": (
        lambda q, k, v, bias: attend(q, k, v, bias, enable_gqa=True),
        [OF_QUERIES, OF_KEYS, OF_KEYS, {2: QUERIES, 3: KEYS}],
        lambda b, q, k: [[b, 6, q, 32], [b, 2, k, 32], [b, 2, k, 32], [1, 1, q, k]],
    ),
    "heads of one projection": (fused, [{0: BATCH, 1: QUERIES}], lambda b, q, k: [[b, q, 3 * 3 * 16]]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_attention_over_symbolic_dims_is_one_kernel(name: str) -> None:
    call, dims, shapes = SYMBOLIC[name]
    generator = torch.Generator().manual_seed(2)

    def tensors(*sizes: int) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes(*sizes)]

    graph = hidet_dist.from_torch(Called(call).eval(), tensors(2, 20, 24), dynamic_shapes={"tensors": tuple(dims)})
    symbols = {"batch": 2, "queries": 20, "keys": 24} if len(dims) > 1 else {"batch": 2, "queries": 20}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [1]}, {"symbols": symbols})
    program = hidet_dist.partition(graph, plan)
    optimized = optimize_program(program)
    names = [node.name for node in optimized.nodes]
    assert names.count("Attention") == 1 and not any("Matmul" in name or "Exp" in name for name in names)
    for sizes in ((2, 20, 24), (1, 1, 1), (3, 130, 700), (1, 3, 5)):
        given = tensors(*sizes)
        (result,) = simulate(program, [x.numpy() for x in given], optimized)
        torch.testing.assert_close(torch.from_numpy(result), call(*given), rtol=1e-5, atol=1e-5)


def test_few_planned_queries_are_left_to_products() -> None:
    given = [torch.randn(1, 2, rows, 16) for rows in (3, 9, 9)]
    dims = ({2: QUERIES}, {2: KEYS}, {2: KEYS})
    graph = hidet_dist.from_torch(Called(attend).eval(), given, dynamic_shapes={"tensors": dims})
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [1]}, {"symbols": {"queries": 1, "keys": 99}})
    assert "Attention" not in [node.name for node in optimize_program(hidet_dist.partition(graph, plan)).nodes]


@pytest.mark.parametrize("groups", [6, 3])
@pytest.mark.parametrize("spec", ["(S0, R, R, R)", "(R, S0, R, R)", "(R, R, S0, R)"])
def test_attention_over_unequal_parts_is_one_kernel(spec: str, groups: int) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, enable_gqa=True)

    given = [torch.randn(shape) for shape in ([3, 6, 60, 16], [3, groups, 24, 16], [3, groups, 24, 16])]
    graph = hidet_dist.from_torch(Called(call).eval(), given)
    keys = spec if spec.index("S0") < 6 else "(R, R, R, R)"
    options = {"input_specs": [spec, keys, keys], "output_specs": [spec]}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2], "shares": {"axis0": [2, 1]}}, options)
    program = hidet_dist.partition(graph, plan)
    optimized = optimize_program(program)
    assert [node.name for node in optimized.nodes] == ["Attention"]
    (result,) = simulate(program, [x.numpy() for x in given], optimized)
    torch.testing.assert_close(torch.from_numpy(result), call(*given), rtol=1e-5, atol=1e-5)


def test_few_queries_are_left_to_products() -> None:
    given = [torch.randn(1, 2, rows, 16) for rows in (2, 9, 9)]
    names, result = compiled(attend, *given)
    assert "Attention" not in names
    torch.testing.assert_close(result, attend(*given), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_with_its_query_and_key() -> None:
    q, k, v = (torch.randn(1, 2, rows, 16) for rows in (20, 9, 9))
    q[0, 0, 3, 5], k[0, 1, 2, 0] = torch.nan, torch.inf
    v[0, 0, 0, 1] = torch.inf
    _, result = compiled(attend, q, k, v)
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernels treat NaN as masked on some processors
        wanted = attend(q, k, v)
    assert wanted[0, 0, 3].isnan().all() and not wanted[0, 0, 4, :1].isnan().any()
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_query_does_not_depend_on_those_beside_it() -> None:
    q, k, v = (torch.randn(1, 2, rows, 16) for rows in (150, 600, 600))
    _, whole = compiled(attend, q, k, v)
    _, part = compiled(attend, q[:, :, 31:60].contiguous(), k, v)
    assert torch.equal(whole[:, :, 31:60], part)


def test_threads_do_not_change_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 3, rows, 16, generator=generator) for rows in (150, 300, 300)]
    openmp, results = ctypes.CDLL("libgomp.so.1"), []
    before = openmp.omp_get_max_threads()
    try:
        for threads in (1, 3):
            openmp.omp_set_num_threads(threads)
            results.append(compiled(attend, *given)[1])
    finally:
        openmp.omp_set_num_threads(before)
    assert torch.equal(*results)
