"""Large results get the memory of earlier ones, once nobody has these any more."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from hidet_dist.runtime.memory import HostMemory

CPU = (1, 0)  # as DLPack has it
SHAPE = (512, 1024)  # 2 MiB of float32


def address(x: np.ndarray | torch.Tensor) -> int:
    return x.data_ptr() if isinstance(x, torch.Tensor) else int(x.ctypes.data)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_memory_of_a_result_that_is_gone_is_used_anew(kind: str, dtype: str) -> None:
    memory = HostMemory()
    shape = (1024, 2048)
    first = memory.empty(kind, shape, dtype, CPU)
    assert tuple(first.shape) == shape
    assert str(first.dtype).removeprefix("torch.") == dtype
    first[:] = 1
    there = address(first)
    assert there % 64 == 0
    del first
    second = memory.empty(kind, shape, dtype, CPU)
    assert address(second) == there
    memory.close()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_result_is_left_alone_as_long_as_anyone_has_a_part_of_it(kind: str) -> None:
    memory = HostMemory()
    first = memory.empty(kind, SHAPE, "float32", CPU)
    first[:] = 7
    there, part = address(first), first[3:5].reshape(-1)[10:20]
    del first
    gc.collect()
    others = [memory.empty(kind, SHAPE, "float32", CPU) for _ in range(3)]
    for other in others:
        other[:] = 1
    assert there not in map(address, others)
    assert (part == 7).all()
    del part
    assert address(memory.empty(kind, SHAPE, "float32", CPU)) == there


def test_a_result_outlives_its_partition() -> None:
    memory = HostMemory()
    result = memory.empty("numpy", SHAPE, "float32", CPU)
    result[:] = 3
    memory.close()
    del memory
    gc.collect()
    assert (result == 3).all()
    assert (torch.from_dlpack(result) == 3).all()


def test_unused_memory_is_bounded() -> None:
    memory = HostMemory()
    results = [memory.empty("numpy", SHAPE, "float32", CPU) for _ in range(10)]
    places = {address(x) for x in results}
    del results
    again = [memory.empty("numpy", SHAPE, "float32", CPU) for _ in range(2)]
    assert {address(x) for x in again} <= places
    assert memory.unused_result_bytes == 0
    del again
    assert memory.unused_result_bytes == 2 * 512 * 1024 * 4  # not ten
    large = memory.empty("numpy", (4096, 1024), "float32", CPU)
    del large
    assert memory.unused_result_bytes <= 2 * 4096 * 1024 * 4
    memory.close()
    assert memory.unused_result_bytes == 0
