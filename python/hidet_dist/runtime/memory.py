"""The memory of a partition's weights, workspace, inputs and outputs: one class for each kind of memory.

This module has the host's memory, :mod:`hidet_dist.runtime.cuda.memory` that of CUDA devices. A kind of memory loads
weights from their files, allocates activations and results, and makes inputs readable for kernels.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hidet_dist import native
from hidet_dist.artifacts.opened import VerifiedFile
from hidet_dist.errors import ArtifactError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.arrays import Arrays, HostArrays
from hidet_dist.runtime.recycling import LEAST_BYTES, Recycler, aligned
from hidet_dist.runtime.tensors import HIDET, TensorBuffer, host_tensor
from hidet_dist.weights import header
from hidet_dist.weights.header import LocatedTensor

if TYPE_CHECKING:
    from hidet_dist.runtime.communicator import Communicator


class Memory(Protocol):
    """One kind of memory, for one partition.

    Attributes
    ----------
    name: the name shown to users, such as ``CPU``.
    number: hidet's number of the kind of memory: 0 is the host, 1 CUDA.
    zeros_are_free: whether memory of zeros takes none until it is written to.
    """

    name: str
    number: int
    zeros_are_free: bool

    @property
    def files(self) -> Sequence[native.MappedFile]:
        """The files that weights are read from while kernels run."""

    def holds(self, device: tuple[int, int]) -> bool:
        """Tell whether a tensor on this DLPack device (type and number) may be an input."""

    def active(self) -> AbstractContextManager[None]:
        """Make the context in which this thread can launch kernels."""

    def packed(self, buffer: TensorBuffer, what: str) -> TensorBuffer:
        """Return a contiguous tensor: ``buffer`` or a copy. Raises InputError about ``what`` where it cannot."""

    def load(self, file: VerifiedFile, places: Mapping[str, LocatedTensor]) -> dict[str, int]:
        """Load a file's tensors; return their addresses by name. Takes over the file's descriptor."""

    def check(self) -> None:
        """Raise ArtifactError if the weights were changed."""

    def workspace(self, nbytes: int) -> int:
        """Allocate at least ``nbytes`` bytes for activations in place of the earlier ones; return their address.

        All programs of a rank, which run one after the other, have the same memory for activations. It grows to the
        most that one of them needs, and may move then.
        """

    def reserve_zeros(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes of zeros until :meth:`release` or :meth:`close`; return their address."""

    def release(self, address: int) -> None:
        """Free memory of :meth:`reserve_zeros`."""

    def clear(self, address: int, nbytes: int) -> None:
        """Set bytes of this memory to zero, once all launched kernels have run."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes within this memory, or from or to the host's, once all launched kernels have run, and wait."""

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """Make an uninitialized tensor on a DLPack device. ``kind`` is its library, which must have the dtype."""

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorBuffer:
        """Make a buffer of zeros."""

    def stage(self, inputs: Sequence[TensorBuffer], outputs: Sequence[TensorBuffer]) -> list[int]:
        """Return the addresses at which kernels read inputs and write outputs, within :meth:`active`."""

    def deliver(self, outputs: Sequence[TensorBuffer], addresses: Sequence[int]) -> None:
        """Copy outputs from these addresses to their tensors, once they are computed."""

    def wait(self, communicator: Communicator) -> None:
        """Wait for all launched kernels; raise CommunicationError if a collective failed."""

    def all_gather(self, communicator: Communicator, array: np.ndarray) -> np.ndarray:
        """Gather an array of the same size from each rank, as rows. The communicator must be bound to this thread."""

    def new_stream(self) -> int | None:
        """Create a CUDA stream for messages between stages; None in memory that has none."""

    def arrays(self, stream: int | None = None) -> Arrays:
        """Make arrays of this memory whose copies run on a stream, by default the one that kernels run on."""

    def close(self) -> None:
        """Free everything."""


