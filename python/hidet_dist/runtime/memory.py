"""Where a partition's weights, workspace, inputs and outputs lie: one class for each kind of memory.

Host memory here; that of CUDA devices is in :mod:`hidet_dist.runtime.cuda.memory`. A kind of memory says which tensors
the kernels can read where they lie, takes the weights from their files, and makes room for activations and results;
nothing else knows where they are.
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
    name: as users know it, such as ``CPU``.
    number: hidet's number of the kind: 0 is the host, 1 CUDA.
    files: the files that weights are read from while kernels run.
    """

    name: str
    number: int

    @property
    def files(self) -> Sequence[native.MappedFile]:
        """Those files."""

    def holds(self, device: tuple[int, int]) -> bool:
        """Whether a tensor on this DLPack device (type and number) may be given."""

    def active(self) -> AbstractContextManager[None]:
        """While it lasts, kernels can be launched by this thread."""

    def packed(self, buffer: Buffer, what: str) -> Buffer:
        """A tensor row by row: itself or a copy. Raises InputError, which calls it ``what``, where that is not made."""

    def load(self, file: VerifiedFile, places: Mapping[str, Place]) -> dict[str, int]:
        """The addresses of a file's tensors, by name. Takes the file's descriptor."""

    def check(self) -> None:
        """Raise ArtifactError where the weights are not what they were."""

    def workspace(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes for activations; what was there before is given up."""

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """A new tensor of a library that has the dtype, on a DLPack device, its content undefined."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A new tensor of zeros, of no library."""

    def stage(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> list[int]:
        """The addresses where kernels find the inputs and put the outputs, within :meth:`active`."""

    def deliver(self, outputs: Sequence[Buffer], addresses: Sequence[int]) -> None:
        """Bring outputs from these addresses to where they belong, once they are there."""

    def wait(self, communicator: Communicator) -> None:
        """Return once what was launched is over; raise CommunicationError where a collective failed."""

    def all_gather(self, communicator: Communicator, own: np.ndarray) -> np.ndarray:
        """All ranks' arrays of the same size, a row each. The communicator is bound to this thread."""

    def close(self) -> None:
        """Give everything back."""


class HostMemory:
    """The host's memory. Weights stay in their files, mapped read-only: what is not read takes no memory.

    All processes of a host that map the same file share its pages. The file may be renamed or deleted meanwhile, but
    not changed: a mapping shows whatever the file has. :meth:`check` finds out that it was, at the price of one system
    call a file. What a file has no more when kernels read it, they take for zeros (see mapped_file.h), so that it must
    be checked after they have run, too.
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
        """Those of the weights."""
        return [mapped.watched for mapped in self._mapped]

    @property
    def unused_result_bytes(self) -> int:
        """What lies ready for large results."""
        return self._results.unused_bytes

    def holds(self, device: tuple[int, int]) -> bool:
        """Whether a tensor is in the host's memory, pinned or not."""
        return device[0] in (dlpack.CPU, dlpack.CUDA_HOST)

    def load(self, file: VerifiedFile, places: Mapping[str, Place]) -> dict[str, int]:
        """Map a safetensors file, whose descriptor is taken. Its pages are read when kernels read them.

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
        """Raise ArtifactError where a mapped file was changed, or a page of it could not be read."""
        for mapped in self._mapped:
            if mapped.is_changed():
                raise ArtifactError(
                    f"{mapped.file.path} was changed while it was in use: the weights are not what they were. Load the "
                    "artifacts again; builds replace them without touching the old files."
                )

    def workspace(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes; they take memory once they are written to."""
        if self._workspace.nbytes < nbytes:
            self._workspace = aligned(nbytes)
        return int(self._workspace.ctypes.data)

    def active(self) -> AbstractContextManager[None]:
        """Nothing needs to be made ready."""
        return nullcontext()

    def packed(self, buffer: Buffer, what: str) -> Buffer:
        """A tensor row by row: itself or a copy."""
        return buffer.packed()

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """A new tensor in host memory; of a large one, the memory may be that of an earlier one that is gone."""
        nbytes = math.prod(shape) * dtype_bytes(dtype)
        memory = self._results.take(nbytes) if nbytes >= LEAST_BYTES and kind != HIDET else None
        return host_tensor(kind, shape, dtype, memory)

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A new tensor of zeros."""
        return host_zeros(shape, dtype)

    def stage(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> list[int]:
        """Where they lie."""
        return [buffer.address for buffer in (*inputs, *outputs)]

    def deliver(self, outputs: Sequence[Buffer], addresses: Sequence[int]) -> None:
        """They are there."""

    def wait(self, communicator: Communicator) -> None:
        """All is over; raises CommunicationError where a collective failed."""
        communicator.check()

    def all_gather(self, communicator: Communicator, own: np.ndarray) -> np.ndarray:
        """All ranks' arrays of the same size, a row each."""
        everyone = np.empty((communicator.world_size, own.size), own.dtype)
        whole_mesh = (1 << len(communicator.mesh_shape)) - 1
        dtype = native.dtype_code(own.dtype.name)
        native.all_gather(own.ctypes.data, everyone.ctypes.data, own.size, dtype, whole_mesh)
        communicator.check()
        return everyone

    def close(self) -> None:
        """Unmap the weights. Their addresses must not be used any more."""
        self._workspace = aligned(0)
        self._results.close()
        self._close()


def host_zeros(shape: Sequence[int], dtype: str) -> Buffer:
    """A new tensor of zeros in host memory, of no library."""
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
        """Whether its content is not what it was. It is read again where only its status may have been changed."""
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
