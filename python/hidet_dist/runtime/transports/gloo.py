"""The transport across hosts: the native library's collectives, implemented by torch.distributed's Gloo."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hidet_dist import native
from hidet_dist.runtime.meeting import await_ranks
from hidet_dist.runtime.mesh_groups import group_ranks
from hidet_dist.runtime.rendezvous import local_address
from hidet_dist.runtime.store.torch_store import TorchStore
from hidet_dist.runtime.transports.base import Blocking, Setup

# Up to this many bytes from all ranks together, an all-reduce is an all-gather and a local reduction. Gloo's all-reduce
# takes twice as many steps; measured on one host with 2 and 4 processes, a step costs more than these bytes.
SMALL_BYTES = 256 * 1024

_DTYPES = {code: getattr(torch, name) for name, code in native.DTYPE_CODES.items()}
_BOOL = native.dtype_code("bool")
_SUM, _MAX, _MIN, _PRODUCT, _MEAN = (native.reduce_op_code(name) for name in ("sum", "max", "min", "product", "mean"))
_REDUCE_OPS: dict[int, Any] = {
    _SUM: dist.ReduceOp.SUM,
    _MAX: dist.ReduceOp.MAX,
    _MIN: dist.ReduceOp.MIN,
    _PRODUCT: dist.ReduceOp.PRODUCT,
    _MEAN: dist.ReduceOp.SUM,
}


_Sizes: TypeAlias = Any
"""A pointer to int64, the size of each group rank's part."""

# The tags of a message's envelope and of its data.
_ENVELOPE_TAG, _DATA_TAG = 0, 1

# Rows of up to this many bytes per rank travel with the envelope. They are padded to this length, because Gloo ends the
# process when it receives more bytes than expected. Longer rows follow once the envelopes are known to be equal. An
# extra step costs more than the padding.
_SMALL_ROW_BYTES = 4096


@dataclass(frozen=True)
class _GlooGroup:
    backend: Any  # a ProcessGroupGloo, most of whose methods torch's stubs lack
    ranks: tuple[int, ...]  # numbered within the mesh
    group_rank: int
    store: TorchStore  # kept alive here: the backend does not hold a reference

    @property
    def size(self) -> int:
        return len(self.ranks)


