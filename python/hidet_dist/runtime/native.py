"""The native library, typed. Nothing here imports hidet or torch; see collectives.h for what each function does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from hidet_dist.errors import HidetDistError

LIBRARY_NAME = "hidet_dist"
ABI_VERSION = 4

DTYPE_CODES: dict[str, int] = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "int32": 5,
    "int64": 6,
    "uint8": 7,
    "bool": 8,
}
"""The code of each dtype that collectives take, by its name in hidet and NumPy."""

REDUCE_OP_CODES: dict[str, int] = {"sum": 0, "max": 1, "min": 2, "product": 3, "mean": 4}

NOBODY = -1
"""Stands for no rank in a send or receive."""

OK = 0
NO_COMMUNICATOR = 1
INVALID_ARGUMENT = 2
FAILED = 3
IN_PROGRESS = 16

_NCCL_ID_BYTES = 128
_UUID_BYTES = 16

AllReduceFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)
AllGatherFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32)
ReduceScatterFunction = AllReduceFunction
AllToAllFunction = AllGatherFunction
BroadcastFunction = AllReduceFunction
SendRecvFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32)
StreamFunction = ctypes.CFUNCTYPE(c_void_p)
ConnectFunction = ctypes.CFUNCTYPE(c_int32, c_int32)
CopyFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64)
ForkFunction = ctypes.CFUNCTYPE(c_int32, c_void_p)
AllocateFunction = ctypes.CFUNCTYPE(c_void_p, c_int64)
TicketFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64)


class Blocks(ctypes.Structure):
    """``hidet_dist_blocks``: the blocks of a group's ranks lie side by side in ``rows`` rows of ``whole`` elements.

    The block of the rank in place p has ``row`` elements of each, from p * row on.
    """

    _fields_ = (("rows", c_int64), ("row", c_int64), ("whole", c_int64))


BlocksPointer = POINTER(Blocks)


class Signature(ctypes.Structure):
    """``hidet_dist_signature``: what a rank says of its collective to the others."""

    _fields_ = (
        ("call", c_int64),
        ("count", c_int64),
        ("root", c_int32),
        ("kind", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
        ("reduce_op", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8),
    )


SIGNATURE_BYTES = ctypes.sizeof(Signature)

GatherBlocksFunction = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, BlocksPointer, c_int32, c_int32)
ScatterBlocksFunction = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_void_p, BlocksPointer, c_int32, c_int32, c_int32
)
ExchangeBlocksFunction = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_void_p, BlocksPointer, c_void_p, BlocksPointer, c_int32, c_int32
)


class Transport(ctypes.Structure):
    """``hidet_dist_transport``. Whoever fills it in keeps it, and its functions, for as long as the communicator."""

    _fields_ = (
        ("context", c_void_p),
        ("all_reduce", AllReduceFunction),
        ("all_gather", AllGatherFunction),
        ("reduce_scatter", ReduceScatterFunction),
        ("all_to_all", AllToAllFunction),
        ("broadcast", BroadcastFunction),
        ("send_recv", SendRecvFunction),
        ("copy", CopyFunction),
        ("all_gather_blocks", GatherBlocksFunction),
        ("reduce_scatter_blocks", ScatterBlocksFunction),
        ("all_to_all_blocks", ExchangeBlocksFunction),
    )


_OPTIONAL = ("copy", "all_gather_blocks", "reduce_scatter_blocks", "all_to_all_blocks")


class Overlap(ctypes.Structure):
    """``hidet_dist_overlap``. Whoever fills it in keeps it, and its functions, for as long as the communicator."""

    _fields_ = (
        ("context", c_void_p),
        ("fork", ForkFunction),
        ("mark", TicketFunction),
        ("wait", TicketFunction),
    )


def dtype_code(name: str) -> int:
    """The native code of a dtype, given its name in hidet or NumPy. Raises ``ValueError`` where there is none."""
    try:
        return DTYPE_CODES[name]
    except KeyError:
        raise ValueError(f"collectives do not take dtype {name!r}, only {', '.join(DTYPE_CODES)}") from None


def reduce_op_code(name: str) -> int:
    """The native code of one of ``REDUCE_OP_CODES``; ``ValueError`` for any other name."""
    try:
        return REDUCE_OP_CODES[name]
    except KeyError:
        raise ValueError(f"no reduce operation {name!r}, only {', '.join(REDUCE_OP_CODES)}") from None


@functools.cache
def _package_dir() -> Path:
    """The installed package's folder that holds ``lib`` and ``include``.

    An editable install keeps the Python sources in the checkout and these two in site-packages.
    """
    candidates = [Path(__file__).resolve().parent.parent]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        candidates.append(Path(str(importlib.metadata.distribution("hidet_dist").locate_file("hidet_dist"))))
    for candidate in candidates:
        if (candidate / "lib" / f"lib{LIBRARY_NAME}.so").is_file():
            return candidate
    tried = ", ".join(str(candidate / "lib") for candidate in candidates)
    raise HidetDistError(f"lib{LIBRARY_NAME}.so is not in {tried}: install hidet_dist (`make setup` in a checkout)")


def library_path() -> Path:
    """The native library. Raises ``HidetDistError`` where hidet_dist is not installed."""
    return library_dir() / f"lib{LIBRARY_NAME}.so"


def library_dir() -> Path:
    """The folder to link kernels against, with ``-lhidet_dist``."""
    return _package_dir() / "lib"


def include_dir() -> Path:
    """The folder for ``#include <hidet_dist/collectives.h>``."""
    return _package_dir() / "include"


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded native library, its symbols visible to kernels that are loaded later.

    Raises ``HidetDistError`` where it is missing or of another version than this package.
    """
    path = library_path()
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    lib.hidet_dist_abi_version.restype = c_int32
    version = lib.hidet_dist_abi_version()
    if version != ABI_VERSION:
        raise HidetDistError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: install it again")

    def declare(name: str, result: Any, *arguments: Any) -> None:
        function = getattr(lib, f"hidet_dist_{name}")
        function.restype = result
        function.argtypes = arguments

    declare("all_reduce", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("all_gather", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32)
    declare("reduce_scatter", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("all_to_all", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32)
    declare("all_gather_blocks", c_int32, c_void_p, c_void_p, BlocksPointer, c_int32, c_int32)
    declare("reduce_scatter_blocks", c_int32, c_void_p, c_void_p, BlocksPointer, c_int32, c_int32, c_int32)
    declare("all_to_all_blocks", c_int32, c_void_p, BlocksPointer, c_void_p, BlocksPointer, c_int32, c_int32)
    declare("broadcast", c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("send", c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("recv", c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("send_recv", c_int32, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32)
    declare("group_place", c_int32, c_int32)
    declare("group_size", c_int32, c_int32)
    declare("dtype_size", c_int64, c_int32)
    declare("communicator_create", c_void_p, POINTER(Transport), POINTER(c_int64), c_int32, c_int64)
    declare("communicator_destroy", None, c_void_p)
    declare("bind", None, c_void_p)
    declare("communicator_error", c_char_p, c_void_p)
    declare("fail", None, c_void_p, c_char_p)
    declare("communicator_begin_call", None, c_void_p, c_int64)
    declare("current_signature", c_int32, POINTER(Signature))
    declare("check_signature", c_int32, c_char_p, c_int64)
    declare("communicator_out_of_step", c_int64, c_void_p)
    declare("communicator_sequence", c_int64, c_void_p)
    declare("communicator_peers", c_int64, c_void_p, POINTER(c_int64), c_int64)
    declare("communicator_group_size", c_int64, c_void_p, c_int32)
    declare("last_error", c_char_p)
    declare("start", c_int32, c_void_p)
    declare("started", c_int32, c_void_p)
    declare("wait", c_int32, c_void_p)
    declare("communicator_set_overlap", None, c_void_p, POINTER(Overlap))
    declare("communicator_started", c_int64, c_void_p)
    declare("communicator_waited", c_int64, c_void_p)
    declare(
        "shm_create",
        c_void_p,
        POINTER(Transport),
        ConnectFunction,
        ConnectFunction,
        c_int32,
        c_int32,
        ctypes.c_double,
    )
    declare("shm_table", None, c_void_p, POINTER(Transport))
    declare("shm_segment", c_int32, c_int32)
    declare("shm_attach", c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32)
    declare("shm_delegate", None, c_void_p, c_int32)
    declare("shm_inbox", c_int32, c_void_p)
    declare("shm_attach_peer", c_int32, c_void_p, c_int32, c_int32)
    declare("shm_delegate_peer", None, c_void_p, c_int32)
    declare("shm_failed_by_peer", c_int32, c_void_p)
    declare("nccl_load", c_int32, c_char_p, c_char_p)
    declare("nccl_device_count", c_int32)
    declare("nccl_device_uuid", c_int32, c_int32, c_char_p)
    declare("nccl_unique_id", c_int32, c_char_p)
    declare(
        "nccl_create",
        c_void_p,
        POINTER(c_int64),
        c_int32,
        c_int64,
        c_int32,
        StreamFunction,
        ConnectFunction,
        ctypes.c_double,
    )
    declare("nccl_table", None, c_void_p, POINTER(Transport))
    declare("nccl_overlap", None, c_void_p, POINTER(Overlap))
    declare("nccl_has", c_int32, c_void_p, c_int32)
    declare("nccl_await", None, c_void_p)
    declare("nccl_begin", c_int32, c_void_p, c_int32, c_char_p)
    declare("nccl_progress", c_int32, c_void_p)
    declare("nccl_warm_up", c_int32, c_void_p, c_int32)
    declare("nccl_own_stream", c_void_p, c_void_p)
    declare("nccl_wait", c_int32, c_void_p, c_void_p, ctypes.c_double)
    declare("nccl_failed_by_peer", c_int32, c_void_p)
    declare("nccl_close", None, c_void_p)
    declare("nccl_destroy", None, c_void_p)
    declare("cublas_load", c_int32, c_char_p)
    declare("cublas_create", c_void_p, c_void_p, c_void_p, AllocateFunction, c_void_p, c_int64)
    declare("cublas_destroy", None, c_void_p)
    declare("cublas_bind", None, c_void_p)
    declare("mapped_file_watch", c_void_p, c_int32, c_void_p, c_int64, c_char_p)
    declare("mapped_file_changed", c_int32, c_void_p)
    declare("mapped_file_forget", None, c_void_p)
    declare("communicator_rely_on", None, c_void_p, c_void_p)
    declare("shm_close", None, c_void_p)
    declare("shm_destroy", None, c_void_p)
    return lib


def all_reduce(send: int, recv: int, count: int, dtype: int, reduce_op: int, group: int) -> int:
    """All-reduce ``count`` elements at address ``send`` into ``recv``; the status code is returned."""
    return int(library().hidet_dist_all_reduce(send, recv, count, dtype, reduce_op, group))


def all_gather(send: int, recv: int, send_count: int, dtype: int, group: int) -> int:
    """Gather every rank's ``send_count`` elements at ``send`` into ``recv``; the status code is returned."""
    return int(library().hidet_dist_all_gather(send, recv, send_count, dtype, group))


