"""Loaded partitions: one rank's part of a program, loaded from artifacts and ready to be called."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hidet_dist.artifacts.coherence import check_description
from hidet_dist.artifacts.manifest import COORDINATE, Manifest
from hidet_dist.artifacts.opened import OpenedArtifacts
from hidet_dist.checks import shown
from hidet_dist.errors import ArtifactError, CommunicationError, ConfigError, InputError
from hidet_dist.runtime import native, session
from hidet_dist.runtime.agreement import Agreement, Purpose, describe
from hidet_dist.runtime.calls import Calls, numbered
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.device import Device, HostDevice
from hidet_dist.runtime.launcher import Launcher
from hidet_dist.runtime.libraries import Libraries, hidet_runtime, load_needed
from hidet_dist.runtime.pipeline.program import Interval, PipelinedProgram
from hidet_dist.runtime.pipeline.stream import Stream
from hidet_dist.runtime.processor import check_features
from hidet_dist.runtime.profile import OperatorTime, PipelineStep, Profile
from hidet_dist.runtime.program import Program
from hidet_dist.runtime.stored import check_coordinate, places_in
from hidet_dist.runtime.targets import device_kind
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.weights.header import Layout

_sizes_lock = threading.Lock()  # hidet's runtime has one table of symbolic dims' sizes
_NANOSECONDS = 1e9  # per second


def _forked() -> None:
    """Make a new lock in a forked child: the thread that holds the old one may not exist there."""
    global _sizes_lock  # noqa: PLW0603
    _sizes_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class LoadedPartition:
    """One rank's part of a program. Call it with the rank's shards of the graph inputs.

    All ranks must make their calls in the same order. Each rank numbers its calls. A call that another rank did not
    make, or that failed there, returns a result on no rank. Nothing detects that ranks make the same call for different
    requests, if the inputs have the same shapes.

    * A partition of one rank, or one that communicates nothing, may be called from several threads. Its calls run one
      after the other. So do the calls of all partitions with symbolic dims, or on meshes with shares, in a process,
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
    """

    def __init__(self, folder: Path, rank: int | None, timeout_seconds: float | None):
        self._device: Device = HostDevice()
        self._launcher: Launcher | None = None
        self._libraries = Libraries()
        try:
            with session.loading(lambda: self.manifest.identity, timeout_seconds):
                with _open(folder, rank, timeout_seconds) as artifacts:
                    self.manifest = artifacts.manifest
                    settings = session.current()
                    self.rank = settings.rank if settings is not None else (rank or 0)
                    self.world_size = self.manifest.world_size
                    self._stage_number = self.manifest.stage_of(self.rank)
                    self._ranks = self.manifest.ranks_of(self._stage_number)  # those of the stage
                    self.stage = self.manifest.stages[self._stage_number].at(self._group_rank)
                    self._shares = self.stage.shares_of(self._group_rank)
                    self._launcher = launcher = self._load(artifacts)
                memory = self._device.memory
                with self._sizes_lock():
                    self._program = Program(self.stage, launcher, memory, self._runtime, self._shares)
            self._communicators = self._communicate(rank, timeout_seconds)
            for communicator in self._communicators:
                communicator.rely_on(memory.files)
            self._stage_communicator, self._communicator = self._communicators[0], self._communicators[-1]
            pipeline = self.manifest.pipeline
            self._pipelined = None if pipeline is None else self._part_of_pipeline(pipeline)
            communicates = self.stage.size > 1 and bool(self.stage.communications)
            communicates |= pipeline is not None and self.world_size > 1
            symbols = [symbol.name for symbol in self.stage.symbols]
            agreement = Agreement(self._communicator, memory, symbols) if communicates else None
            self._calls = Calls(self._communicator, agreement, self._sizes_lock(), self._ready)
            self._prepare_device(launcher, folder)
        except BaseException:
            self._free()
            raise

    def _communicate(self, rank: int | None, timeout_seconds: float | None) -> list[Communicator]:
        """Make this rank's communicators: its stage's first, then a pipeline's of all ranks, the one for calls last."""
        target, device = self.manifest.target, self._device.number

        def make(mesh_shape: tuple[int, ...], first: int, stream: int | None = None) -> Communicator:
            return session.communicator_for(mesh_shape, rank, timeout_seconds, target, device, first, stream)

        pipeline = self.manifest.pipeline
        count = 0 if pipeline is None else 1 + PipelinedProgram.exchanges_results(pipeline)
        # The communicators of all ranks are made first, because all ranks must make them in the same order.
        memory = self._device.memory
        of_all_ranks = [make((self.world_size,), 0, memory.new_stream()) for _ in range(count)]
        own = make(self.stage.mesh_shape, self._ranks.start)
        with memory.active():
            for communicator in of_all_ranks:
                communicator.warm_up(())  # not all ranks have messages at the same program points
        return [own, *of_all_ranks]

    def _part_of_pipeline(self, pipeline: Pipeline) -> PipelinedProgram:
        of_stage, *of_all_ranks = self._communicators
        backward = of_all_ranks[0] if PipelinedProgram.exchanges_results(pipeline) else None
        memory = self._device.memory
        return PipelinedProgram(self.manifest, self.rank, self._program, memory, of_all_ranks[-1], of_stage, backward)

    def _prepare_device(self, launcher: Launcher, folder: Path) -> None:
        """Choose the fastest candidate of each kernel, where there are several; prepare a pipeline's device."""
        try:
            with self._sizes_lock():
                self._device.choose_candidates(
                    self.stage,
                    self._program,
                    launcher,
                    self._kernels,
                    self._stage_communicator,
                    folder.resolve(),
                    self._build,
                )
            if self._pipelined is not None:
                with self._device.memory.active():
                    self._pipelined.run_alone()
        except BaseException as error:
            # The other ranks may be waiting for this one.
            for communicator in {self._communicator, self._stage_communicator}:
                communicator.give_up(f"it failed before the first call: {describe(error)}")
            raise

    def _sizes_lock(self) -> AbstractContextManager[Any]:
        """Return the lock of hidet's table of sizes, if the program has symbolic extents."""
        return _sizes_lock if self.stage.symbols or self._shares else nullcontext()

    @property
    def _build(self) -> str:
        """The identity of this stage of this build."""
        identity = self.manifest.identity
        return identity if len(self.manifest.stages) == 1 else f"{identity}/{self.stage.folder}"

    @property
    def _group_rank(self) -> int:
        """This rank's number within its stage, from 0."""
        return self._ranks.index(self.rank)

    @property
    def device_bytes(self) -> int:
        """Bytes now allocated on a CUDA device for weights, workspace and staging; 0 on the CPU."""
        return self._device.allocated_bytes

    def _load(self, artifacts: OpenedArtifacts) -> Launcher:
        stage, folder = self.stage, artifacts.folder
        self._device = device_kind(self.manifest.target).open(self.manifest, stage, self.rank)
        check_features(self.manifest.arch, self.manifest.cpu_features)
        load_needed((), folder)  # the libraries that every launcher links against
        self._runtime = hidet_runtime()
        library, description = self._libraries.load_launcher(artifacts.take(stage.launcher_file))
        try:
            layouts = check_description(self.manifest, self._stage_number, description, self._shares)
        except ValueError as error:
            raise ArtifactError(f"{folder}: {error}. Build the artifacts again.") from error
        load_needed(stage.libraries, folder)
        kernels = map(artifacts.take, stage.kernel_files())
        self._kernels = self._libraries.load_kernels(kernels, stage.candidates)
        data = self._load_data(artifacts, layouts)
        launcher = self._device.launcher(library, self._kernels, [data[name] for name in stage.data], stage)
        if not stage.symbols and not self._shares and launcher.workspaces() != stage.workspace_bytes:
            raise ArtifactError(
                f"{folder}: stages[{self._stage_number}].workspace_bytes is {stage.workspace_bytes}, but the launcher "
                f"needs {launcher.workspaces()}. Build the artifacts again."
            )
        return launcher

    def _load_data(self, artifacts: OpenedArtifacts, layouts: Mapping[str, Layout]) -> dict[str, int]:
        """Load the stage's data and return its addresses by name."""
        stage = self.stage
        shared = set(stage.constants)
        files = {
            stage.weights_file(self._group_rank): {
                name: layout for name, layout in layouts.items() if name not in shared
            }
        }
        if shared:
            files[stage.constants_file] = {name: layouts[name] for name in stage.constants}
        addresses: dict[str, int] = {}
        for name, held in files.items():
            file = artifacts.take(name)
            places = places_in(file, held)
            if COORDINATE in places:
                check_coordinate(file, places[COORDINATE], stage.mesh.coordinate(self._group_rank))
            addresses.update(self._device.memory.load(file, places))
        return addresses

    @property
    def interface(self) -> Interface | None:
        """Names and nesting of the model's arguments and results; None for artifacts that were built of a bare graph.

        ``interface.flatten(*args, **kwargs)`` gives the inputs of :meth:`run`, ``interface.nest(outputs)`` the result.
        """
        return self.stage.interface

    @numbered
    def __call__(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run once, with the model's arguments by position or by keyword, nested as the model takes them.

        The result is nested as the model's; a data class is returned as :class:`hidet_dist.spec.interface.Record`, a
        named tuple as :class:`hidet_dist.spec.interface.NamedParts`. Without an :attr:`interface`, inputs are
        positional, a single output is returned bare, and several outputs as a list. Tensors are the rank's shards;
        :meth:`run` documents their types and the errors raised.
        """
        outputs = self._execute(number, lambda: self._prepare(self._inputs_of(args, kwargs), None), Purpose.RUN)[0]
        if self._pipelined is not None and not self._pipelined.gives_results:
            return None
        if self.interface is not None:
            return self.interface.nest(outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Flatten the arguments of the model to the inputs of the program. Raises InputError."""
        if self.interface is not None:
            return self.interface.flatten(*args, **kwargs)
        if kwargs:
            raise InputError(
                f"The inputs of these artifacts have no names; got {', '.join(kwargs)}. Give inputs by position, or "
                "build the artifacts of a model (from_torch, from_transformers, from_onnx)."
            )
        return args

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Run on one batch after another, and yield the results in order: each batch's output, or a list of several.

        A pipeline stays full: each stage proceeds to the next batch while later stages work on earlier ones, so a
        result is yielded some batches after its inputs were taken. All ranks iterate over their streams together, over
        the same number of batches and to the end; no other call can be made until then. The last result ends the stream
        of a list, or of another object with a length; other streams end when they are asked for one more result. If one
        rank pauses, the others wait for it, at most for the time-out. If one rank leaves the stream of a pipeline
        before its end (by ``break``, an exception, ``close()``, or by deleting the iterator), this closes the partition
        on all ranks, and the others name that rank.

        Parameters
        ----------
        batches: iterable
            The inputs of each batch as for :meth:`run`: a sequence of tensors, or a single tensor.

        Raises
        ------
        InputError
            When a batch does not fit the program. In a pipeline this closes the partition on all ranks.
        CallError, CommunicationError, ArtifactError, HidetDistError
            As :meth:`run`.
        """
        if self._pipelined is None:
            results = (self._run_batch(batch if isinstance(batch, Sequence) else [batch]) for batch in batches)
            return (outputs[0] if len(outputs) == 1 else outputs for outputs in results)
        return self._begin_stream(self._pipelined, batches)

    @numbered
    def _run_batch(self, number: int, inputs: Sequence[Any]) -> list[Any]:
        return self._execute(number, lambda: self._prepare(inputs, None), Purpose.BATCH)[0]

    @numbered
    def _begin_stream(self, number: int, pipelined: PipelinedProgram, batches: Iterable[Any]) -> Iterator[Any]:
        self._calls.make(number, Purpose.STREAM, lambda: (None, {}), lambda _: pipelined.begin(number))
        return Stream(pipelined, self._calls, batches, self._end_stream)

    @numbered
    def _end_stream(self, number: int) -> None:
        self._calls.make(number, Purpose.END_OF_STREAM, lambda: (None, {}), lambda _: None)

    @numbered
    def run(self, number: int, inputs: Sequence[Any], outputs: Sequence[Any] | None = None) -> list[Any]:
        """Run once, on the rank's shards of the inputs.

        Parameters
        ----------
        inputs: sequence of tensors
            NumPy arrays, torch or hidet tensors, or other objects with ``__dlpack__``, in the memory of the program's
            device: they are read in place. Tensors in host memory that are not contiguous in row-major order are copied
            first. A program on a CUDA device takes tensors in host memory too, and copies them there and back.
        outputs: sequence of tensors, optional
            Tensors for the results: contiguous and writable, of the outputs' dtypes and shapes, and sharing no memory
            with an input or with one another. They save the allocation of new memory.

        Returns
        -------
        The given outputs, or new tensors of the first input's library (NumPy for other objects with ``__dlpack__``), on
        the first input's device.
        NumPy has no bfloat16: for a program with bfloat16 outputs, give torch or hidet tensors, as the first input or
        as outputs. (Where the ml_dtypes package is imported, which adds bfloat16 to NumPy, arrays work too.)

        Raises
        ------
        InputError
            When the number, dtypes, shapes or devices of inputs or outputs are not the program's; when a symbolic dim's
            size is not a multiple of the declared one, or differs between inputs or ranks; when an input in host memory
            holds an index (such as a token's number) outside its table. All ranks then refuse the call, including those
            whose inputs are right, and no data of the inputs has been sent.
        CallError
            When another rank failed before any data was sent, for instance for lack of memory. That rank raises the
            underlying error, all others this one; the next call can be made.
        CommunicationError
            When a collective fails, a rank fails after data was sent, or the ranks make different calls. The partition
            cannot be used any more.
        ArtifactError
            When the weights' files were changed since they were loaded. The partition cannot be used any more.
        ForkError
            When this process is a child, made by ``fork``, of the one that loaded the partition.
        HidetDistError
            When the partition is closed, or may not be called from this thread. Other ranks are not notified until the
            next call, which fails on all of them, unless they too have made a call that was refused in this way.
        """
        return self._execute(number, lambda: self._prepare(inputs, outputs), Purpose.RUN)[0]

    @numbered
    def warm_up(self, number: int, sizes: Mapping[str, int] | None = None) -> None:
        """Run the program once on zeros, so that the first request is not slower than later ones.

        This connects the groups of ranks, starts the kernels' threads, reads the weights into memory, and allocates
        memory for activations. All ranks call it together, like any call.

        Parameters
        ----------
        sizes: mapping, optional
            The global sizes of symbolic dims, by name; by default those that the plan was made for.

        Raises
        ------
        InputError
            When a name is not one of the program's symbolic dims, or a size does not fit it; on all ranks, as for
            :meth:`run`.
        """
        program = self._pipelined or self._program
        self._execute(number, lambda: program.prepare_zeros(sizes or {}), Purpose.WARM_UP)

    @numbered
    def profile(self, number: int, *inputs: Any, outputs: Sequence[Any] | None = None, repeats: int = 1) -> Profile:
        """Run, and return the time of each operator. All ranks call it together, like any call.

        Parameters
        ----------
        inputs, outputs:
            As for :meth:`run`.
        repeats: int
            The number of calls to make. The profile is that of the call of median duration (the shorter of two middle
            ones), which may be a different call on each rank: make one call where traces are to be merged. The first
            call of a partition takes longer than later ones: see :meth:`warm_up`.

        Raises
        ------
        ConfigError
            When ``repeats`` is less than 1.
        InputError, CallError, CommunicationError, ArtifactError, HidetDistError
            As :meth:`run`.
        """

        def prepare() -> tuple[Any, Mapping[str, int]]:
            if repeats < 1:
                raise ConfigError(f"profile makes at least one call; got repeats={repeats}.")
            return self._prepare(inputs, outputs)

        profiles = [self._profile(number, prepare)]
        profiles += [self._next_profile(prepare) for _ in range(repeats - 1)]
        median = statistics.median_low(profile.call_seconds for profile in profiles)
        return next(profile for profile in profiles if profile.call_seconds == median)

    @numbered
    def _next_profile(self, number: int, prepare: Callable[[], tuple[Any, Mapping[str, int]]]) -> Profile:
        return self._profile(number, prepare)

    def _profile(self, number: int, prepare: Callable[[], tuple[Any, Mapping[str, int]]]) -> Profile:
        begin = time.perf_counter_ns()
        _, times = self._execute(number, prepare, Purpose.RUN, record=True)
        end = time.perf_counter_ns()
        assert times is not None
        launches = [
            (self.stage.kernels[launch.kernel], launch.kernel, launch.output, launch.communication)
            for launch in self.stage.launches
        ]
        known: list[tuple[tuple[str, int, str, str], int, int]] = []
        for interval in times if isinstance(times, list) else [Interval("run", 0, begin, end, kernels=times)]:
            if interval.kernels is None:
                known.append((self._message(interval.name), interval.begin, interval.end))
            else:
                known += [(one, int(a), int(b)) for one, (a, b) in zip(launches, interval.kernels, strict=True)]
        operators = tuple(
            OperatorTime(place, *one, (start - begin) / _NANOSECONDS, (stop - start) / _NANOSECONDS)
            for place, (one, start, stop) in enumerate(known)
        )
        seconds = begin / _NANOSECONDS, (end - begin) / _NANOSECONDS
        if not isinstance(times, list):
            return Profile(self.rank, self.world_size, *seconds, operators)
        steps = tuple(
            PipelineStep(
                one.name,
                one.micro_batch,
                (one.begin - begin) / _NANOSECONDS,
                (one.end - one.begin) / _NANOSECONDS,
                one.nbytes,
            )
            for one in times
        )
        return Profile(self.rank, self.world_size, *seconds, operators, self._stage_number, steps)

    def _message(self, name: str) -> tuple[str, int, str, str]:
        """Return the name, kernel, output and communication with which a profile shows a pipeline's message step."""
        kernels = len(self.stage.kernels)
        return {
            "receive": (name, kernels, "inputs of the stage", "messages from earlier stages"),
            "send": (name, kernels + 1, "", "messages to later stages"),
            "results": (name, kernels + 2, "outputs of the graph", "messages from other stages"),
        }[name]

    def _prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[Any, Mapping[str, int]]:
        """Prepare a run, or a call of a pipeline. Returns it with the sizes of symbolic dims."""
        return (self._pipelined or self._program).prepare(inputs, outputs)

    def attach(self) -> None:
        """Make the calling thread the one that may call the partition, if it communicates. Waits for a running call."""
        self._calls.attach()

    def _execute(
        self,
        number: int,
        prepare: Callable[[], tuple[Any, Mapping[str, int]]],
        purpose: Purpose,
        record: bool = False,
    ) -> tuple[list[Any], np.ndarray | list[Interval] | None]:
        """Make a call. Returns the outputs and, with ``record``, the times of its kernels or of a pipeline's steps."""

        def run(prepared: Any) -> tuple[list[Any], np.ndarray | list[Interval] | None]:
            if self._pipelined is not None:
                return self._pipelined.run(prepared, number, record)
            return self._program.run(prepared, self._communicator, record)

        return self._calls.make(number, purpose, prepare, run)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Make the device current, and check before and after that the weights are unchanged."""
        with self._device.memory.active(), self._checking_weights():
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
            self._device.memory.check()
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
                if self._pipelined is not None:
                    self._pipelined.leave()
                native.bind(None)
                for communicator in self._communicators:
                    communicator.close()
                self._free()

    def _free(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
        self._libraries.close()
        self._device.memory.close()

    def __enter__(self) -> LoadedPartition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_partition(
    out_dir: str | Path, rank: int | None = None, timeout_seconds: float | None = None
) -> LoadedPartition:
    """Load one rank's part of a program from artifacts, and meet the other ranks.

    Every byte that is loaded is first checked against the manifest's SHA-256. Weights are mapped, not copied: processes
    of a host share the pages of a file, and a build replaces artifacts without touching files in use.

    Parameters
    ----------
    out_dir: str or Path
        The folder that ``auto_parallel`` wrote.
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


def _open(folder: Path, rank: int | None, timeout_seconds: float | None) -> OpenedArtifacts:
    """Open and verify artifacts that this process can load. Starts again where they are replaced meanwhile."""
    while True:
        artifacts = OpenedArtifacts(folder)
        try:
            manifest = artifacts.manifest
            if manifest.abi_version != native.ABI_VERSION:
                raise ArtifactError(
                    f"{folder} was built for the native interface {manifest.abi_version} (abi_version); this is "
                    f"{native.ABI_VERSION}. Build the artifacts again."
                )
            installed = importlib.metadata.version("hidet")
            if manifest.hidet_version != installed:
                raise ArtifactError(
                    f"{folder} was built with hidet {manifest.hidet_version} (hidet_version), not {installed}. Build "
                    "the artifacts again."
                )
            device_kind(manifest.target).check()  # before the ranks meet
            entered = _enter_session(rank, manifest.world_size, timeout_seconds, folder)
            artifacts.verify(_files_of(manifest, entered))
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


def _files_of(manifest: Manifest, rank: int) -> list[str]:
    """List the files that a rank uses: its stage's, except other ranks' data, and those that belong to no stage."""
    number = manifest.stage_of(rank)
    stage_manifest, ranks = manifest.stages[number], manifest.ranks_of(number)
    others = {stage_manifest.weights_file(other - ranks.start) for other in ranks if other != rank}
    for stage in manifest.stages[:number] + manifest.stages[number + 1 :]:
        others.update((*stage.libraries_of(), *(name for other in range(stage.size) for name in stage.data_of(other))))
    return [name for name in manifest.files if name not in others]


def _enter_session(rank: int | None, world_size: int, timeout_seconds: float | None, folder: Path) -> int:
    """Open a session if there is none, meet the other ranks, and return this rank. Raises ConfigError for a misfit."""
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"{folder} has the ranks 0 to {world_size - 1}; there is no rank {rank}.")
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