class HostMemory:
    """The host's memory. Weights stay in their files, which are mapped read-only: unread pages take no memory.

    All processes of a host that map the same file share its pages. The file may be renamed or deleted meanwhile, but
    not changed, because a mapping shows the file's present content. :meth:`check` detects a change, at the cost of one
    system call per file. From a part of a file that was cut off, kernels read zeros (see mapped_file.h), so the file
    must be checked again after they have run.
    """

    name = "CPU"
    number = 0
    zeros_are_free = True

    def __init__(self) -> None:
        self._mapped: list[_Mapped] = []
        self._reserved: dict[int, np.ndarray] = {}
        self._results = Recycler()
        self._workspace = aligned(0)
        self._close = weakref.finalize(self, _close, self._mapped)

    @property
    def files(self) -> list[native.MappedFile]:
        """The files of the weights."""
        return [mapped.watched for mapped in self._mapped]

    @property
    def unused_result_bytes(self) -> int:
        """Unused bytes that are kept for later large results."""
        return self._results.unused_bytes

    def holds(self, device: tuple[int, int]) -> bool:
        """Tell whether a tensor on this DLPack device is in the host's memory, pinned or not."""
        return device[0] in (dlpack.CPU, dlpack.CUDA_HOST)

    def load(self, file: VerifiedFile, places: Mapping[str, LocatedTensor]) -> dict[str, int]:
        """Map a safetensors file, and take over its descriptor. Pages are read when kernels read them.

        Raises
        ------
        ArtifactError
            When the file was changed since it was verified.
        """
        path = file.path
        try:
            mapping = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(file.descriptor)
            raise
        base = np.frombuffer(mapping, np.uint8).ctypes.data
        watched = native.MappedFile(file.descriptor, base, len(mapping), str(path))
        self._mapped.append(_Mapped(file, mapping, watched))
        if not file.is_unchanged():  # checked once the watch has begun, so that no change falls between the two
            raise ArtifactError(f"{path} was changed while it was loaded. Load the artifacts again.")
        return {name: base + place.begin for name, place in places.items()}

    def check(self) -> None:
        """Raise ArtifactError if a mapped file was changed, or a page of it could not be read."""
        for mapped in self._mapped:
            if mapped.is_changed():
                raise ArtifactError(
                    f"{mapped.file.path} was changed while it was in use, so its weights cannot be trusted. Load the "
                    "artifacts again; builds replace them without touching the old files."
                )

    def workspace(self, nbytes: int) -> int:
        """Allocate at least ``nbytes`` bytes, of which pages take memory once written; return their address."""
        if self._workspace.nbytes < nbytes:
            self._workspace = aligned(nbytes)
        return int(self._workspace.ctypes.data)

    def reserve_zeros(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes of zeros, of which pages take memory once written; return their address."""
        memory = aligned(nbytes, zeros=True)
        address = int(memory.ctypes.data)
        self._reserved[address] = memory
        return address

    def release(self, address: int) -> None:
        """Free memory of :meth:`reserve_zeros`."""
        del self._reserved[address]

    def clear(self, address: int, nbytes: int) -> None:
        """Set bytes to zero."""
        ctypes.memset(address, 0, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes."""
        ctypes.memmove(target, source, nbytes)

    def active(self) -> AbstractContextManager[None]:
        """Return an empty context: kernels on the host need none."""
        return nullcontext()

    def packed(self, buffer: TensorBuffer, what: str) -> TensorBuffer:
        """Return the tensor if it is contiguous, or else a contiguous copy."""
        return buffer.packed()

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """Make a tensor in host memory. A large one may reuse the memory of an earlier result that was deleted."""
        nbytes = math.prod(shape) * dtype_bytes(dtype)
        memory = self._results.take(nbytes) if nbytes >= LEAST_BYTES and kind != HIDET else None
        return host_tensor(kind, shape, dtype, memory)

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorBuffer:
        """Make a buffer of zeros."""
        return host_zeros(shape, dtype)

    def stage(self, inputs: Sequence[TensorBuffer], outputs: Sequence[TensorBuffer]) -> list[int]:
        """Return the addresses of inputs and outputs, which kernels use in place."""
        return [buffer.address for buffer in (*inputs, *outputs)]

    def deliver(self, outputs: Sequence[TensorBuffer], addresses: Sequence[int]) -> None:
        """Do nothing: kernels write outputs in place."""

    def wait(self, communicator: Communicator) -> None:
        """Raise CommunicationError if a collective failed. Kernels on the host are synchronous."""
        communicator.check()

    def all_gather(self, communicator: Communicator, array: np.ndarray) -> np.ndarray:
        """Gather an array of the same size from each rank, as rows."""
        rows = np.empty((communicator.world_size, array.size), array.dtype)
        whole_mesh = (1 << len(communicator.mesh_shape)) - 1
        dtype = native.dtype_code(array.dtype.name)
        native.all_gather(array.ctypes.data, rows.ctypes.data, array.size, dtype, whole_mesh)
        communicator.check()
        return rows

    def new_stream(self) -> None:
        """Return None: the host has no streams."""

    def arrays(self, stream: int | None = None) -> HostArrays:
        """Make arrays of the host's memory."""
        return HostArrays()

    def close(self) -> None:
        """Unmap the weights, and free all other memory. Addresses must not be used any more."""
        self._workspace = aligned(0)
        self._reserved.clear()
        self._results.close()
        self._close()


def host_zeros(shape: Sequence[int], dtype: str) -> TensorBuffer:
    """Make a buffer of zeros in host memory."""
    memory = np.zeros(math.prod(shape) * dtype_bytes(dtype), np.uint8)
    address = memory.ctypes.data
    return TensorBuffer(address, tuple(shape), dtype, memory.nbytes, True, (dlpack.CPU, 0), False, memory)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element, by hidet's name of its dtype."""
    return header.ITEMSIZE[dtype] if dtype in header.ITEMSIZE else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class _Mapped:
    """A mapped file: its descriptor, path and digest, the mapping, and the watch over it."""

    file: VerifiedFile
    mapping: mmap.mmap
    watched: native.MappedFile

    def is_changed(self) -> bool:
        """Tell whether the content was changed. Where only the file's status was, its content is compared again."""
        while (change := self.watched.change) is native.Change.STATUS:
            self.watched.renew()  # before reading, so that a write during it counts as another change
            if not self.file.is_unchanged():
                self.watched.condemn()
        return change is not native.Change.NONE


def _close(files: list[_Mapped]) -> None:
    while files:
        mapped = files.pop()
        mapped.watched.forget()
        mapped.mapping.close()
        os.close(mapped.file.descriptor)