def reduce_scatter(send: int, recv: int, recv_count: int, dtype: int, reduce_op: int, group: int) -> int:
    """Reduce the elements at ``send``, leaving this rank's ``recv_count`` in ``recv``; the status code is returned."""
    return int(library().hidet_dist_reduce_scatter(send, recv, recv_count, dtype, reduce_op, group))


def all_to_all(send: int, recv: int, count: int, dtype: int, group: int) -> int:
    """Send each rank of the group its ``count`` elements at ``send``, get as many; the status code is returned."""
    return int(library().hidet_dist_all_to_all(send, recv, count, dtype, group))


def all_gather_blocks(send: int, recv: int, received: Blocks, dtype: int, group: int) -> int:
    """Gather every rank's elements at ``send`` into its block of ``recv``; the status code is returned."""
    return int(library().hidet_dist_all_gather_blocks(send, recv, ctypes.byref(received), dtype, group))


def reduce_scatter_blocks(send: int, recv: int, sent: Blocks, dtype: int, reduce_op: int, group: int) -> int:
    """Reduce the blocks of ``send``, leaving this rank's in ``recv``; the status code is returned."""
    return int(library().hidet_dist_reduce_scatter_blocks(send, recv, ctypes.byref(sent), dtype, reduce_op, group))


def all_to_all_blocks(
    send: int, sent: Blocks | None, recv: int, received: Blocks | None, dtype: int, group: int
) -> int:
    """Send each rank of the group its block of ``send``, get one from each; the status code is returned.

    ``None`` stands for blocks one behind the other.
    """
    return int(library().hidet_dist_all_to_all_blocks(send, sent, recv, received, dtype, group))


