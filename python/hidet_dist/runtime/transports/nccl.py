"""The transport of CUDA ranks: the native library's collectives, implemented by NVIDIA's NCCL."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json
from hidet_dist.runtime.cuda import nccl
from hidet_dist.runtime.liveness import ActiveTime, SilenceWatch, read_beats
from hidet_dist.runtime.meeting import PeerError, await_ranks
from hidet_dist.runtime.transports.base import Setup

_SHARED_DEVICE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARED_DEVICE_VERSION = 23000  # the first version that accepts several ranks on one device
_POLL_SECONDS = 0.001
_SLICE_SECONDS = 1.0  # the interval at which a waiting rank looks for dead ones


class NcclTransport:
    """The implementation of collectives by NCCL between processes with a CUDA device each.

    A collective returns when it is enqueued on the stream; ``wait`` waits for its end, and detects failures. One thread
    at a time may use it: the one that its communicator is bound to. NCCL's communicators are made by ``warm_up``, or
    when a group is first used. In the latter case all ranks of the mesh must use it at the same program point.

    Parameters
    ----------
    setup: Setup
        The common arguments of transports.
    device: int | None
        The CUDA device's number in this process; ``nccl.default_device`` by default.
    stream: int | None
        The CUDA stream of its collectives; by default hidet's current stream when each is called.

    Raises
    ------
    ConfigError
        Where NCCL or the CUDA driver is missing or too old, or there is no such device.
    """

    def __init__(self, setup: Setup, device: int | None = None, stream: int | None = None):
        self._version = nccl.load()
        self._setup = setup
        self._rank = setup.rendezvous.settings.rank
        self._ranks = tuple(range(setup.rendezvous.settings.world_size))
        self.device = nccl.default_device(self._rank) if device is None else device
        function = nccl.hidet_stream_function() if stream is None else lambda: stream
        try:
            self._nccl = native.Nccl(
                setup.mesh_shape,
                self._rank,
                self.device,
                function,
                self._recorded(self._make),
                self._recorded(self._settle),
                setup.timeout_seconds,
            )
        except ValueError as error:
            raise ConfigError(f"rank {self._rank} cannot use CUDA device {self.device}: {error}") from None
        self.shared_groups: tuple[tuple[int, ...], ...] = ()
        self.shared_peers: tuple[int, ...] = ()
        self._whole = (1 << len(setup.mesh_shape)) - 1

    @property
    def table(self) -> native.TransportTable:
        """The functions that the native library calls."""
        return self._nccl.table

    @property
    def overlap(self) -> native.Overlap:
        """The functions that overlap collectives with computation."""
        return self._nccl.overlap

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""
        return self._setup.failures.by_peer or self._nccl.failed_by_peer

    def warm_up(self, groups: Iterable[int]) -> None:
        """Make NCCL's communicators for the mesh and these groups, given as masks of mesh axes, and use each once.

        All ranks must call this with the same groups. Afterwards, collectives over them can be captured into a CUDA
        graph. A failure is recorded like that of a collective. Where ranks share a device and NCCL's environment
        variable does not allow it, the communicator's ``check`` raises ``ConfigError``.
        """

        def run() -> None:
            for group in sorted({*groups, self._whole}):
                if self._setup.failures.failed():
                    return
                if native.group_rank(group) >= 0 and self._nccl.spans(group):
                    self._make(group)
                    self._nccl.warm_up(group)
                    self._wait(functools.partial(self._nccl.wait, self._nccl.internal_stream))

        if self._recorded(run)() != native.OK:
            self._nccl.close()

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Make all messages of the block one operation of NCCL, which is enqueued at its end. Failures are recorded."""
        begun = self._nccl.group_begin() == native.OK
        try:
            yield
        finally:
            if begun:
                self._nccl.group_end()

    def wait(self, stream: int | None = None) -> None:
        """Wait for all work on a CUDA stream, by default the current one. The stream must not be in capture.

        Records a failure, and aborts NCCL's communicators, when NCCL reports an error, a rank dies, the communicator
        has failed, or the time-out has passed.
        """
        self._recorded(self._settle)(stream)

    def wait_event(self, event: int) -> None:
        """Wait for the work before a CUDA event, as :meth:`wait` does for a stream's."""
        self._recorded(lambda: self._wait(functools.partial(self._nccl.wait_event, event)))()

    def close(self) -> None:
        """Free NCCL's communicators, or abort them after a failure."""
        self._nccl.close()

    def destroy(self) -> None:
        """Free native resources, after the communicator has been destroyed."""
        self._nccl.destroy()

    def _recorded(self, run: Callable[..., None]) -> Callable[..., int]:
        """Wrap a function for native code: errors are recorded, and a status code is returned."""

        def recorded(*arguments: int | None) -> int:
            self._setup.failures.record(lambda: run(*arguments), raised_as_is=ConfigError)
            return native.FAILED if self._setup.failures.failed() else native.OK

        return recorded

    def _settle(self, stream: int | None = None) -> None:
        handle = self._nccl.current_stream() if stream is None else stream
        self._wait(functools.partial(self._nccl.wait, handle))

    def _wait(self, wait: Callable[[float], int]) -> None:
        """Wait by a function that does so for some seconds and returns a status code; look for dead ranks between."""
        watch: SilenceWatch | None = None
        others = tuple(rank for rank in self._ranks if rank != self._rank)
        store = self._setup.rendezvous.store
        while wait(_SLICE_SECONDS) == native.IN_PROGRESS:
            if watch is None:
                watch = SilenceWatch(store, others)
            gone = watch.gone(others)
            # A rank that has left in good order has taken part in the collective.
            dead = [rank for rank, beat in read_beats(store, gone).items() if not beat.left]
            if dead:
                raise PeerError(f"rank {', '.join(map(str, dead))} is gone")

    def _make(self, group: int) -> None:
        if not self._nccl.has(self._whole):
            self._make_whole()
        if not self._nccl.has(group):
            self._meet(f"group{group}", "")
            self._nccl.begin(group, None)
            self._await_made()

    def _make_whole(self) -> None:
        identity = {"device": native.cuda_device_uuid(self.device)}
        if self._rank == 0:
            identity["id"] = native.nccl_unique_id().hex()
        identities = [parse_json(text) for text in self._meet("mesh", json.dumps(identity))]
        self._check_devices([each["device"] for each in identities])
        self._nccl.begin(self._whole, bytes.fromhex(identities[0]["id"]))
        self._await_made()

    def _check_devices(self, devices: list[str]) -> None:
        """Raise ConfigError where ranks share devices in a way that NCCL would refuse without saying what to do."""
        sharing = [rank for rank, device in enumerate(devices) if devices.count(device) > 1]
        if not sharing:
            return
        if self._version < _SHARED_DEVICE_VERSION:
            raise ConfigError(
                f"ranks {_join(sharing)} share CUDA devices, which needs NCCL 2.30 or later: {nccl.INSTALL}"
            )
        if os.environ.get(_SHARED_DEVICE_VARIABLE) != "1":
            raise ConfigError(
                f"ranks {_join(sharing)} share CUDA devices, which NCCL allows only with {_SHARED_DEVICE_VARIABLE}=1 "
                "in the environment: set it, or run one rank on each device"
            )

    def _meet(self, key: str, text: str) -> list[bytes]:
        """Exchange a text with every rank, so that dead ranks are detected, for which NCCL alone would wait long."""
        self._nccl.await_all()
        store = self._setup.rendezvous.store.prefixed(f"{self._setup.name}/nccl/{key}")
        store.set(str(self._rank), text)
        keys = {rank: str(rank) for rank in self._ranks}
        await_ranks(store, self._setup.rendezvous.store, keys, self._setup.timeout_seconds, self._setup.failures.failed)
        return [store.get(key) for key in keys.values()]

    def _await_made(self) -> None:
        active = ActiveTime()
        watch: SilenceWatch | None = None
        next_look = _SLICE_SECONDS
        while self._nccl.progress() == native.IN_PROGRESS:
            time.sleep(_POLL_SECONDS)
            now = active.seconds()
            if self._setup.failures.failed():
                return
            if now > self._setup.timeout_seconds:
                raise PeerError(f"timed out after {self._setup.timeout_seconds:g} s, making an NCCL communicator")
            if now > next_look:
                next_look = now + _SLICE_SECONDS
                watch = watch or SilenceWatch(self._setup.rendezvous.store, self._ranks)
                gone = watch.gone(self._ranks)
                if gone:
                    raise PeerError(f"rank {_join(list(gone))} is gone")


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
