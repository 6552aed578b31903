"""Python bindings of the functions that compiled kernels call, on the calling thread's current communicator.

Buffers are addresses, counts are in elements, and a group is a bit mask of mesh axes; see collectives.h and overlap.h.
All functions but ``group_rank`` and ``dtype_size`` return a status code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hidet_dist.native.library import library
from hidet_dist.native.signatures import Blocks, MaskPointer
from hidet_dist.spec.collectives import Collective


def run(kind: Collective, send: int, recv: int, count: int, dtype: int, reduce_op: int, group: int) -> int:
    """Run a collective of any kind that communicates.

    ``count`` is that of a block, for kinds with blocks (``Collective.block``). ``reduce_op`` is ignored by kinds that
    do not reduce.
    """
    codes = (dtype, reduce_op) if kind.reduces else (dtype,)
    return int(getattr(library(), kind.symbol())(send, recv, count, *codes, group))


def all_reduce(send: int, recv: int, count: int, dtype: int, reduce_op: int, group: int) -> int:
    """All-reduce ``count`` elements at address ``send`` into ``recv``."""
    return int(library().hidet_dist_all_reduce(send, recv, count, dtype, reduce_op, group))


def all_gather(send: int, recv: int, send_count: int, dtype: int, group: int) -> int:
    """Gather every rank's ``send_count`` elements at ``send`` into ``recv``."""
    return int(library().hidet_dist_all_gather(send, recv, send_count, dtype, group))


def reduce_scatter(send: int, recv: int, recv_count: int, dtype: int, reduce_op: int, group: int) -> int:
    """Reduce the elements at ``send``, leaving this rank's ``recv_count`` elements in ``recv``."""
    return int(library().hidet_dist_reduce_scatter(send, recv, recv_count, dtype, reduce_op, group))


def all_to_all(send: int, recv: int, count: int, dtype: int, group: int) -> int:
    """Send each rank of the group its ``count`` elements at ``send``, and receive as many from each."""
    return int(library().hidet_dist_all_to_all(send, recv, count, dtype, group))


def all_gather_blocks(send: int, recv: int, received: Blocks, dtype: int, group: int) -> int:
    """Gather every rank's elements at ``send`` into its block of ``recv``."""
    return int(library().hidet_dist_all_gather_blocks(send, recv, ctypes.byref(received), dtype, group))


def reduce_scatter_blocks(send: int, recv: int, sent: Blocks, dtype: int, reduce_op: int, group: int) -> int:
    """Reduce the blocks of ``send``, leaving this rank's block in ``recv``."""
    return int(library().hidet_dist_reduce_scatter_blocks(send, recv, ctypes.byref(sent), dtype, reduce_op, group))


def all_to_all_blocks(
    send: int, sent: Blocks | None, recv: int, received: Blocks | None, dtype: int, group: int
) -> int:
    """Send each rank of the group its block of ``send``, and receive one from each.

    ``None`` in place of blocks means that they are contiguous, one after the other.
    """
    return int(library().hidet_dist_all_to_all_blocks(send, sent, recv, received, dtype, group))


def all_gather_parts(send: int, recv: int, joined: Sequence[int], unit: int, dtype: int, group: int) -> int:
    """Gather parts of ``joined[p] * unit`` elements, for each group rank p, into ``recv``."""
    return int(library().hidet_dist_all_gather_parts(send, recv, _sizes(joined), unit, dtype, group))


def reduce_scatter_parts(
    send: int, recv: int, split: Sequence[int], unit: int, dtype: int, reduce_op: int, group: int
) -> int:
    """Reduce parts of ``split[p] * unit`` elements, for each group rank p, leaving this rank's in ``recv``."""
    return int(library().hidet_dist_reduce_scatter_parts(send, recv, _sizes(split), unit, dtype, reduce_op, group))


def all_to_all_parts(
    send: int, recv: int, split: Sequence[int], joined: Sequence[int], unit: int, dtype: int, group: int
) -> int:
    """Send ``joined[p] * split[q] * unit`` elements from each group rank p to each q."""
    return int(library().hidet_dist_all_to_all_parts(send, recv, _sizes(split), _sizes(joined), unit, dtype, group))


def gather_rows(send: int, wanted: int, recv: int, rows: int, row: int, dtype: int, group: int) -> int:
    """Gather the rows that this rank wants of all ranks' ``rows`` rows of ``row`` elements, beside zeros for others.

    ``wanted`` is the address of the mask, uint8[p, p * rows] for a group of p ranks.
    """
    return int(library().hidet_dist_gather_rows(send, _mask(wanted), recv, rows, row, dtype, group))


def reduce_scatter_rows(send: int, wanted: int, recv: int, rows: int, row: int, dtype: int, group: int) -> int:
    """Add up what the ranks that want this rank's ``rows`` rows of ``row`` elements have in their places."""
    return int(library().hidet_dist_reduce_scatter_rows(send, _mask(wanted), recv, rows, row, dtype, group))


def gather_packed_rows(send: int, wanted: int, recv: int, rows: int, row: int, dtype: int, group: int) -> int:
    """Send other ranks the rows that they want, packed one after the other, and receive those that this one wants."""
    return int(library().hidet_dist_gather_packed_rows(send, _mask(wanted), recv, rows, row, dtype, group))


def reduce_scatter_packed_rows(send: int, wanted: int, recv: int, rows: int, row: int, dtype: int, group: int) -> int:
    """Send other ranks their rows that this one wants, packed one after the other, and receive those of this one."""
    return int(library().hidet_dist_reduce_scatter_packed_rows(send, _mask(wanted), recv, rows, row, dtype, group))


def _mask(address: int) -> ctypes._Pointer[ctypes.c_uint8]:
    return ctypes.cast(address, MaskPointer)


def _sizes(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)


def broadcast(send: int, recv: int, count: int, dtype: int, root: int, group: int) -> int:
    """Broadcast the ``count`` elements at ``send`` of group rank ``root`` into every rank's ``recv``."""
    return int(library().hidet_dist_broadcast(send, recv, count, dtype, root, group))


def send(send: int, count: int, dtype: int, to: int, group: int) -> int:
    """Send ``count`` elements to group rank ``to``."""
    return int(library().hidet_dist_send(send, count, dtype, to, group))


def recv(recv: int, count: int, dtype: int, from_: int, group: int) -> int:
    """Receive ``count`` elements from group rank ``from_``."""
    return int(library().hidet_dist_recv(recv, count, dtype, from_, group))


def send_recv(
    send: int, send_count: int, to: int, recv: int, recv_count: int, from_: int, dtype: int, group: int
) -> int:
    """Send to one group rank and receive from another at the same time; either may be ``NOBODY``."""
    return int(library().hidet_dist_send_recv(send, send_count, to, recv, recv_count, from_, dtype, group))


def group_rank(group: int) -> int:
    """Return the group rank of this rank in a group of the thread's current communicator, or -1."""
    return int(library().hidet_dist_group_rank(group))


def dtype_size(dtype: int) -> int:
    """Return the bytes of one element of the dtype with this code, or 0."""
    return int(library().hidet_dist_dtype_size(dtype))


def start(recv: int) -> int:
    """Begin to start a collective that receives at ``recv`` without waiting for it; ends at :func:`started`."""
    return int(library().hidet_dist_start(recv))


def started(recv: int) -> int:
    """End the start of the collective that receives at ``recv``."""
    return int(library().hidet_dist_started(recv))


def wait(recv: int) -> int:
    """Wait for the collective that receives at ``recv``."""
    return int(library().hidet_dist_wait(recv))