def broadcast(send: int, recv: int, count: int, dtype: int, root: int, group: int) -> int:
    """Get ``count`` elements at ``send`` of the rank in place ``root`` of the group; the status code is returned."""
    return int(library().hidet_dist_broadcast(send, recv, count, dtype, root, group))


def send(send: int, count: int, dtype: int, to: int, group: int) -> int:
    """Send ``count`` elements to the rank in place ``to`` of the group; the status code is returned."""
    return int(library().hidet_dist_send(send, count, dtype, to, group))


def recv(recv: int, count: int, dtype: int, from_: int, group: int) -> int:
    """Receive ``count`` elements from the rank in place ``from_`` of the group; the status code is returned."""
    return int(library().hidet_dist_recv(recv, count, dtype, from_, group))


def send_recv(
    send: int, send_count: int, to: int, recv: int, recv_count: int, from_: int, dtype: int, group: int
) -> int:
    """Send to one place of the group, or ``NOBODY``, and receive from another at once; the status code is returned."""
    return int(library().hidet_dist_send_recv(send, send_count, to, recv, recv_count, from_, dtype, group))


def group_place(group: int) -> int:
    """The place in its group of the rank that the calling thread is bound to, or -1."""
    return int(library().hidet_dist_group_place(group))


def dtype_size(dtype: int) -> int:
    """The bytes of one element of the dtype with this code, or 0."""
    return int(library().hidet_dist_dtype_size(dtype))


