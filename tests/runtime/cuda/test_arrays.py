"""Arrays of device memory, which is the host's here: copies of parts, and memory that is used again."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.runtime.cuda import arrays as cuda_arrays
from hidet_dist.runtime.cuda.arrays import CudaArrays, DevicePool


class Memory:
    """Device memory that counts the copies of rows, and keeps what it gives."""

    device = 0

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.rows = 0
        self.driver = SimpleNamespace(copy=self._copy, copy_rows=self._copy_rows)

    def reserve_beside(self, nbytes: int) -> int:
        self.blocks.append(np.zeros(nbytes, np.uint8))
        return int(self.blocks[-1].ctypes.data)

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def _copy_rows(self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, _: int) -> None:
        assert width <= min(to_pitch, pitch)
        self.rows += height
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, width)


def made() -> tuple[Memory, CudaArrays]:
    memory = Memory()
    return memory, CudaArrays(memory, DevicePool(memory), 0)  # type: ignore[arg-type]


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape and a part of it, which is not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    box = []
    for extent in shape:
        begin = draw(st.integers(0, extent - 1))
        box.append(slice(begin, draw(st.integers(begin + 1, extent))))
    return shape, tuple(box)


@pytest.mark.parametrize("most_pitch", [2**31 - 1, 8])
@given(part=parts(), dtype=st.sampled_from(["u1", "u2", "u8"]))
def test_parts_are_packed_and_put_back(
    most_pitch: int, part: tuple[tuple[int, ...], tuple[slice, ...]], dtype: str
) -> None:
    shape, box = part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_arrays, "_MOST_PITCH", most_pitch)
        _, arrays = made()
        whole = (np.arange(np.prod(shape, dtype=int)) % 251).astype(dtype).reshape(shape)
        packed = arrays.packed(whole[box])
        np.testing.assert_array_equal(packed, whole[box])
        assert packed.flags.c_contiguous
        back = np.zeros_like(whole)
        arrays.copy(back[box], packed)
        expected = np.zeros_like(whole)
        expected[box] = whole[box]
        np.testing.assert_array_equal(back, expected)


def test_columns_are_one_copy_and_rows_are_in_place() -> None:
    memory, arrays = made()
    whole = np.arange(24, dtype=np.uint32).reshape(4, 6)
    assert arrays.packed(whole[1:3]).ctypes.data == whole[1:3].ctypes.data
    arrays.packed(whole[:, 2:4])
    assert memory.rows == 4


def test_memory_is_used_again_once_no_view_is_left() -> None:
    memory, arrays = made()
    first = arrays.empty([4, 4], np.dtype("u4"))
    address, view = first.ctypes.data, first[1:]
    del first
    second = arrays.empty([4, 4], np.dtype("u4"))
    assert second.ctypes.data != address
    del view
    assert arrays.empty([40], np.dtype("u1")).ctypes.data == address
    assert arrays.empty([4], np.dtype("u4")).ctypes.data not in (address, second.ctypes.data)  # it would waste too much
    assert len(memory.blocks) == 3
