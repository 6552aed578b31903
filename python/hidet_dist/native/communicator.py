"""Communicators of the native library, by handle: to make, bind to a thread, query and free them."""

from __future__ import annotations

import ctypes
from ctypes import c_int64

from hidet_dist.native.codes import OK
from hidet_dist.native.library import last_error, library
from hidet_dist.native.mapped_file import MappedFile
from hidet_dist.native.signatures import Envelope, Overlap, TransportTable

ENVELOPE_BYTES = ctypes.sizeof(Envelope)


def create_communicator(transport: TransportTable | None, mesh_shape: tuple[int, ...], rank: int) -> int:
    """Make a communicator and return its handle. Raises ``ValueError`` with the native message where it is refused."""
    shape = (c_int64 * len(mesh_shape))(*mesh_shape)
    table = None if transport is None else ctypes.byref(transport)
    handle = library().hidet_dist_communicator_create(table, shape, len(mesh_shape), rank)
    if not handle:
        raise ValueError(last_error())
    return int(handle)


def destroy_communicator(handle: int) -> None:
    """Free a communicator that no thread is using."""
    library().hidet_dist_communicator_destroy(handle)


def bind(handle: int | None) -> None:
    """Make a communicator the calling thread's current one; ``None`` leaves it without one."""
    library().hidet_dist_bind(handle)


def error(handle: int) -> str | None:
    """Return the message of the communicator's first failure, or ``None``."""
    message = library().hidet_dist_communicator_error(handle)
    return None if message is None else message.decode(errors="replace")


def fail(handle: int, message: str) -> None:
    """Make a communicator fail, unless it has failed before."""
    library().hidet_dist_fail(handle, message.encode())


def begin_call(handle: int, call: int) -> None:
    """Set the number of the program's call that further collectives of a communicator belong to."""
    library().hidet_dist_communicator_begin_call(handle, call)


def out_of_step(handle: int) -> int:
    """Return the rank whose different collective made a communicator fail, or ``NOBODY``."""
    return int(library().hidet_dist_communicator_out_of_step(handle))


def current_envelope() -> bytes:
    """Describe the calling thread's current collective, as bytes to be sent to the other ranks."""
    envelope = Envelope()
    library().hidet_dist_current_envelope(ctypes.byref(envelope))
    return bytes(envelope)


def check_envelope(theirs: bytes, rank: int) -> bool:
    """Check by its envelope that another rank is in the same collective; if not, the communicator fails."""
    envelope = Envelope.from_buffer_copy(theirs)
    return bool(library().hidet_dist_check_envelope(ctypes.byref(envelope), rank) == OK)


def sequence(handle: int) -> int:
    """Count the collectives, sends and receives that were started on a communicator."""
    return int(library().hidet_dist_communicator_sequence(handle))


def peers(handle: int) -> tuple[int, ...]:
    """Return the other ranks of a communicator's current or failed collective; empty where there is none."""
    function = library().hidet_dist_communicator_peers
    count = function(handle, None, 0)
    ranks = (c_int64 * count)()
    return tuple(ranks[: min(function(handle, ranks, count), count)])


def group_size(handle: int, group: int) -> int:
    """Count the ranks of the group along a mask of mesh axes; -1 for a mask with an unknown axis."""
    return int(library().hidet_dist_communicator_group_size(handle, group))


def set_overlap(handle: int, overlap: Overlap | None) -> None:
    """Set the functions by which a communicator overlaps collectives with computation; ``None`` for no overlap."""
    library().hidet_dist_communicator_set_overlap(handle, None if overlap is None else ctypes.byref(overlap))


def rely_on(handle: int, file: MappedFile) -> None:
    """Make a communicator fail, instead of sending data, once a file has been changed."""
    library().hidet_dist_communicator_rely_on(handle, file.handle)


def overlapped(handle: int) -> tuple[int, int]:
    """Count the collectives started on a communicator without waiting, and those of them waited for since."""
    return (
        int(library().hidet_dist_communicator_started(handle)),
        int(library().hidet_dist_communicator_waited(handle)),
    )