def create_communicator(transport: Transport | None, mesh_shape: tuple[int, ...], rank: int) -> int:
    """The handle of a new communicator. Raises ``ValueError`` with the native message where it is refused."""
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
    """The message of the communicator's first failure, or ``None``."""
    message = library().hidet_dist_communicator_error(handle)
    return None if message is None else message.decode(errors="replace")


def fail(handle: int, message: str) -> None:
    """Make a communicator fail, unless it has failed before."""
    library().hidet_dist_fail(handle, message.encode())


def begin_call(handle: int, call: int) -> None:
    """Number the program's call that the collectives of a communicator belong to from now on."""
    library().hidet_dist_communicator_begin_call(handle, call)


def current_signature() -> bytes:
    """The signature of the calling thread's collective under way, to be sent to the other ranks."""
    signature = Signature()
    library().hidet_dist_current_signature(ctypes.byref(signature))
    return bytes(signature)


def check_signature(theirs: bytes, rank: int) -> bool:
    """Whether another rank is in the same collective, by its signature; else the communicator has failed."""
    return bool(library().hidet_dist_check_signature(theirs, rank) == OK)


def out_of_step(handle: int) -> int:
    """The rank that was in another collective than this one, where a communicator failed for that, or ``NOBODY``."""
    return int(library().hidet_dist_communicator_out_of_step(handle))


def sequence(handle: int) -> int:
    """How many collectives, sends and receives were started on a communicator."""
    return int(library().hidet_dist_communicator_sequence(handle))


def peers(handle: int) -> tuple[int, ...]:
    """The other ranks of a communicator's collective that is under way, or that failed; empty where there is none."""
    function = library().hidet_dist_communicator_peers
    count = function(handle, None, 0)
    ranks = (c_int64 * count)()
    return tuple(ranks[: min(function(handle, ranks, count), count)])


def group_size(handle: int, group: int) -> int:
    """How many ranks the group along a mask of mesh axes has, or -1 for a mask with an unknown axis."""
    return int(library().hidet_dist_communicator_group_size(handle, group))


def start(recv: int) -> int:
    """What follows, up to :func:`started`, is a collective that is only started; the status code is returned."""
    return int(library().hidet_dist_start(recv))


def started(recv: int) -> int:
    """The collective that receives at ``recv`` was started; the status code is returned."""
    return int(library().hidet_dist_started(recv))


def wait(recv: int) -> int:
    """Wait for the collective that receives at ``recv``; the status code is returned."""
    return int(library().hidet_dist_wait(recv))


def set_overlap(handle: int, overlap: Overlap | None) -> None:
    """Say how a communicator runs collectives beside computation; ``None``: they are over when they were started."""
    library().hidet_dist_communicator_set_overlap(handle, None if overlap is None else ctypes.byref(overlap))


