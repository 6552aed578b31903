"""Loaded partitions: one rank's part of the programs of artifacts, which share its memory, ready to be called."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hidet_dist import native
from hidet_dist.artifacts.manifest import (
    ProgramManifest,
    StageManifest,
    StateSignature,
    chosen_program,
)
from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ArtifactError, CommunicationError, ConfigError
from hidet_dist.native.installed import installed
from hidet_dist.runtime import session
from hidet_dist.runtime.agreement import Agreement, Purpose, describe
from hidet_dist.runtime.calls import Calls, numbered
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.device import RankPart
from hidet_dist.runtime.loaded_program import LoadedProgram
from hidet_dist.runtime.parts import LoadedParts
from hidet_dist.runtime.process import resident_bytes
from hidet_dist.runtime.profile import Profile
from hidet_dist.runtime.targets import device_kind
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.pipeline import Pipeline

if TYPE_CHECKING:
    from hidet_dist.runtime.pipeline.program import PipelinedProgram


class LoadedPartition:
    """One rank's part of the programs of an artifact folder.

    The programs of a rank share its memory: each weight is loaded once, activations of all programs lie in one
    workspace, and messages between ranks use the same communicators. :meth:`program` returns a program by its name.
    Artifacts of one graph have one program; then the partition itself can be called with the rank's shards of the graph
    inputs, and has the methods of that program.

    All ranks must make their calls in the same order. Each rank numbers its calls. A call that another rank did not
    make, or that failed there, returns a result on no rank. Nothing detects that ranks make the same call for different
    requests, if the inputs have the same shapes.

    * A partition of one rank, or one that communicates nothing, may be called from several threads. Its calls run one
      after the other. So do the calls of all partitions with symbolic dims, or with unequal parts, in a process,
      because hidet's runtime has one table of sizes.
    * A partition that communicates is called from one thread: the one that loaded it, or the one that called
      :meth:`attach` last. Calls from other threads are refused, because threads take turns in a different order on each
      rank.

    :meth:`close` may be called from any thread; it waits for a running call.

    A partition belongs to the process that loaded it. In a child made by ``fork`` it is closed: calling it raises
    ``ForkError``, closing it does nothing, and the ranks do not notice the child's end. The child may load another
    partition.

    Parameters
    ----------
    folder: Path
        The artifact folder.
    rank: int, optional
        The rank that this process is required to have; the session's or the environment's by default.
    timeout_seconds: float, optional
        How long a collective waits for the other ranks; the session's by default.
    opened: OpenedArtifacts, optional
        The folder, where it was opened ahead, to verify its files meanwhile. The partition closes it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int | None = None,
        timeout_seconds: float | None = None,
        opened: OpenedArtifacts | None = None,
    ):
        resident = resident_bytes()
        loaded: LoadedParts | None = None
        try:
            with (
                session.loading(lambda: self.manifest.identity, timeout_seconds),
                _open(folder, rank, timeout_seconds, opened) as artifacts,
            ):
                self.manifest = artifacts.manifest
                settings = session.current()
                self.rank = settings.rank if settings is not None else (rank or 0)
                self.world_size = self.manifest.world_size
                self._loaded = loaded = LoadedParts(artifacts, self.rank)
            self._states, self._memory = loaded.states, loaded.device.memory
            self._communicators = self._communicate(rank, timeout_seconds)
            for communicator in self._communicators:
                communicator.rely_on(self._memory.files)
            self._stage_communicator, self._communicator = self._communicators[0], self._communicators[-1]
            self._pipelined = list(map(self._part_of_pipeline, self.manifest.programs, loaded.parts))
            self._calls = Calls(self._communicator, self._agreement(), loaded.sizes_lock(), self._ready)
            ranks, ends = (self.rank, self.world_size), (self._stage_communicator, self._communicator)
            self._programs = {
                program.name: LoadedProgram(
                    program.name,
                    number,
                    part.stage,
                    loaded.stage_number,
                    ranks,
                    part.program,
                    pipelined,
                    self._calls,
                    ends,
                    resident,
                    self._states,
                )
                for number, (program, part, pipelined) in enumerate(
                    zip(self.manifest.programs, loaded.parts, self._pipelined, strict=True)
                )
            }
            self._prepare_device()
        except BaseException:
            if loaded is not None:
                loaded.close()
            raise

    @property
    def _pipelines(self) -> list[Pipeline]:
        return [program.pipeline for program in self.manifest.programs if program.pipeline is not None]

    def _agreement(self) -> Agreement | None:
        """Make the exchange before each call; None if no program communicates."""
        # A call that one rank refuses must leave the states of all ranks as they are.
        communicates = any(
            part.stage.size > 1 and (part.stage.communications or part.stage.states) for part in self._loaded.parts
        )
        if not communicates and not (self._pipelines and self.world_size > 1):
            return None
        symbols = dict.fromkeys(symbol.name for part in self._loaded.parts for symbol in part.stage.symbols)
        names = [program.name for program in self.manifest.programs]
        return Agreement(self._communicator, self._memory, list(symbols), names)

    def _communicate(self, rank: int | None, timeout_seconds: float | None) -> list[Communicator]:
        """Make this rank's communicators, which all programs use: its stage's first, then those of all ranks.

        Pipelines have communicators of all ranks; the last one is for calls.
        """
        target, device = self.manifest.target, self._loaded.device.number

        def make(mesh_shape: tuple[int, ...], first: int, stream: int | None = None) -> Communicator:
            return session.communicator_for(mesh_shape, rank, timeout_seconds, target, device, first, stream)

        count = max((1 + one.exchanges_results for one in self._pipelines), default=0)
        # The communicators of all ranks are made first, because all ranks must make them in the same order.
        of_all_ranks = [make((self.world_size,), 0, self._memory.new_stream()) for _ in range(count)]
        own = make(self._loaded.parts[0].stage.mesh_shape, self._loaded.ranks.start)
        with self._memory.active():
            for communicator in of_all_ranks:
                communicator.warm_up(())  # not all ranks have messages at the same program points
        return [own, *of_all_ranks]

    def _part_of_pipeline(self, program: ProgramManifest, own: RankPart) -> PipelinedProgram | None:
        """Make the rank's stage a part of the program's pipeline, if it is one."""
        if program.pipeline is None:
            return None
        from hidet_dist.runtime.pipeline.program import PipelinedProgram  # most programs are none of a pipeline

        of_stage, *of_all_ranks = self._communicators
        backward = of_all_ranks[0] if program.pipeline.exchanges_results else None
        return PipelinedProgram(program, self.rank, own.program, self._memory, of_all_ranks[-1], of_stage, backward)

    def _prepare_device(self) -> None:
        """Choose the fastest candidate of each kernel, where there are several; prepare a pipeline's device."""
        try:
            self._loaded.choose_candidates(self._stage_communicator, self._communicator.give_up)
            for pipelined in filter(None, self._pipelined):
                with self._memory.active(), self._states.aside(self._communicator.give_up):
                    pipelined.run_alone()
        except BaseException as error:
            # The other ranks may be waiting for this one.
            for communicator in {self._communicator, self._stage_communicator}:
                communicator.give_up(f"it failed before the first call: {describe(error)}")
            raise

    @property
    def device_bytes(self) -> int:
        """Bytes now allocated on a CUDA device for weights, workspace and staging; 0 on the CPU."""
        return self._loaded.device.allocated_bytes

    @property
    def programs(self) -> tuple[str, ...]:
        """The names of the programs."""
        return tuple(self._programs)

    def program(self, name: str | None = None) -> LoadedProgram:
        """Return the program of this name; without a name, the only program.

        Raises
        ------
        ConfigError
            When there is no program of this name, or several and no name; the message lists the names.
        """
        names = list(self._programs)
        return self._programs[names[chosen_program(names, name)]]

    @property
    def interface(self) -> Interface | None:
        """The :attr:`LoadedProgram.interface` of the only program."""
        return self.program().interface

    @property
    def stage(self) -> StageManifest:
        """The rank's stage of the only program."""
        return self.program().stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the only program once; see :meth:`LoadedProgram.__call__`."""
        return self.program()(*args, **kwargs)

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any] | None = None) -> list[Any]:
        """Run the only program once, on the rank's shards of the inputs; see :meth:`LoadedProgram.run`."""
        return self.program().run(inputs, outputs)

    def run_agreed(self, inputs: Sequence[Any], outputs: Sequence[Any] | None = None) -> list[Any]:
        """Run the only program once, as the ranks have agreed to; see :meth:`LoadedProgram.run_agreed`."""
        return self.program().run_agreed(inputs, outputs)

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Run the only program on one batch after another; see :meth:`LoadedProgram.stream`."""
        return self.program().stream(batches)

    def warm_up(self, sizes: Mapping[str, int] | None = None) -> None:
        """Run the only program once on zeros; see :meth:`LoadedProgram.warm_up`."""
        self.program().warm_up(sizes)

    def profile(self, *args: Any, outputs: Sequence[Any] | None = None, repeats: int = 1, **kwargs: Any) -> Profile:
        """Run the only program, and return the time of each operator; see :meth:`LoadedProgram.profile`."""
        return self.program().profile(*args, outputs=outputs, repeats=repeats, **kwargs)

    @property
    def states(self) -> Mapping[str, StateSignature]:
        """The states that calls read and write, by name: their dtypes, and the shapes of the rank's shards.

        Programs have the states of one name in common.
        """
        return self._states.signatures

    @numbered
    def reset(self, number: int) -> None:
        """Give all states the values before the first call: zeros, or those of the model's buffers.

        All ranks call it together, like any call.

        Raises
        ------
        CallError, CommunicationError, HidetDistError
            As :meth:`LoadedProgram.run`.
        """
        self._calls.make(number, Purpose.RESET, lambda: (None, {}), lambda _: self._states.reset())

    def save_states(self) -> dict[str, Any]:
        """Copy the rank's shards of all states: NumPy arrays by name, or torch tensors of dtypes that NumPy lacks.

        Raises
        ------
        DeviceError, HidetDistError
            When the device fails; when the partition is closed, or may not be used from this thread.
        """
        return self._calls.look(self._states.save)

    @numbered
    def load_states(self, number: int, values: Mapping[str, Any]) -> None:
        """Give states other values, such as those of :meth:`save_states`. All ranks call it together, like any call.

        Parameters
        ----------
        values: mapping of names to tensors
            The rank's shards, in host memory or on the rank's device. States that it lacks stay as they are.

        Raises
        ------
        InputError
            When there is no such state, or a dtype or shape differs. No state has changed then, on any rank.
        CallError, CommunicationError, HidetDistError
            As :meth:`LoadedProgram.run`.
        """
        self._calls.make(number, Purpose.LOAD, lambda: (self._states.checked(values), {}), self._states.load)

    def attach(self) -> None:
        """Make the calling thread the one that may call the partition, if it communicates. Waits for a running call."""
        self._calls.attach()

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Make the device current, and check before and after that the weights are unchanged."""
        with self._memory.active(), self._checking_weights():
            yield

    @contextmanager
    def _checking_weights(self) -> Iterator[None]:
        """Check the weights before and after the block, so that no result computed from changed weights is returned."""
        self._check_weights()
        try:
            yield
        except CommunicationError:
            self._check_weights()  # changed weights are the cause then, and named as such
            raise
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise ArtifactError if the weights were changed, after the other ranks have been notified."""
        try:
            self._memory.check()
        except ArtifactError as error:
            self._communicator.give_up(str(error))
            raise

    def close(self) -> None:
        """Leave the other ranks and free the weights, after a running call has ended.

        Closing twice does nothing, and neither does closing in a forked child of the process that loaded the partition.

        Raises
        ------
        HidetDistError
            When this thread is in a call, as a signal handler may be.
        """
        with self._calls.closing() as was_open:
            if was_open:
                for pipelined in filter(None, self._pipelined):
                    pipelined.leave()
                native.bind(None)
                for communicator in self._communicators:
                    communicator.close()
                self._loaded.close()

    def __enter__(self) -> LoadedPartition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_partition(
    out_dir: str | Path, rank: int | None = None, timeout_seconds: float | None = None
) -> LoadedPartition:
    """Load one rank's part of the programs of artifacts, and meet the other ranks.

    Every byte that is loaded is first checked against the manifest's SHA-256. Weights are mapped, not copied: processes
    of a host share the pages of a file, and a build replaces artifacts without touching files in use.

    Parameters
    ----------
    out_dir: str or Path
        The folder that ``auto_parallel`` or ``build_family`` wrote.
    rank: int, optional
        The rank to load; RANK of the environment (as torchrun sets it) by default.
    timeout_seconds: float, optional
        How long to wait for the other ranks, now and in each collective; by default the session's, which is 60 s unless
        ``init`` set it.

    Raises
    ------
    ArtifactError
        When the artifacts are missing, incomplete, altered, or of another version.
    ConfigError
        When the rank or the world size does not fit the artifacts.
    RendezvousError
        When other ranks do not come; the message names them.
    """
    if not isinstance(out_dir, str | Path):
        raise ArtifactError(f"load_partition takes the path of a folder with artifacts; got {shown(out_dir)}.")
    return LoadedPartition(Path(out_dir), rank, timeout_seconds)


def _open(
    folder: Path, rank: int | None, timeout_seconds: float | None, opened: OpenedArtifacts | None
) -> OpenedArtifacts:
    """Open and verify artifacts that this process can load. Starts again where they are replaced meanwhile."""
    while True:
        artifacts, opened = opened or OpenedArtifacts(folder), None
        try:
            manifest = artifacts.manifest
            if manifest.abi_version != native.ABI_VERSION:
                raise ArtifactError(
                    f"{folder} was built for the native interface {manifest.abi_version} (abi_version); this is "
                    f"{native.ABI_VERSION}. Build the artifacts again."
                )
            version = found[1] if (found := installed("hidet")) is not None else "none"
            if manifest.hidet_version != version:
                raise ArtifactError(
                    f"{folder} was built with hidet {manifest.hidet_version} (hidet_version), not {version}. Build "
                    "the artifacts again."
                )
            device_kind(manifest.target).check()  # before the ranks meet
            entered = _enter_session(rank, manifest.world_size, timeout_seconds, folder)
            artifacts.verify(manifest.files_of(entered))
        except ArtifactError:
            replaced = not artifacts.is_current()
            artifacts.close()
            if not replaced or not folder.exists():
                raise
        except BaseException:
            artifacts.close()
            raise
        else:
            return artifacts


def _enter_session(rank: int | None, world_size: int, timeout_seconds: float | None, folder: Path) -> int:
    """Open a session if there is none, meet the other ranks, and return this rank. Raises ConfigError for a misfit."""
    if rank is not None and not (is_whole(rank) and 0 <= rank < world_size):
        raise ConfigError(f"{folder} has the ranks 0 to {world_size - 1}; there is no rank {shown(rank)}.")
    if session.current() is None:
        timeout = session.DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        if rank is not None and "RANK" not in os.environ:
            session.init(rank=rank, world_size=world_size, timeout_seconds=timeout)
        else:
            session.init(timeout_seconds=timeout)
    settings = session.current()
    assert settings is not None
    if settings.world_size != world_size:
        raise ConfigError(
            f"{folder} was built for {world_size} ranks, but the world size is {settings.world_size}: launch it with "
            f"`python -m hidet_dist.launch -n {world_size}` or torchrun."
        )
    session.meet()  # so that an error in this rank's files is reported to the others
    return settings.rank
