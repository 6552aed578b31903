"""The memory of a partition's weights, workspace, inputs and outputs: one class for each kind.

This module has the host's memory, :mod:`hidet_dist.runtime.cuda.memory` that of CUDA devices. A kind of memory knows
which tensors kernels can read in place, loads weights from their files, and allocates activations and results.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hidet_dist.artifacts.opened import VerifiedFile
from hidet_dist.errors import ArtifactError
from hidet_dist.runtime import dlpack, native
from hidet_dist.runtime.recycling import LEAST_BYTES, Recycler, aligned
from hidet_dist.runtime.tensors import HIDET, Buffer, host_tensor
from hidet_dist.weights import header
from hidet_dist.weights.header import Place

if TYPE_CHECKING:
    from hidet_dist.runtime.communicator import Communicator


class Memory(Protocol):
    """One kind of memory, for one partition.

    Attributes
    ----------
    name: its name for users, such as ``CPU``.
    number: hidet's number of the kind: 0 is the host, 1 CUDA.
    """

    name: str
    number: int

    @property
    def files(self) -> Sequence[native.MappedFile]:
        """The files that weights are read from while kernels run."""

    def holds(self, device: tuple[int, int]) -> bool:
        """Tell whether a tensor on this DLPack device (type and number) may be an input."""

    def active(self) -> AbstractContextManager[None]:
        """Make the context in which this thread can launch kernels."""

    def packed(self, buffer: Buffer, what: str) -> Buffer:
        """Return a contiguous tensor: itself or a copy. Raises InputError about ``what`` where none is made."""

    def load(self, file: VerifiedFile, places: Mapping[str, Place]) -> dict[str, int]:
        """Load a file's tensors; return their addresses by name. Takes over the file's descriptor."""

    def check(self) -> None:
        """Raise ArtifactError if the weights were changed."""

    def workspace(self, nbytes: int) -> int:
        """Allocate at least ``nbytes`` bytes for activations in place of the earlier ones; return their address."""

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """Make an uninitialised tensor of a library that has the dtype, on a DLPack device."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Make a buffer of zeros."""

    def stage(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> list[int]:
        """Return the addresses at which kernels read inputs and write outputs, within :meth:`active`."""

    def deliver(self, outputs: Sequence[Buffer], addresses: Sequence[int]) -> None:
        """Copy outputs from these addresses to their tensors, once they are computed."""

    def wait(self, communicator: Communicator) -> None:
        """Wait for all launched kernels; raise CommunicationError if a collective failed."""

    def all_gather(self, communicator: Communicator, array: np.ndarray) -> np.ndarray:
        """Gather one array of the same size from each rank, a row each. The communicator is bound to this thread."""

    def close(self) -> None:
        """Free everything."""


class HostMemory:
    """The host's memory. Weights stay in their files, which are mapped read-only: unread pages take no memory.

    All processes of a host that map the same file share its pages. The file may be renamed or deleted meanwhile, but
    not changed: a mapping shows the file's present content. :meth:`check` detects a change, at the price of one system
    call per file. Kernels read zeros from a part of a file that has gone (see mapped_file.h), so that the file must be
    checked after they have run, too.
    """

    name = "CPU"
    number = 0

    def __init__(self) -> None:
        self._mapped: list[_Mapped] = []
        self._results = Recycler()
        self._workspace = aligned(0)
        self._close = weakref.finalize(self, _close, self._mapped)

    @property
    def files(self) -> list[native.MappedFile]:
        """The files of the weights."""
        return [mapped.watched for mapped in self._mapped]

    @property
    def unused_result_bytes(self) -> int:
        """Bytes that are kept for large results to come."""
        return self._results.unused_bytes

    def holds(self, device: tuple[int, int]) -> bool:
        """Tell whether a tensor is in the host's memory, pinned or not."""
        return device[0] in (dlpack.CPU, dlpack.CUDA_HOST)

    def load(self, file: VerifiedFile, places: Mapping[str, Place]) -> dict[str, int]:
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
        if not file.is_unchanged():  # asked once the watch has begun, so that there is no time between the two
            raise ArtifactError(f"{path} was changed while it was loaded. Load the artifacts again.")
        return {name: base + place.begin for name, place in places.items()}

    def check(self) -> None:
        """Raise ArtifactError if a mapped file was changed, or a page of it could not be read."""
        for mapped in self._mapped:
            if mapped.is_changed():
                raise ArtifactError(
                    f"{mapped.file.path} was changed while it was in use: the weights are not what they were. Load the "
                    "artifacts again; builds replace them without touching the old files."
                )

    def workspace(self, nbytes: int) -> int:
        """Allocate at least ``nbytes`` bytes, which take memory once they are written; return their address."""
        if self._workspace.nbytes < nbytes:
            self._workspace = aligned(nbytes)
        return int(self._workspace.ctypes.data)

    def active(self) -> AbstractContextManager[None]:
        """Make an empty context: the host's kernels need none."""
        return nullcontext()

    def packed(self, buffer: Buffer, what: str) -> Buffer:
        """Return the tensor if it is contiguous, or else a contiguous copy."""
        return buffer.packed()

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """Make a tensor in host memory; a large one may reuse the memory of an earlier one that is gone."""
        nbytes = math.prod(shape) * dtype_bytes(dtype)
        memory = self._results.take(nbytes) if nbytes >= LEAST_BYTES and kind != HIDET else None
        return host_tensor(kind, shape, dtype, memory)

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Make a buffer of zeros."""
        return host_zeros(shape, dtype)

    def stage(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> list[int]:
        """The addresses of inputs and outputs as they are."""
        return [buffer.address for buffer in (*inputs, *outputs)]

    def deliver(self, outputs: Sequence[Buffer], addresses: Sequence[int]) -> None:
        """Do nothing: kernels write outputs in place."""

    def wait(self, communicator: Communicator) -> None:
        """Raise CommunicationError if a collective failed; kernels of the host are over when they return."""
        communicator.check()

    def all_gather(self, communicator: Communicator, array: np.ndarray) -> np.ndarray:
        """Gather one array of the same size from each rank, a row each."""
        everyone = np.empty((communicator.world_size, array.size), array.dtype)
        whole_mesh = (1 << len(communicator.mesh_shape)) - 1
        dtype = native.dtype_code(array.dtype.name)
        native.all_gather(array.ctypes.data, everyone.ctypes.data, array.size, dtype, whole_mesh)
        communicator.check()
        return everyone

    def close(self) -> None:
        """Unmap the weights. Their addresses must not be used any more."""
        self._workspace = aligned(0)
        self._results.close()
        self._close()


def host_zeros(shape: Sequence[int], dtype: str) -> Buffer:
    """Make a buffer of zeros in host memory."""
    memory = np.zeros(math.prod(shape) * dtype_bytes(dtype), np.uint8)
    place = memory.ctypes.data
    return Buffer(place, tuple(shape), dtype, memory.nbytes, True, (dlpack.CPU, 0), False, memory)


def dtype_bytes(dtype: str) -> int:
    """The bytes of an element, by hidet's name of its dtype."""
    return header.ITEMSIZE[dtype] if dtype in header.ITEMSIZE else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class _Mapped:
    """A mapped file: its descriptor, path and digest, the mapping, and the watch over it."""

    file: VerifiedFile
    mapping: mmap.mmap
    watched: native.MappedFile

    def is_changed(self) -> bool:
        """Whether the content was changed. The file is read again where only its status may have been."""
        while (change := self.watched.change) is native.Change.STATUS:
            self.watched.renew()  # before it is read: what is written meanwhile is another change
            if not self.file.is_unchanged():
                self.watched.condemn()
        return change is not native.Change.NONE


def _close(files: list[_Mapped]) -> None:
    while files:
        mapped = files.pop()
        mapped.watched.forget()
        mapped.mapping.close()
        os.close(mapped.file.descriptor)