class GlooTransport(Blocking):
    """The implementation of a communicator's collectives between processes on CPUs by Gloo.

    A process group is made for each group of ranks when it is first used, and for each pair of ranks that exchange
    messages. One thread at a time may use it.

    Parameters
    ----------
    setup: Setup
        The common arguments of transports.
    """

    def __init__(self, setup: Setup):
        self.table = native.make_transport({name: getattr(self, f"_{name}") for name in native.TRANSPORT_FUNCTIONS})
        self.shared_groups: tuple[tuple[int, ...], ...] = ()
        self.shared_peers: tuple[int, ...] = ()
        self._rank = setup.rendezvous.settings.rank
        # Holds the rendezvous, not its store, so that the store is freed when the rendezvous is closed.
        self._setup = setup
        self._device = _open_device(setup.rendezvous.address, setup.rendezvous.port)
        self._groups: dict[tuple[int, ...], _GlooGroup] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""
        return self._setup.failures.by_peer

    def close(self) -> None:
        """Close all connections. Collectives of other ranks that wait for this one fail then."""
        self._groups.clear()
        self._scratch.clear()

    # The functions that the native library calls, with checked arguments: counts are positive, and groups have two
    # ranks or more.

    def _all_reduce(self, send: int, recv: int, count: int, dtype: int, reduce_op: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            dtype_, op = _as_gloo(dtype, reduce_op)
            source, result = _tensor(send, count, dtype_), _tensor(recv, count, dtype_)
            if source.nbytes * peers.size <= SMALL_BYTES:
                gathered = self._scratch_tensor("received", count * peers.size, dtype_)
                self._gather(peers, source.view(torch.uint8), gathered.view(torch.uint8))
                _reduce(gathered.view(peers.size, count), result, op)
                return
            if op in (_MAX, _MIN) and dtype_.is_floating_point:
                self._extremes(peers, source, result, op)
                return
            self._check_envelopes(peers)
            # In half precision the sum may overflow where the mean does not.
            divide_first = op == _MEAN and dtype_ in (torch.float16, torch.bfloat16)
            if divide_first:
                torch.div(source, peers.size, out=result)
            elif send != recv:
                result.copy_(source)
            options = dist.AllreduceOptions()
            options.reduceOp = _REDUCE_OPS[op]
            peers.backend.allreduce([result], options).wait()
            if op == _MEAN and not divide_first:
                _divide(result, peers.size)

        return self._setup.failures.record(run)

    def _extremes(self, peers: _GlooGroup, source: torch.Tensor, result: torch.Tensor, op: int) -> None:
        """Compute maxima or minima of all ranks, each rank those of a part. Gloo's own drop NaN."""
        count, dtype = source.numel(), source.dtype
        piece = -(-count // peers.size)
        sent = self._scratch_tensor("sent", piece * peers.size, dtype)
        sent[:count], sent[count:] = source, 0
        exchanged = self._scratch_tensor("received", piece * peers.size, dtype)
        self._exchange(peers, exchanged.view(torch.uint8), sent.view(torch.uint8))
        part = self._scratch_tensor("part", piece, dtype)
        _reduce(exchanged.view(peers.size, piece), part, op)
        self._gather(peers, part.view(torch.uint8), exchanged.view(torch.uint8))
        result.copy_(exchanged[:count])

    def _all_gather(self, send: int, recv: int, send_count: int, dtype: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            size = send_count * native.dtype_size(dtype)
            source, result = _tensor(send, size, torch.uint8), _tensor(recv, size * peers.size, torch.uint8)
            self._gather(peers, source, result)

        return self._setup.failures.record(run)

    def _reduce_scatter(self, send: int, recv: int, recv_count: int, dtype: int, reduce_op: int, group: int) -> int:
        def run() -> None:
            # Gloo's reduce-scatter reduces everything on all ranks. An exchange moves only the needed bytes, and the
            # reduction in rank order is deterministic.
            peers = self._group(group)
            dtype_, op = _as_gloo(dtype, reduce_op)
            source = _tensor(send, recv_count * peers.size, dtype_)
            exchanged = self._scratch_tensor("received", recv_count * peers.size, dtype_)
            self._exchange(peers, exchanged.view(torch.uint8), source.view(torch.uint8))
            _reduce(exchanged.view(peers.size, recv_count), _tensor(recv, recv_count, dtype_), op)

        return self._setup.failures.record(run)

    def _all_to_all(self, send: int, recv: int, count: int, dtype: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            size = count * native.dtype_size(dtype) * peers.size
            source, result = _tensor(send, size, torch.uint8), _tensor(recv, size, torch.uint8)
            self._exchange(peers, result, source)

        return self._setup.failures.record(run)

    def _all_gather_parts(self, send: int, recv: int, joined: _Sizes, unit: int, dtype: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            sizes = _bytes_of(joined, peers, unit, dtype)
            own = sizes[peers.group_rank]
            copies = self._scratch_tensor("sent", own * peers.size, torch.uint8)
            copies.view(peers.size, own).copy_(_tensor(send, own, torch.uint8))
            result = _tensor(recv, sum(sizes), torch.uint8)
            self._exchange_parts(peers, result, sizes, copies, [own] * peers.size, max(sizes))

        return self._setup.failures.record(run)

    def _reduce_scatter_parts(
        self, send: int, recv: int, split: _Sizes, unit: int, dtype: int, reduce_op: int, group: int
    ) -> int:
        def run() -> None:
            peers = self._group(group)
            dtype_, op = _as_gloo(dtype, reduce_op)
            sizes = _bytes_of(split, peers, unit, dtype)
            own = sizes[peers.group_rank]
            exchanged = self._scratch_tensor("received", own * peers.size, torch.uint8)
            source = _tensor(send, sum(sizes), torch.uint8)
            self._exchange_parts(peers, exchanged, [own] * peers.size, source, sizes, max(sizes))
            if own:
                rows = exchanged.view(dtype_).view(peers.size, -1)
                _reduce(rows, _tensor(recv, rows.shape[1], dtype_), op)

        return self._setup.failures.record(run)

    def _all_to_all_v(self, send: int, recv: int, counts: _Sizes, unit: int, dtype: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            own, ranks = peers.group_rank, peers.size
            counted = counts[: ranks * ranks]
            sent = _bytes_of(counted[own * ranks :], peers, unit, dtype)
            received = _bytes_of(counted[own::ranks], peers, unit, dtype)
            most = max(counted) * unit * native.dtype_size(dtype)
            source, result = _tensor(send, sum(sent), torch.uint8), _tensor(recv, sum(received), torch.uint8)
            self._exchange_parts(peers, result, received, source, sent, most)

        return self._setup.failures.record(run)

    def _broadcast(self, send: int | None, recv: int, count: int, dtype: int, root: int, group: int) -> int:
        def run() -> None:
            peers = self._group(group)
            size = count * native.dtype_size(dtype)
            result = _tensor(recv, size, torch.uint8)
            self._check_envelopes(peers)
            if send is not None and send != recv and peers.group_rank == root:
                result.copy_(_tensor(send, size, torch.uint8))
            options = dist.BroadcastOptions()
            options.rootRank = root
            peers.backend.broadcast([result], options).wait()

        return self._setup.failures.record(run)

    def _send_recv(
        self, send: int, send_count: int, to: int, recv: int, recv_count: int, from_: int, dtype: int
    ) -> int:
        def run() -> None:
            # Pairs meet in the same order on all ranks, so that those of a ring do not deadlock.
            pairs = {
                rank: tuple(sorted((self._rank, rank))) for rank in dict.fromkeys((to, from_)) if rank != native.NOBODY
            }
            for pair in sorted(pairs.values()):
                self._peers(pair)
            works = []
            if to != native.NOBODY:
                peers = self._peers(pairs[to])
                message = _tensor(send, send_count * native.dtype_size(dtype), torch.uint8)
                for part, tag in ((_current_envelope(), _ENVELOPE_TAG), (message, _DATA_TAG)):
                    works.append(peers.backend.send([part], 1 - peers.group_rank, tag))
            if from_ != native.NOBODY:
                peers = self._peers(pairs[from_])
                message = _tensor(recv, recv_count * native.dtype_size(dtype), torch.uint8)
                # The envelope is checked first: Gloo ends the process when it receives more bytes than expected.
                envelope = torch.empty(native.ENVELOPE_BYTES, dtype=torch.uint8)
                peers.backend.recv([envelope], 1 - peers.group_rank, _ENVELOPE_TAG).wait()
                _check_envelopes(envelope.unsqueeze(0), (from_,))
                works.append(peers.backend.recv([message], 1 - peers.group_rank, _DATA_TAG))
            for work in works:
                work.wait()

        return self._setup.failures.record(run)

    def _gather(self, peers: _GlooGroup, source: torch.Tensor, result: torch.Tensor) -> None:
        """Gather bytes by an exchange of copies: one step, on one host 1.3 to 3 times as fast as Gloo's ring."""
        copies = self._scratch_tensor("sent", result.numel(), torch.uint8)
        copies.view(peers.size, source.numel()).copy_(source)
        self._exchange(peers, result, copies)

    def _exchange(self, peers: _GlooGroup, result: torch.Tensor, source: torch.Tensor) -> None:
        """Send each rank of the group its row of the bytes ``source``, and receive a row from each."""
        rows = result.view(peers.size, -1)
        if rows.shape[1] <= _SMALL_ROW_BYTES:
            rows.copy_(self._exchange_signed(peers, source.view(peers.size, -1))[:, : rows.shape[1]])
        else:
            self._check_envelopes(peers)
            peers.backend.alltoall_base(result, source, [], []).wait()

    def _exchange_parts(
        self,
        peers: _GlooGroup,
        result: torch.Tensor,
        received: Sequence[int],
        source: torch.Tensor,
        sent: Sequence[int],
        most: int,
    ) -> None:
        """Exchange parts of unequal size, of ``most`` bytes at most between any two ranks."""
        if most > _SMALL_ROW_BYTES:
            self._check_envelopes(peers)
            peers.backend.alltoall_base(result, source, list(received), list(sent)).wait()
            return
        rows = torch.zeros(peers.size, most, dtype=torch.uint8)
        for row, part in zip(rows, source.split(list(sent)), strict=True):
            row[: part.numel()] = part
        for row, part in zip(self._exchange_signed(peers, rows), result.split(list(received)), strict=True):
            part.copy_(row[: part.numel()])

    def _check_envelopes(self, peers: _GlooGroup) -> None:
        """Raise where a rank of the group is in a different collective. Takes one step."""
        self._exchange_signed(peers, torch.empty(peers.size, 0, dtype=torch.uint8))

    def _exchange_signed(self, peers: _GlooGroup, rows: torch.Tensor) -> torch.Tensor:
        """Exchange envelopes and a row of bytes with each rank. Returns ``_SMALL_ROW_BYTES`` from each."""
        shape = (peers.size, native.ENVELOPE_BYTES + _SMALL_ROW_BYTES)
        sent = self._scratch_tensor("signed", math.prod(shape), torch.uint8).view(shape)
        received = self._scratch_tensor("checked", math.prod(shape), torch.uint8).view(shape)
        sent[:, : native.ENVELOPE_BYTES] = _current_envelope()
        sent[:, native.ENVELOPE_BYTES : native.ENVELOPE_BYTES + rows.shape[1]] = rows
        peers.backend.alltoall_base(received.view(-1), sent.view(-1), [], []).wait()
        _check_envelopes(received[:, : native.ENVELOPE_BYTES], peers.ranks)
        return received[:, native.ENVELOPE_BYTES :]

    def _scratch_tensor(self, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in memory that later calls reuse: fresh pages cost as much as copies."""
        size = count * dtype.itemsize
        if use not in self._scratch or self._scratch[use].numel() < size:
            self._scratch[use] = torch.empty(size, dtype=torch.uint8)
        return self._scratch[use][:size].view(dtype)

    def _group(self, group: int) -> _GlooGroup:
        return self._peers(group_ranks(self._setup.mesh_shape, self._rank, group))

    def _peers(self, ranks: tuple[int, ...]) -> _GlooGroup:
        if ranks not in self._groups:
            self._groups[ranks] = self._make_group(ranks)
        return self._groups[ranks]

    def _make_group(self, ranks: tuple[int, ...]) -> _GlooGroup:
        beats = self._setup.rendezvous.store
        prefix = f"{self._setup.name}/group/" + ",".join(map(str, ranks))
        store = beats.prefixed(prefix)
        # Gloo would wait the whole time-out for a dead member, because there is no connection yet that could break.
        store.set(f"ready/{self._rank}", "")
        ready = {rank: f"ready/{rank}" for rank in ranks}
        await_ranks(store, beats, ready, self._setup.timeout_seconds, self._setup.failures.failed)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=self._setup.timeout_seconds)
        group_rank, torch_store = ranks.index(self._rank), TorchStore(store)
        return _GlooGroup(gloo(torch_store, group_rank, len(ranks), options), ranks, group_rank, torch_store)


def _open_device(address: str, port: int) -> dist.ProcessGroupGloo.Device:
    """Open Gloo's listening socket: on loopback if the ranks met there, otherwise on the interface of that route."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=local_address(address, port))


def _tensor(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on memory that the caller keeps alive."""
    if count == 0:  # torch refuses empty buffers
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count)


def _bytes_of(sizes: _Sizes, peers: _GlooGroup, unit: int, dtype: int) -> list[int]:
    """Return the bytes of each group rank's part, of so many units of elements."""
    return [size * unit * native.dtype_size(dtype) for size in sizes[: peers.size]]


def _current_envelope() -> torch.Tensor:
    """Return the envelope of this rank's current collective, as bytes."""
    return torch.frombuffer(bytearray(native.current_envelope()), dtype=torch.uint8)


def _check_envelopes(rows: torch.Tensor, ranks: Sequence[int]) -> None:
    """Raise where an envelope (a row for each of ``ranks``) is of a different collective than this rank's."""
    for row, rank in zip(rows, ranks, strict=True):
        if not native.check_envelope(row.contiguous().numpy().tobytes(), rank):
            raise ValueError(f"rank {rank} is in a different collective")


def _as_gloo(dtype: int, reduce_op: int) -> tuple[torch.dtype, int]:
    """Map a dtype and a reduction to those of Gloo, which does not reduce bools: on bytes, or is max, and is min."""
    if dtype == _BOOL:
        return torch.uint8, _MAX if reduce_op in (_SUM, _MAX) else _MIN
    return _DTYPES[dtype], reduce_op


def _divide(sums: torch.Tensor, ranks: int) -> None:
    """Turn sums into means in place; those of integers are rounded towards zero."""
    sums.div_(ranks, rounding_mode=None if sums.dtype.is_floating_point else "trunc")


def _reduce(rows: torch.Tensor, result: torch.Tensor, reduce_op: int) -> None:
    """Reduce over the first dim. torch accumulates half-precision types in float32."""
    if reduce_op == _SUM:
        torch.sum(rows, 0, dtype=rows.dtype, out=result)
    elif reduce_op == _MEAN and rows.dtype.itemsize == 2:
        result.copy_(torch.sum(rows, 0, dtype=torch.float32).div_(rows.shape[0]))
    elif reduce_op == _MEAN:
        torch.sum(rows, 0, dtype=rows.dtype, out=result)
        _divide(result, rows.shape[0])
    elif reduce_op == _MAX:
        torch.amax(rows, 0, out=result)
    elif reduce_op == _MIN:
        torch.amin(rows, 0, out=result)
    else:
        torch.prod(rows, 0, dtype=rows.dtype, out=result)