def rely_on(handle: int, file: MappedFile) -> None:
    """Have a communicator fail, instead of sending anything, once a file was changed."""
    library().hidet_dist_communicator_rely_on(handle, file.handle)


def overlapped(handle: int) -> tuple[int, int]:
    """How many collectives were only started on a communicator, and how many of these were waited for."""
    return (
        int(library().hidet_dist_communicator_started(handle)),
        int(library().hidet_dist_communicator_waited(handle)),
    )


def last_error() -> str:
    """The message of the calling thread's last native call that failed, or an empty string."""
    return str(library().hidet_dist_last_error().decode(errors="replace"))


TransportFunction = Callable[..., int]
"""A transport's function in Python: the native arguments without the context; it returns 0 or another number."""


def make_transport(
    all_reduce: TransportFunction,
    all_gather: TransportFunction,
    reduce_scatter: TransportFunction,
    all_to_all: TransportFunction,
    broadcast: TransportFunction,
    send_recv: TransportFunction,
) -> Transport:
    """A transport for host memory made of Python functions, which must not raise. A null address is ``None``.

    Blocks side by side are copied for it, to lie one behind the other.
    """
    return Transport(
        None,
        AllReduceFunction(lambda _context, *arguments: all_reduce(*arguments)),
        AllGatherFunction(lambda _context, *arguments: all_gather(*arguments)),
        ReduceScatterFunction(lambda _context, *arguments: reduce_scatter(*arguments)),
        AllToAllFunction(lambda _context, *arguments: all_to_all(*arguments)),
        BroadcastFunction(lambda _context, *arguments: broadcast(*arguments)),
        SendRecvFunction(lambda _context, *arguments: send_recv(*arguments)),
        CopyFunction(),
    )


def answer(
    run: Callable[[], None],
    fail: Callable[[str], None],
    blame_peer: Callable[[], None],
    interrupt: Callable[[BaseException], None],
) -> int:
    """Run something that native code waits for: nothing may be raised there, so that it is recorded.

    Of what is raised, ``fail`` is told the message. A ``RuntimeError`` is another rank's doing (``blame_peer``);
    ``interrupt`` gets what is no failure, such as KeyboardInterrupt.
    """
    try:
        run()
    except RuntimeError as error:
        blame_peer()
        fail(str(error))
        return FAILED
    except BaseException as error:
        if not isinstance(error, Exception):
            interrupt(error)
        fail(f"{type(error).__name__}: {error}")
        return FAILED
    return OK


def deferred_transport(make: Callable[[], Transport]) -> Transport:
    """A transport whose functions are those of the transport that ``make()`` gives, which is called when one is.

    ``make`` must give the same one each time, and must not raise; only host memory is carried.
    """

    def forward(name: str, kind: Any) -> Any:
        return kind(lambda _context, *arguments: getattr(make(), name)(None, *arguments))

    table = Transport()
    for name, kind, *_ in Transport._fields_:
        if name not in ("context", *_OPTIONAL):
            setattr(table, name, forward(name, kind))
    return table


