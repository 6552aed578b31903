"""The native library's transport between CUDA devices, and its functions of NCCL and the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64

from hidet_dist.native.codes import OK
from hidet_dist.native.library import last_error, library
from hidet_dist.native.signatures import NCCL, ConnectFunction, Overlap, SettleFunction, StreamFunction, TransportTable

_ID_BYTES = NCCL.constants["NCCL_ID_BYTES"]
_UUID_BYTES = 16


def load_nccl(nccl_path: str, driver_path: str) -> int:
    """Load NCCL and the CUDA driver, and return NCCL's version. Raises ``ValueError`` with the native message."""
    version = int(library().hidet_dist_nccl_load(nccl_path.encode(), driver_path.encode()))
    if version == 0:
        raise ValueError(last_error())
    return version


def cuda_device_count() -> int:
    """Count the CUDA devices. Raises ``ValueError`` with the native message, also before ``load_nccl``."""
    count = int(library().hidet_dist_nccl_device_count())
    if count < 0:
        raise ValueError(last_error())
    return count


def cuda_device_uuid(device: int) -> str:
    """Return the UUID of a CUDA device, in hexadecimal. Raises ``ValueError`` with the native message."""
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    if library().hidet_dist_nccl_device_uuid(device, uuid) != OK:
        raise ValueError(last_error())
    return uuid.raw.hex()


def nccl_unique_id() -> bytes:
    """Make the identifier by which ranks open an NCCL communicator. Raises ``ValueError`` with the native message."""
    unique_id = ctypes.create_string_buffer(_ID_BYTES)
    if library().hidet_dist_nccl_unique_id(unique_id) != OK:
        raise ValueError(last_error())
    return unique_id.raw


class Nccl:
    """The native transport between ranks with a CUDA device each; see nccl.h.

    Parameters
    ----------
    mesh_shape: tuple[int, ...]
        The mesh of all ranks.
    rank, device: int
        This rank of the mesh, and its CUDA device.
    stream: int | Callable[[], int]
        A function that returns the CUDA stream of collectives, or the address of a C function that does.
    connect: Callable[[int], int]
        Called with a group's mask when the group is first used; makes its communicator and returns 0. Must not raise.
    settle: Callable[[], int]
        Waits for the work on the current stream, and returns 0. Must not raise.
    timeout_seconds: float
        How long a rank waits for another one.

    Raises
    ------
    ValueError
        Where the device cannot be used.
    """

    def __init__(
        self,
        mesh_shape: tuple[int, ...],
        rank: int,
        device: int,
        stream: int | Callable[[], int],
        connect: Callable[[int], int],
        settle: Callable[[], int],
        timeout_seconds: float,
    ):
        self._mesh_shape = mesh_shape
        self._connect = ConnectFunction(connect)
        self._settle = SettleFunction(settle)
        self._stream = StreamFunction(stream)
        shape = (c_int64 * len(mesh_shape))(*mesh_shape)
        self._handle = library().hidet_dist_nccl_create(
            shape, len(mesh_shape), rank, device, self._stream, self._connect, self._settle, timeout_seconds
        )
        if not self._handle:
            raise ValueError(last_error())
        self.table = TransportTable()
        library().hidet_dist_nccl_table(self._handle, ctypes.byref(self.table))
        self.overlap = Overlap()
        library().hidet_dist_nccl_overlap(self._handle, ctypes.byref(self.overlap))

    def spans(self, group: int) -> bool:
        """Tell whether a group has two ranks or more."""
        return any(group >> axis & 1 and extent > 1 for axis, extent in enumerate(self._mesh_shape))

    def has(self, group: int) -> bool:
        """Tell whether a group has a communicator."""
        return bool(library().hidet_dist_nccl_has(self._handle, group))

    def await_all(self) -> None:
        """Record on the bound communicator that this rank waits for all others, until its next collective or wait."""
        library().hidet_dist_nccl_await(self._handle)

    def begin(self, group: int, unique_id: bytes | None) -> int:
        """Begin to make the communicator of the mesh, given its id, or of a group. Returns a status code."""
        return int(library().hidet_dist_nccl_begin(self._handle, group, unique_id))

    def progress(self) -> int:
        """Return the state of the communicator in the making: ``OK``, ``IN_PROGRESS``, or another code if it failed."""
        return int(library().hidet_dist_nccl_progress(self._handle))

    def warm_up(self, group: int) -> int:
        """Exchange a few bytes over a group on ``internal_stream``. Returns a status code."""
        return int(library().hidet_dist_nccl_warm_up(self._handle, group))

    def group_begin(self) -> int:
        """Begin a group of messages, which become one operation at its end. Returns a status code."""
        return int(library().hidet_dist_nccl_group_begin(self._handle))

    def group_end(self) -> int:
        """End the group that was begun, and enqueue its messages. Returns a status code."""
        return int(library().hidet_dist_nccl_group_end(self._handle))

    @property
    def internal_stream(self) -> int:
        """The stream on which ``warm_up`` exchanges bytes."""
        return library().hidet_dist_nccl_internal_stream(self._handle) or 0

    def current_stream(self) -> int:
        """Return the calling thread's current stream."""
        return self._stream() or 0

    def wait(self, stream: int, seconds: float) -> int:
        """Wait for a stream's work. Returns ``OK``, ``IN_PROGRESS`` after ``seconds``, or another code if it failed."""
        return int(library().hidet_dist_nccl_wait(self._handle, stream, seconds))

    def wait_event(self, event: int, seconds: float) -> int:
        """Wait for the work before an event. Returns as :meth:`wait`."""
        return int(library().hidet_dist_nccl_wait_event(self._handle, event, seconds))

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""
        return self._handle is not None and bool(library().hidet_dist_nccl_failed_by_peer(self._handle))

    def close(self) -> None:
        """Free NCCL's communicators, or abort them after a failure."""
        if self._handle is not None:
            library().hidet_dist_nccl_close(self._handle)

    def destroy(self) -> None:
        """Free the transport, which no communicator may use any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().hidet_dist_nccl_destroy(handle)
