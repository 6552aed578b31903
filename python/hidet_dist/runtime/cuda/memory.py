"""The device memory of one partition, for weights, workspace and staging, and the stream of its work."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hidet_dist import native
from hidet_dist.artifacts.opened import VerifiedFile
from hidet_dist.errors import ArtifactError, InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.cuda import driver
from hidet_dist.runtime.cuda.arrays import CudaArrays, DevicePool
from hidet_dist.runtime.cuda.driver import DeviceError, Driver
from hidet_dist.runtime.cuda.storage import provide_storage
from hidet_dist.runtime.forks import Owner
from hidet_dist.runtime.libraries import hidet_runtime
from hidet_dist.runtime.memory import host_zeros
from hidet_dist.runtime.tensors import HIDET, TORCH, TensorBuffer, host_tensor
from hidet_dist.weights.header import LocatedTensor

if TYPE_CHECKING:
    from hidet_dist.runtime.communicator import Communicator

_ALIGNMENT = 256  # bytes, as cuMemAlloc aligns; the tensor maps of Hopper's memory accelerator need 128
_LOAD_BYTES = 16  # the widest memory access of a thread
_BLOCK_BYTES = 2**24  # the size of each of two blocks of pinned memory through which weights are copied


@dataclass
class _Resources:
    """The resources that are freed with the partition."""

    driver: Driver
    device: int
    context: int
    streams: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    allocations: dict[int, int] = field(default_factory=dict)
    owner: Owner = field(default_factory=Owner)


class CudaMemory:
    """Memory of a CUDA device, with a stream for the partition's work.

    Kernels, copies and collectives of a call are enqueued on that stream. They start after the present work of the
    caller's stream (hidet's or torch's current one), and the call returns when they are done.

    Parameters
    ----------
    device: int
        The device's number in this process.
    static: bool
        Whether all inputs and outputs are staged in the partition's memory, so that kernels find them at the same
        addresses in each call, as CUDA graphs require.

    Raises
    ------
    ConfigError, DeviceError
        When there is no such device, or it cannot be used.
    """

    number = 1
    zeros_are_free = False
    files = ()  # weights are copied

    def __init__(self, device: int, static: bool = False):
        self.name = f"CPU or CUDA device {device}"
        self.device = device
        self.driver = driver.load()
        self._static = static
        self._resources = _Resources(self.driver, device, self.driver.retain_context(device))
        self._close = weakref.finalize(self, _release, self._resources)
        self._close.atexit = False  # the driver may have been unloaded by then
        self._runtime = hidet_runtime()
        self._workspace = (0, 0)  # address and bytes
        self._slots: dict[int, tuple[int, int]] = {}  # address and bytes of staged inputs, outputs and messages
        with self.current():
            self.stream = self.driver.new_stream()
            self._resources.streams.append(self.stream)
            self._before = self.new_event()
        self._pool = DevicePool(self)
        self._idle_stream = 0
        provide_storage(self.driver)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory that the partition has allocated: weights, workspace and staging."""
        return sum(tuple(self._resources.allocations.values()))

    def new_event(self) -> int:
        """Create an event, which is freed with the memory."""
        event = self.driver.new_event()
        self._resources.events.append(event)
        return event

    def new_stream(self) -> int:
        """Create a stream for messages between stages, which no other stream waits for; it is freed with the memory.

        Raises
        ------
        ConfigError
            When streams would share queues on the device.
        """
        driver.check_connections()
        with self.current():
            stream = self.driver.new_stream(blocking=False)
        self._resources.streams.append(stream)
        return stream

    def arrays(self, stream: int | None = None) -> CudaArrays:
        """Make arrays whose copies run on a stream, by default the partition's."""
        return CudaArrays(self, self._pool, self.stream if stream is None else stream)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make a context in which this thread uses the device, and hidet's runtime launches kernels on the stream."""
        with self.current():
            runtime = self._runtime
            follows_torch = bool(runtime.get_use_torch_cuda_stream())
            runtime.use_torch_cuda_stream(False)
            before = runtime.get_cuda_stream()
            runtime.set_cuda_stream(self.stream)
            try:
                self.driver.record(self._before, self._callers_stream(before if not follows_torch else None))
                self.driver.wait_for(self.stream, self._before)
                yield
            finally:
                runtime.set_cuda_stream(before)
                runtime.use_torch_cuda_stream(follows_torch)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make a context in which this thread can call the driver about the device."""
        before = self.driver.current_context()
        self.driver.set_context(self._resources.context)
        try:
            yield
        finally:
            self.driver.set_context(before)

    def _callers_stream(self, hidet_stream: int | None) -> int:
        """Return the stream that computes the inputs: hidet's if one was set, or torch's, or the default stream."""
        if hidet_stream:
            return hidet_stream
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.current_stream(self.device).cuda_stream)
        return 0

    def holds(self, device: tuple[int, int]) -> bool:
        """Tell whether a tensor on this DLPack device is on the CUDA device, or in host memory, to be copied."""
        return device == (dlpack.CUDA, self.device) or device[0] in (dlpack.CPU, dlpack.CUDA_HOST)

    def packed(self, buffer: TensorBuffer, what: str) -> TensorBuffer:
        """Return a contiguous tensor. Raises InputError for one on the device that is not."""
        if buffer.contiguous or buffer.device[0] != dlpack.CUDA:
            return buffer.packed()
        raise InputError(f"{what} must be contiguous in row-major order on a CUDA device; give x.contiguous().")

    def load(self, file: VerifiedFile, places: Mapping[str, LocatedTensor]) -> dict[str, int]:
        """Copy tensors of a safetensors file to the device, block by block through pinned memory.

        Raises
        ------
        ArtifactError
            When the file was changed since it was verified.
        DeviceError
            When the device has too little memory.
        """
        with os.fdopen(file.descriptor, "rb", buffering=0) as stream:
            with self.current():
                addresses = self._place([place.nbytes for place in places.values()])
                copies = [
                    (address, place.begin, place.begin + place.nbytes)
                    for place, address in zip(places.values(), addresses, strict=True)
                ]
                self._fill(stream.fileno(), file.path, copies)
            if not file.is_unchanged():
                raise ArtifactError(f"{file.path} was changed while it was loaded. Load the artifacts again.")
        return dict(zip(places, addresses, strict=True))

    def _place(self, sizes: Sequence[int]) -> list[int]:
        """Allocate memory for tensors of these sizes at once, and return their addresses."""
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        base = self._allocate(total) if total else 0
        return [base + offset for offset in offsets]

    def _fill(self, file: int, path: Path, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy parts of a file to the device, each given as (address, begin, end), in bytes of the file.

        One block is copied to the device while the next is read.
        """
        blocks = [self.driver.allocate_host(_BLOCK_BYTES) for _ in range(2)]
        try:
            turn = 0
            events = [self.driver.new_event() for _ in blocks]
            self._resources.events += events
            for event in events:
                self.driver.record(event, self.stream)
            for address, begin, end in copies:
                for at in range(begin, end, _BLOCK_BYTES):
                    size = min(_BLOCK_BYTES, end - at)
                    self.driver.call("cuEventSynchronize", events[turn])
                    view = memoryview((ctypes.c_char * size).from_address(blocks[turn])).cast("B")
                    _read(file, view, at, path)
                    self.driver.copy(address + at - begin, blocks[turn], size, self.stream)
                    self.driver.record(events[turn], self.stream)
                    turn = 1 - turn
            self.driver.synchronize(self.stream)
        finally:
            for block in blocks:
                self.driver.free_host(block)

    def check(self) -> None:
        """Do nothing: the weights are copies, which a change of the files does not affect."""

    def workspace(self, nbytes: int) -> int:
        """Allocate at least ``nbytes`` bytes for activations in place of the earlier ones; return their address."""
        address, size = self._workspace
        if size < nbytes:
            with self.current():
                if size:
                    self._free(address)
                    self._workspace = (0, 0)
                address = self._allocate(nbytes)
            self._workspace = (address, nbytes)
        return address

    def reserve(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes until :meth:`release` or :meth:`close`; return their address."""
        with self.current():
            return self._allocate(nbytes)

    def reserve_beside(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes until :meth:`close` without waiting for messages; return their address."""
        with self.current():
            self._idle_stream = self._idle_stream or self.new_stream()
            return self._allocate(nbytes, self._idle_stream)

    def reserve_zeros(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes of zeros until :meth:`release` or :meth:`close`; return their address."""
        address = self.reserve(nbytes)
        self.clear(address, nbytes)
        return address

    def clear(self, address: int, nbytes: int) -> None:
        """Set bytes on the device to zero, in their turn on the stream."""
        with self.current():
            self.driver.clear(address, 0, nbytes, self.stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes on the device, or from or to the host's memory, in their turn on the stream, and wait."""
        with self.current():
            self.driver.copy(target, source, nbytes, self.stream)
            self.driver.synchronize(self.stream)

    def release(self, address: int) -> None:
        """Free memory of :meth:`reserve`, which no work on the device may use any more."""
        with self.current():
            self._free(address)

    def empty(self, kind: str, shape: Sequence[int], dtype: str, device: tuple[int, int]) -> Any:
        """Make an uninitialized tensor of a library: on the CUDA device if ``device`` is one, else in host memory."""
        if device[0] == dlpack.CUDA and kind == TORCH:
            import torch

            return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=f"cuda:{self.device}")
        if device[0] == dlpack.CUDA and kind == HIDET:
            import hidet

            return hidet.empty(list(shape), dtype, device=f"cuda:{self.device}")
        return host_tensor(kind, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorBuffer:
        """Make a buffer of zeros, in host memory."""
        return host_zeros(shape, dtype)

    def stage(self, inputs: Sequence[TensorBuffer], outputs: Sequence[TensorBuffer]) -> list[int]:
        """Locate inputs and outputs on the device: the tensors themselves, or copies on the device."""
        addresses = []
        for slot, buffer in enumerate((*inputs, *outputs)):
            if not self._needs_copy(buffer):
                addresses.append(buffer.address)
                continue
            address = self._slot(slot, buffer.nbytes)
            if slot < len(inputs):
                self.driver.copy(address, buffer.address, buffer.nbytes, self.stream)
            addresses.append(address)
        return addresses

    def deliver(self, outputs: Sequence[TensorBuffer], addresses: Sequence[int]) -> None:
        """Copy staged outputs to the caller's tensors, after the program has run."""
        copied = [
            (buffer, address) for buffer, address in zip(outputs, addresses, strict=True) if buffer.address != address
        ]
        for buffer, address in copied:
            self.driver.copy(buffer.address, address, buffer.nbytes, self.stream)
        if copied:
            self.driver.synchronize(self.stream)

    def wait(self, communicator: Communicator) -> None:
        """Wait for the stream's work.

        Raises
        ------
        CommunicationError
            When a collective failed, or the other ranks do not come within the time-out.
        DeviceError
            When a kernel failed.
        """
        if communicator.world_size > 1:
            communicator.wait(self.stream)
        else:
            communicator.check()
        self.driver.synchronize(self.stream)

    def all_gather(self, communicator: Communicator, array: np.ndarray) -> np.ndarray:
        """Gather an array of the same size from each rank, as rows. The communicator must be bound to this thread."""
        rows = np.empty((communicator.world_size, array.size), array.dtype)
        send = self._slot(_MESSAGE, array.nbytes)
        receive = self._slot(_MESSAGES, rows.nbytes)
        stream = self.stream if communicator.stream is None else communicator.stream
        self.driver.copy(send, array.ctypes.data, array.nbytes, stream)
        whole_mesh = (1 << len(communicator.mesh_shape)) - 1
        native.all_gather(send, receive, array.size, native.dtype_code(array.dtype.name), whole_mesh)
        if communicator.world_size > 1:
            communicator.wait(stream)
        self.driver.copy(rows.ctypes.data, receive, rows.nbytes, stream)
        self.driver.synchronize(stream)
        return rows

    def close(self) -> None:
        """Free everything. Addresses must not be used any more."""
        self._close()

    def _needs_copy(self, buffer: TensorBuffer) -> bool:
        elsewhere = buffer.device != (dlpack.CUDA, self.device)
        return elsewhere or self._static or buffer.address % _LOAD_BYTES != 0

    def _slot(self, slot: int, nbytes: int) -> int:
        """Return the address of a staging buffer of at least ``nbytes`` bytes, which is kept for later calls."""
        address, size = self._slots.get(slot, (0, 0))
        if size < nbytes or not size:
            if size:
                del self._slots[slot]
                self._free(address)
            address = self._allocate(nbytes)
            self._slots[slot] = (address, max(1, nbytes))
        return address

    def _allocate(self, nbytes: int, stream: int | None = None) -> int:
        driver = self.driver
        try:
            address = driver.allocate(nbytes) if stream is None else driver.allocate_beside(nbytes, stream)
        except DeviceError as error:
            raise DeviceError(
                f"CUDA device {self.device} cannot allocate {nbytes} bytes more, with {self.allocated_bytes} bytes "
                f"allocated by this partition: {error}. Build the artifacts with a smaller "
                "optimization_config['mem_budget']."
            ) from error
        self._resources.allocations[address] = nbytes
        return address

    def _free(self, address: int) -> None:
        del self._resources.allocations[address]
        self.driver.free(address)


_MESSAGE, _MESSAGES = -1, -2  # the staging slots of all_gather, beside those of inputs and outputs


def _read(file: int, block: memoryview, at: int, path: Path) -> None:
    done = 0
    while done < len(block):
        count = os.preadv(file, [block[done:]], at + done)
        if count == 0:
            raise ArtifactError(f"{path} was changed while it was loaded. Load the artifacts again.")
        done += count


def _release(resources: _Resources) -> None:
    if not resources.owner.is_this_process:
        return  # the driver cannot be used in a forked child, and the parent owns the device's memory
    cuda = resources.driver
    with suppress(DeviceError):  # after a kernel has failed, the context cannot be used any more
        before = cuda.current_context()
        cuda.set_context(resources.context)
        try:
            # The last call may have left work, such as clearing states, which the driver need not wait for as it frees.
            for stream in resources.streams:
                with suppress(DeviceError):
                    cuda.synchronize(stream)
                cuda.call("cuStreamDestroy_v2", stream)
            for event in resources.events:
                cuda.call("cuEventDestroy_v2", event)
            for address in resources.allocations:
                cuda.free(address)
        finally:
            cuda.set_context(before)
            cuda.release_context(resources.device)