class SharedMemory:
    """The native transport between ranks of one host; see shared_memory.h.

    Parameters
    ----------
    fallback: Transport
        Carries out the collectives of groups, and the messages from and to ranks, that are delegated to it.
    connect, connect_peer: Callable[[int], int]
        Called with a group's mask, or another rank, when it is first used: attaches it or delegates it and returns 0.
        Must not raise.
    rank, ranks: int
        This rank of the mesh, and their number.
    timeout_seconds: float
        How long a collective waits for another rank.
    """

    def __init__(
        self,
        fallback: Transport,
        connect: Callable[[int], int],
        connect_peer: Callable[[int], int],
        rank: int,
        ranks: int,
        timeout_seconds: float,
    ):
        self._fallback = fallback
        self._connect = ConnectFunction(connect), ConnectFunction(connect_peer)
        self._handle = library().hidet_dist_shm_create(
            ctypes.byref(fallback), *self._connect, rank, ranks, timeout_seconds
        )
        if not self._handle:
            raise ValueError(f"no shared-memory transport with a time-out of {timeout_seconds} s")
        self.table = Transport()
        library().hidet_dist_shm_table(self._handle, ctypes.byref(self.table))

    @staticmethod
    def segment(ranks: int) -> int:
        """A file descriptor of a new segment for a group of so many ranks, or -1 where the system has none."""
        return int(library().hidet_dist_shm_segment(ranks))

    def attach(self, group: int, descriptor: int, place: int, ranks: int) -> bool:
        """Route a group through a segment, in which this rank has the place ``place``; False where it cannot be."""
        return bool(library().hidet_dist_shm_attach(self._handle, group, descriptor, place, ranks) == OK)

    def delegate(self, group: int) -> None:
        """Route a group to the fallback."""
        library().hidet_dist_shm_delegate(self._handle, group)

    def inbox(self) -> int:
        """A file descriptor of this rank's inbox, which is kept open, or -1 where the system has none."""
        return int(library().hidet_dist_shm_inbox(self._handle))

    def attach_peer(self, rank: int, descriptor: int) -> bool:
        """Exchange messages with a rank through inboxes, given its own; False where that cannot be."""
        return bool(library().hidet_dist_shm_attach_peer(self._handle, rank, descriptor) == OK)

    def delegate_peer(self, rank: int) -> None:
        """Hand messages from and to a rank to the fallback."""
        library().hidet_dist_shm_delegate_peer(self._handle, rank)

    @property
    def failed_by_peer(self) -> bool:
        """Whether a collective failed because of another rank."""
        return bool(library().hidet_dist_shm_failed_by_peer(self._handle))

    def close(self) -> None:
        """Fail the collectives of other ranks that wait for this one."""
        library().hidet_dist_shm_close(self._handle)

    def destroy(self) -> None:
        """Free it. No communicator may use it any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().hidet_dist_shm_destroy(handle)


class MappedFile:
    """A file that is mapped to memory, watched for changes; see mapped_file.h.

    Parameters
    ----------
    descriptor: int
        The file's; it stays open until :meth:`forget`.
    address, nbytes: int
        Where it is mapped, until then.
    name: str
        What to call it in errors.
    """

    def __init__(self, descriptor: int, address: int, nbytes: int, name: str):
        self.handle = library().hidet_dist_mapped_file_watch(descriptor, address, nbytes, os.fsencode(name))
        if not self.handle:
            raise ValueError(last_error())

    @property
    def changed(self) -> bool:
        """Whether it is not what it was, or a page of it could not be read, and was taken for zeros."""
        return bool(library().hidet_dist_mapped_file_changed(self.handle))

    def forget(self) -> None:
        """End the watch. No communicator may rely on it any more."""
        library().hidet_dist_mapped_file_forget(self.handle)


def load_nccl(nccl_path: str, driver_path: str) -> int:
    """Load NCCL and the CUDA driver; NCCL's version is returned. Raises ``ValueError`` with the native message."""
    version = int(library().hidet_dist_nccl_load(nccl_path.encode(), driver_path.encode()))
    if version == 0:
        raise ValueError(last_error())
    return version


def cuda_device_count() -> int:
    """The number of CUDA devices. Raises ``ValueError`` with the native message, before ``load_nccl`` too."""
    count = int(library().hidet_dist_nccl_device_count())
    if count < 0:
        raise ValueError(last_error())
    return count


def cuda_device_uuid(device: int) -> str:
    """What tells a CUDA device from all others, in hexadecimal. Raises ``ValueError`` with the native message."""
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    if library().hidet_dist_nccl_device_uuid(device, uuid) != OK:
        raise ValueError(last_error())
    return uuid.raw.hex()


