"""The transport of CUDA ranks: the native library's collectives, carried out by NVIDIA's NCCL.

NCCL and the CUDA driver are loaded when a transport is made, and by nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hidet_dist.errors import ConfigError
from hidet_dist.runtime import native
from hidet_dist.runtime.libraries import hidet_runtime
from hidet_dist.runtime.liveness import SilenceWatch, read_beats
from hidet_dist.runtime.meeting import PeerError, await_ranks
from hidet_dist.runtime.rendezvous import Rendezvous

LIBRARY_VARIABLE = "HIDET_DIST_NCCL_LIBRARY"
"""The environment variable with the path of libnccl.so.2; by default it is that of the package nvidia-nccl-cu12."""

DRIVER_VARIABLE = "HIDET_DIST_CUDA_DRIVER"
"""The environment variable with the path of the CUDA driver's libcuda.so.1; by default the system is to find it."""

_INSTALL = "pip install 'nvidia-nccl-cu12>=2.30'"
_SHARED_DEVICE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARED_DEVICE_VERSION = 23000  # the first that takes several ranks on one device
_POLL_SECONDS = 0.001
_SLICE_SECONDS = 1.0  # how often a rank that waits looks for dead ones


def find_library(environment: Mapping[str, str] | None = None) -> str:
    """The path of NCCL's library. Raises ``ConfigError`` where there is none, with what to install."""
    given = (os.environ if environment is None else environment).get(LIBRARY_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE} is {given!r}, which is not a file")
        return given
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    for folder in () if package is None else package.submodule_search_locations or ():
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.is_file():
            return str(path)
    raise ConfigError(f"ranks on CUDA devices need NCCL: {_INSTALL}, or set {LIBRARY_VARIABLE} to libnccl.so.2")


@functools.cache
def load() -> int:
    """Load NCCL and the CUDA driver, once a process. Returns NCCL's version, such as 23203 for 2.32.3.

    Raises ``ConfigError`` where one is missing or too old, with what to install.
    """
    path = find_library()
    try:
        return native.load_nccl(path, os.environ.get(DRIVER_VARIABLE, "libcuda.so.1"))
    except ValueError as error:
        hint = (
            "is a CUDA driver installed?"
            if "libcuda" in str(error)
            else f"{_INSTALL}, or set {LIBRARY_VARIABLE} to another libnccl.so.2"
        )
        raise ConfigError(f"NCCL cannot be used: {error} ({hint})") from None


def default_device(rank: int) -> int:
    """The CUDA device of a rank that is not told one: torchrun's LOCAL_RANK, or the rank, modulo their number.

    Raises ``ConfigError`` where there is none.
    """
    load()
    devices = native.cuda_device_count()
    if devices < 1:
        raise ConfigError("there is no CUDA device")
    return int(os.environ.get("LOCAL_RANK") or rank) % devices


def hidet_stream_function() -> int:
    """The address of the C function that returns the CUDA stream which hidet's kernels are launched on."""
    address = ctypes.cast(hidet_runtime().get_cuda_stream, ctypes.c_void_p).value
    assert address is not None
    return address


