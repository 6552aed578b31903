"""Lookups and integer divisions on the emulator, whose memory ends where tensors do: defined for all values."""

import hidet
import numpy as np
import pytest
from hidet import ops
from tests.emulator import emulated

from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])
TABLE = np.random.default_rng(0).standard_normal((11, 6)).astype(np.float32)


def compiled(function, *arrays):
    inputs = [hidet.symbol(list(x.shape), str(x.dtype), "cpu") for x in arrays]
    graph = normalize(hidet.trace_from(function(*inputs), inputs))
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,)))).plan
    return compile_program(partition_graph(graph, plan.stages[0], target=H100), H100)


@pytest.mark.parametrize("dtype", ["int32", pytest.param("int64", marks=pytest.mark.slow)])
def test_an_index_that_is_out_of_range_gives_nan(emulator, monkeypatch, dtype):
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    indices = np.array([[0, 10**9, -11], [-12, 11, -(2**31)]], dtype)
    program = compiled(lambda table, indices: ops.take(table, indices, 0), TABLE, indices)
    (kernel,) = program.kernels
    found = emulated.run(kernel, TABLE, indices, np.zeros((2, 3, 6), np.float32))[-1]
    expected = np.full((2, 3, 6), np.nan, np.float32)
    expected[0, 0] = expected[0, 2] = TABLE[0]
    np.testing.assert_array_equal(found, expected)


def test_divisions_are_as_on_the_cpu(emulator, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    a, b = np.array([7, 7, -(2**31), -9], np.int32), np.array([0, -1, -1, 4], np.int32)
    (kernel,) = compiled(ops.divide, a, b).kernels
    found = emulated.run(kernel, a, b, np.full(4, 99, np.int32))[-1]
    assert found.tolist() == [0, -7, -(2**31), -2]
