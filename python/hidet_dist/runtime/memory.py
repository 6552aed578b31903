"""Where a partition's weights, workspace, inputs and outputs lie: one class for each kind of memory.

Only host memory so far. A kind of memory says which tensors the kernels can read where they lie, takes the weights from
their files, and makes room for activations and results; nothing else knows where they are.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hidet_dist.errors import ArtifactError, WeightsError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.tensors import Buffer, host_tensor
from hidet_dist.weights import header

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register. What kernels are given lies at a multiple of it."""


class Memory(Protocol):
    """One kind of memory, for one partition.

    Attributes
    ----------
    name: as users know it, such as ``CPU``.
    number: hidet's number of the kind: 0 is the host, 1 CUDA.
    """

    name: str
    number: int

    def holds(self, device: tuple[int, int]) -> bool:
        """Whether kernels can read and write a tensor on this DLPack device (type and number)."""

    def load(self, file: int, path: Path, names: Sequence[str]) -> dict[str, int]:
        """The addresses of those of the tensors ``names`` that a file has. Takes the file's descriptor."""

    def check(self) -> None:
        """Raise ArtifactError where the weights are not what they were."""

    def workspace(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes for activations; what was there before is given up."""

    def empty(self, kind: str, shape: Sequence[int], dtype: str) -> Any:
        """A new tensor of a library that has the dtype, its content undefined."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A new tensor of zeros, of no library."""

    def close(self) -> None:
        """Give everything back."""


class HostMemory:
    """The host's memory. Weights stay in their files, mapped read-only: what is not read takes no memory.

    All processes of a host that map the same file share its pages. The file may be renamed or deleted meanwhile, but
    not changed: a mapping shows whatever the file has. :meth:`check` finds out that it was, at the price of one system
    call a file.
    """

    name = "CPU"
    number = 0

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._files: list[tuple[int, Path, tuple[int, ...]]] = []
        self._workspace = _aligned(0)
        self._close = weakref.finalize(self, _close, self._mappings, self._files)

    def holds(self, device: tuple[int, int]) -> bool:
        """Whether a tensor is in the host's memory, pinned or not."""
        return device[0] in (dlpack.CPU, dlpack.CUDA_HOST)

    def load(self, file: int, path: Path, names: Sequence[str]) -> dict[str, int]:
        """Map a safetensors file. Its pages are read when kernels read them.

        Raises
        ------
        ArtifactError
            When one of these tensors is not aligned as kernels need it, or the file's header makes no sense.
        """
        self._files.append((file, path, _identity(file)))
        mapping = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        self._mappings.append(mapping)
        length = int.from_bytes(mapping[: header.LENGTH_BYTES], "little")
        try:
            places = header.parse(mapping[header.LENGTH_BYTES : header.LENGTH_BYTES + length], len(mapping))
        except WeightsError as error:
            raise ArtifactError(f"{path} is no safetensors file: {error} Build the artifacts again.") from error
        base = np.frombuffer(mapping, np.uint8).ctypes.data
        addresses = {name: base + places[name].begin for name in names if name in places}
        for name, address in addresses.items():
            if address % ALIGNMENT:
                raise ArtifactError(
                    f"The tensor {name!r} of {path} does not begin at a multiple of {ALIGNMENT} bytes. Build the "
                    "artifacts again."
                )
        return addresses

    def check(self) -> None:
        """Raise ArtifactError where a mapped file was changed: reading beyond a new end would end the process."""
        for file, path, before in self._files:
            if _identity(file) != before:
                raise ArtifactError(
                    f"{path} was changed while it was in use: the weights are not what they were. Load the artifacts "
                    "again; builds replace them without touching the old files."
                )

    def workspace(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes; they take memory once they are written to."""
        if self._workspace.nbytes < nbytes:
            self._workspace = _aligned(nbytes)
        return int(self._workspace.ctypes.data)

    def empty(self, kind: str, shape: Sequence[int], dtype: str) -> Any:
        """A new tensor in host memory."""
        return host_tensor(kind, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A new tensor of zeros."""
        itemsize = header.ITEMSIZE[dtype] if dtype in header.ITEMSIZE else np.dtype(dtype).itemsize
        memory = np.zeros(math.prod(shape) * itemsize, np.uint8)
        place = memory.ctypes.data
        return Buffer(place, tuple(shape), dtype, memory.nbytes, True, (dlpack.CPU, 0), False, memory)

    def close(self) -> None:
        """Unmap the weights. Their addresses must not be used any more."""
        self._workspace = _aligned(0)
        self._close()


def _identity(file: int) -> tuple[int, ...]:
    """What changes when a file's content does."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _close(mappings: list[mmap.mmap], files: list[tuple[int, Path, tuple[int, ...]]]) -> None:
    while mappings:
        mappings.pop().close()
    while files:
        os.close(files.pop()[0])


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + nbytes]