class NcclTransport:
    """Carries out a communicator's collectives between processes with a CUDA device each, on hidet's current stream.

    A collective returns when it is on the stream; ``wait`` tells when it is over, and finds failures. One thread at a
    time may use it, on which its communicator is bound. NCCL's communicators are made by ``warm_up``, or when a group
    is first used, which all ranks of the mesh must then do at the same point of their programs.

    Parameters
    ----------
    rendezvous: Rendezvous
        The ranks, met.
    name: str
        The communicator's, the same on all ranks and on no other communicator.
    mesh_shape: tuple[int, ...]
        The mesh of all ranks.
    timeout_seconds: float
        How long ``wait``, and the making of a communicator of NCCL's, wait for the other ranks.
    fail: Callable[[str], None]
        Records why a collective failed.
    failed: Callable[[], bool]
        Whether the communicator has failed meanwhile, for another reason.
    device: int | None
        The CUDA device's number in this process; ``default_device`` where it is not given.
    stream: int | None
        The address of a C function that returns the CUDA stream which the calling thread launches kernels on; hidet's
        where it is not given.

    Raises
    ------
    ConfigError
        Where NCCL or the CUDA driver is missing or too old, or there is no such device.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        mesh_shape: tuple[int, ...],
        timeout_seconds: float,
        fail: Callable[[str], None],
        failed: Callable[[], bool],
        device: int | None = None,
        stream: int | None = None,
    ):
        self._version = load()
        self._rank = rendezvous.settings.rank
        self._ranks = tuple(range(rendezvous.settings.world_size))
        self.device = default_device(self._rank) if device is None else device
        if stream is None:
            stream = hidet_stream_function()
        try:
            self._nccl = native.Nccl(
                mesh_shape, self._rank, self.device, stream, self._guarded(self._make), timeout_seconds
            )
        except ValueError as error:
            raise ConfigError(f"rank {self._rank} cannot use CUDA device {self.device}: {error}") from None
        self.interrupt: BaseException | None = None
        self._peer_is_gone = False
        self._whole = (1 << len(mesh_shape)) - 1
        self._rendezvous = rendezvous
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._fail = fail
        self._failed = failed

    @property
    def table(self) -> native.Transport:
        """What the native library calls."""
        return self._nccl.table

    @property
    def overlap(self) -> native.Overlap:
        """How it carries collectives out beside computation."""
        return self._nccl.overlap

    @property
    def failed_by_peer(self) -> bool:
        """Whether a collective failed because of another rank."""
        return self._peer_is_gone or self._nccl.failed_by_peer

    @property
    def shared_groups(self) -> list[tuple[int, ...]]:
        """The groups whose collectives go through shared memory of the host: none."""
        return []

    @property
    def shared_peers(self) -> list[int]:
        """The ranks that messages are exchanged with through shared memory of the host: none."""
        return []

    def warm_up(self, groups: Iterable[int]) -> None:
        """Make NCCL's communicators for the mesh and these groups, given as masks of mesh axes, and use each once.

        All ranks must do so with the same groups. Collectives over them can be captured into a CUDA graph after that. A
        failure is recorded, as that of a collective is; where ranks share a device and NCCL is not told so, the
        communicator's ``check`` raises ``ConfigError``.
        """

        def run() -> None:
            for group in sorted({*groups, self._whole}):
                if self._failed():
                    return
                if native.group_place(group) >= 0 and self._nccl.spans(group):
                    self._make(group)
                    self._nccl.warm_up(group)
                    self._wait(self._nccl.own_stream)

        if self._guarded(run)() != native.OK:
            self._nccl.close()

    def wait(self, stream: int | None = None) -> None:
        """Wait until all work on a CUDA stream is over, by default on the current one. It must not be captured.

        Records a failure, and aborts NCCL's communicators: when NCCL reports an error, a rank dies, the communicator
        has failed, or the time-out has passed.
        """
        handle = self._nccl.current_stream() if stream is None else stream
        self._guarded(lambda: self._wait(handle))()

    def close(self) -> None:
        """Free NCCL's communicators, or abort them after a failure."""
        self._nccl.close()

    def destroy(self) -> None:
        """Free it, once its communicator has been destroyed."""
        self._nccl.destroy()

    def _guarded(self, run: Callable[..., None]) -> Callable[..., int]:
        """Records what it raises, as native code may be waiting for the answer; check() raises what is no failure."""

        def guarded(*arguments: int) -> int:
            try:
                run(*arguments)
            except RuntimeError as error:
                self._peer_is_gone = True
                self._fail(str(error))
            except BaseException as error:
                if isinstance(error, ConfigError) or not isinstance(error, Exception):
                    self.interrupt = error
                self._fail(f"{type(error).__name__}: {error}")
            return native.FAILED if self._failed() else native.OK

        return guarded

    def _wait(self, stream: int) -> None:
        watch: SilenceWatch | None = None
        others = tuple(rank for rank in self._ranks if rank != self._rank)
        store = self._rendezvous.store
        while self._nccl.wait(stream, _SLICE_SECONDS) == native.IN_PROGRESS:
            if watch is None:
                watch = SilenceWatch(store, others)
            gone = watch.gone(others)
            # One that has left has done its part.
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
        own = {"device": native.cuda_device_uuid(self.device)}
        if self._rank == 0:
            own["id"] = native.nccl_unique_id().hex()
        said = [json.loads(text) for text in self._meet("mesh", json.dumps(own))]
        self._check_devices([each["device"] for each in said])
        self._nccl.begin(self._whole, bytes.fromhex(said[0]["id"]))
        self._await_made()

    def _check_devices(self, devices: list[str]) -> None:
        """Refuse what NCCL would refuse, with what to do."""
        sharing = [rank for rank, device in enumerate(devices) if devices.count(device) > 1]
        if not sharing:
            return
        if self._version < _SHARED_DEVICE_VERSION:
            raise ConfigError(f"ranks {_join(sharing)} share CUDA devices, which takes NCCL 2.30 or later: {_INSTALL}")
        if os.environ.get(_SHARED_DEVICE_VARIABLE) != "1":
            raise ConfigError(
                f"ranks {_join(sharing)} share CUDA devices, which NCCL takes only with {_SHARED_DEVICE_VARIABLE}=1 in "
                "the environment: set it, or run one rank on each device"
            )

    def _meet(self, what: str, own: str) -> list[bytes]:
        """What each rank says, once all have said something: NCCL would wait long for one that is dead."""
        self._nccl.await_all()
        store = self._rendezvous.store.prefixed(f"{self._name}/nccl/{what}")
        store.set(str(self._rank), own)
        keys = {rank: str(rank) for rank in self._ranks}
        await_ranks(store, self._rendezvous.store, keys, self._timeout_seconds, self._failed)
        return [store.get(key) for key in keys.values()]

    def _await_made(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        watch: SilenceWatch | None = None
        next_look = time.monotonic() + _SLICE_SECONDS
        while self._nccl.progress() == native.IN_PROGRESS:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if self._failed():
                return
            if now > deadline:
                raise PeerError(f"timed out after {self._timeout_seconds:g} s, making a communicator of NCCL's")
            if now > next_look:
                next_look = now + _SLICE_SECONDS
                watch = watch or SilenceWatch(self._rendezvous.store, self._ranks)
                gone = watch.gone(self._ranks)
                if gone:
                    raise PeerError(f"rank {_join(list(gone))} is gone")


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