def nccl_unique_id() -> bytes:
    """What the ranks agree on to make a communicator of NCCL's. Raises ``ValueError`` with the native message."""
    unique_id = ctypes.create_string_buffer(_NCCL_ID_BYTES)
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
        This rank of it, and its CUDA device.
    stream: int
        The address of a C function that returns the calling thread's current CUDA stream.
    connect: Callable[[int], int]
        Called with a group's mask when it is first used: makes its communicator and returns 0. Must not raise.
    timeout_seconds: float
        How long a rank waits for another one.

    Raises ``ValueError`` where the device cannot be used.
    """

    def __init__(
        self,
        mesh_shape: tuple[int, ...],
        rank: int,
        device: int,
        stream: int,
        connect: Callable[[int], int],
        timeout_seconds: float,
    ):
        self._mesh_shape = mesh_shape
        self._connect = ConnectFunction(connect)
        self._stream = StreamFunction(stream)
        shape = (c_int64 * len(mesh_shape))(*mesh_shape)
        self._handle = library().hidet_dist_nccl_create(
            shape, len(mesh_shape), rank, device, self._stream, self._connect, timeout_seconds
        )
        if not self._handle:
            raise ValueError(last_error())
        self.table = Transport()
        library().hidet_dist_nccl_table(self._handle, ctypes.byref(self.table))
        self.overlap = Overlap()
        library().hidet_dist_nccl_overlap(self._handle, ctypes.byref(self.overlap))

    def spans(self, group: int) -> bool:
        """Whether a group has two ranks or more."""
        return any(group >> axis & 1 and extent > 1 for axis, extent in enumerate(self._mesh_shape))

    def has(self, group: int) -> bool:
        """Whether a group's communicator is there."""
        return bool(library().hidet_dist_nccl_has(self._handle, group))

    def await_all(self) -> None:
        """Say on the bound communicator that this rank waits for all others, until its next collective or wait."""
        library().hidet_dist_nccl_await(self._handle)

    def begin(self, group: int, unique_id: bytes | None) -> int:
        """Begin to make the communicator of the mesh, given its id, or of a group; the status code is returned."""
        return int(library().hidet_dist_nccl_begin(self._handle, group, unique_id))

    def progress(self) -> int:
        """How that stands: ``OK``, ``IN_PROGRESS`` or another status code after a failure."""
        return int(library().hidet_dist_nccl_progress(self._handle))

    def warm_up(self, group: int) -> int:
        """Exchange a few bytes over a group on ``own_stream``; the status code is returned."""
        return int(library().hidet_dist_nccl_warm_up(self._handle, group))

    @property
    def own_stream(self) -> int:
        """The stream of ``warm_up``."""
        return library().hidet_dist_nccl_own_stream(self._handle) or 0

    def current_stream(self) -> int:
        """The calling thread's current stream."""
        return self._stream() or 0

    def wait(self, stream: int, seconds: float) -> int:
        """Wait for the work on a stream: ``OK``, ``IN_PROGRESS`` after ``seconds``, or another code after a failure."""
        return int(library().hidet_dist_nccl_wait(self._handle, stream, seconds))

    @property
    def failed_by_peer(self) -> bool:
        """Whether something failed because of another rank."""
        return self._handle is not None and bool(library().hidet_dist_nccl_failed_by_peer(self._handle))

    def close(self) -> None:
        """Free NCCL's communicators, or abort them after a failure."""
        if self._handle is not None:
            library().hidet_dist_nccl_close(self._handle)

    def destroy(self) -> None:
        """Free it. No communicator may use it any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().hidet_dist_nccl_destroy(handle)


def load_cublas(path: str) -> int:
    """Load cuBLAS; its version is returned, such as 130100. Raises ``ValueError`` with the native message."""
    version = int(library().hidet_dist_cublas_load(path.encode()))
    if version == 0:
        raise ValueError(last_error())
    return version


class Cublas:
    """A handle of cuBLAS's for the device whose context is current; see cublas.h.

    Parameters
    ----------
    stream: int
        The address of a C function that returns the CUDA stream which the calling thread launches kernels on.
    report: int
        The address of a C function that is told, in text, why a product could not be put on the stream.
    allocate: Callable[[int], int | None]
        Finds so many bytes of the device's memory, for as long as the handle or a graph with its products is used; or
        None.
    workspace, nbytes: int
        Such memory.

    Raises
    ------
    ValueError
        With the native message, where there can be none.
    """

    def __init__(self, stream: int, report: int, allocate: Callable[[int], int | None], workspace: int, nbytes: int):
        self._allocate = AllocateFunction(allocate)  # kept: the handle has its address
        self._handle: int | None = library().hidet_dist_cublas_create(stream, report, self._allocate, workspace, nbytes)
        if not self._handle:
            raise ValueError(last_error())

    def bind(self) -> None:
        """Make it the one that kernels use which this thread launches."""
        library().hidet_dist_cublas_bind(self._handle)

    def destroy(self) -> None:
        """Free it. Its device's context must be current. This thread has none any more."""
        handle, self._handle = self._handle, None
        library().hidet_dist_cublas_bind(None)
        if handle is not None:
            library().hidet_dist_cublas_destroy(handle)
