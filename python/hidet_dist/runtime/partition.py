"""A loaded partition: one rank's part of a program, loaded from artifacts and ready to be called."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from hidet_dist.runtime.targets import DEVICE_KINDS
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.weights.header import Layout

_sizes_lock = threading.Lock()  # hidet's runtime has one table of symbolic dims' sizes
_NANOSECONDS = 1e9  # in a second


def _forked() -> None:
    """Make a new lock in a child, where the thread that holds the old one may be missing."""
    global _sizes_lock  # noqa: PLW0603
    _sizes_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class LoadedPartition:
    """One rank's part of a program. Call it with the rank's shards of the graph inputs.

    All ranks must make their calls in the same order. The calls are numbered on each rank, and one that another rank
    did not make, or that failed there, is answered on none; but nothing tells apart two calls with inputs of the same
    shapes that all ranks make, only for different requests.

    * A partition of one rank, or one that communicates nothing, may be called from several threads. The calls run one
      after the other, as do those of all partitions with symbolic dims in a process: hidet's runtime has one table of
      their sizes.
    * A partition that communicates is called from one thread, as threads take turns in an order of their own on each
      rank: the one that loaded it, or the one that called :meth:`attach` last. Calls from others are refused.

    :meth:`close` may be called from any thread; it waits for the call that runs.

    A partition belongs to the process that loaded it. In a child made by ``fork`` it is closed: to call it raises
    ``ForkError``, to close it does nothing, and the child's end changes nothing for the ranks. The child may load a
    partition of its own.

    Parameters
    ----------
    folder: Path
        The artifact folder.
    rank: int, optional
        The rank that this process must be; the session's or the environment's by default.
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
                    self.stage = self.manifest.stages[self._stage_number]
                    self._launcher = launcher = self._load(artifacts)
                memory = self._device.memory
                self._program = Program(self.stage, launcher, memory, self._runtime)
            self._communicators = self._communicate(rank, timeout_seconds)
            for communicator in self._communicators:
                communicator.rely_on(memory.files)
            self._own, self._communicator = self._communicators[0], self._communicators[-1]
            pipeline = self.manifest.pipeline
            self._pipelined = None if pipeline is None else self._part_of_pipeline(pipeline)
            communicates = self.stage.size > 1 and bool(self.stage.communications)
            communicates |= pipeline is not None and self.world_size > 1
            symbols = [symbol.name for symbol in self.stage.symbols]
            agreement = Agreement(self._communicator, memory, symbols) if communicates else None
            self._calls = Calls(self._communicator, agreement, _sizes_lock if symbols else nullcontext(), self._ready)
            self._choose_candidates(launcher, folder)
        except BaseException:
            self._free()
            raise

    def _communicate(self, rank: int | None, timeout_seconds: float | None) -> list[Communicator]:
        """The communicators of this rank: of its stage, and in a pipeline those of all ranks, the one of calls last."""
        target, device = self.manifest.target, self._device.number

        def make(mesh_shape: tuple[int, ...], first: int) -> Communicator:
            return session.communicator_for(mesh_shape, rank, timeout_seconds, target, device, first)

        pipeline = self.manifest.pipeline
        everyone = 0 if pipeline is None else 1 + PipelinedProgram.exchanges_results(pipeline)
        # Those of all ranks first: all ranks make them in the same order.
        worlds = [make((self.world_size,), 0) for _ in range(everyone)]
        return [make(self.stage.mesh_shape, self._ranks.start), *worlds]

    def _part_of_pipeline(self, pipeline: Pipeline) -> PipelinedProgram:
        own, *worlds = self._communicators
        backward = worlds[0] if PipelinedProgram.exchanges_results(pipeline) else None
        memory = self._device.memory
        return PipelinedProgram(self.manifest, self.rank, self._program, memory, worlds[-1], own, backward)

    def _choose_candidates(self, launcher: Launcher, folder: Path) -> None:
        """Choose the fastest candidate of each kernel, where there are several."""
        try:
            with _sizes_lock if self.stage.symbols else nullcontext():
                self._device.choose_candidates(
                    self.stage,
                    self._program,
                    launcher,
                    self._kernels,
                    self._own,
                    folder.resolve(),
                    self._build,
                )
        except BaseException as error:
            # The others may wait for this rank.
            self._communicator.give_up(f"it failed while it chose among candidates: {describe(error)}")
            raise

    @property
    def _build(self) -> str:
        """The identity of this stage of this build."""
        identity = self.manifest.identity
        return identity if len(self.manifest.stages) == 1 else f"{identity}/{self.stage.folder}"

    @property
    def _group_rank(self) -> int:
        """This rank among those of its stage."""
        return self._ranks.index(self.rank)

    @property
    def device_bytes(self) -> int:
        """Memory that is held on a CUDA device now, for weights, workspace and staging; 0 on the CPU."""
        return self._device.allocated_bytes

    def _load(self, artifacts: OpenedArtifacts) -> Launcher:
        stage, folder = self.stage, artifacts.folder
        self._device = DEVICE_KINDS[self.manifest.target].open(self.manifest, stage, self.rank)
        check_features(self.manifest.arch, self.manifest.cpu_features)
        load_needed((), folder)  # what launchers link against
        self._runtime = hidet_runtime()
        library, description = self._libraries.load_launcher(artifacts.take(stage.launcher_file))
        try:
            layouts = check_description(self.manifest, self._stage_number, description)
        except ValueError as error:
            raise ArtifactError(f"{folder}: {error}. Build the artifacts again.") from error
        load_needed(stage.libraries, folder)
        kernels = map(artifacts.take, stage.kernel_files())
        self._kernels = self._libraries.load_kernels(kernels, stage.candidates)
        data = self._load_data(artifacts, layouts)
        launcher = self._device.launcher(library, self._kernels, [data[name] for name in stage.data], stage)
        if not stage.symbols and launcher.workspaces() != stage.workspace_bytes:
            raise ArtifactError(
                f"{folder}: stages[{self._stage_number}].workspace_bytes is {stage.workspace_bytes}, but the launcher "
                f"needs {launcher.workspaces()}. Build the artifacts again."
            )
        return launcher

    def _load_data(self, artifacts: OpenedArtifacts, layouts: Mapping[str, Layout]) -> dict[str, int]:
        """The addresses of the stage's data, by name."""
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
                coordinate = DeviceMesh(stage.mesh_shape, stage.mesh_axis_names).coordinate(self._group_rank)
                check_coordinate(file, places[COORDINATE], coordinate)
            addresses.update(self._device.memory.load(file, places))
        return addresses

    @property
    def interface(self) -> Interface | None:
        """Names and nesting of the model's arguments and results; None where the artifacts were built of a bare graph.

        ``interface.flatten(*args, **kwargs)`` gives the inputs of :meth:`run`, ``interface.nest(outputs)`` the result.
        """
        return self.stage.interface

    @numbered
    def __call__(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Run once, as the model would be called: with its arguments by place or by name, nested as it takes them.

        The result is nested as the model's; data classes and named tuples are given back as
        :class:`hidet_dist.spec.interface.Record`. Where there is no :attr:`interface`, inputs are given by place, and a
        single output is returned bare, several as a list. Tensors are the rank's shards; :meth:`run` says what they may
        be and what is raised.
        """
        outputs = self._execute(number, lambda: self._prepare(self._inputs_of(args, kwargs), None), Purpose.RUN)[0]
        if self._pipelined is not None and not self._pipelined.gives_results:
            return None
        if self.interface is not None:
            return self.interface.nest(outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _inputs_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The inputs of the program, from the arguments of the model. Raises InputError."""
        if self.interface is not None:
            return self.interface.flatten(*args, **kwargs)
        if kwargs:
            raise InputError(
                f"The inputs of these artifacts have no names; got {', '.join(kwargs)}. Give inputs by place, or build "
                "the artifacts of a model (from_torch, from_transformers, from_onnx)."
            )
        return args

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Run on batch after batch, and give the results in order: of each batch its only output, or a list of them.

        A pipeline stays full meanwhile: each stage goes on to the next batch while later stages work on those before. A
        result comes some batches after its inputs were taken. All ranks iterate over their streams together, each over
        as many batches, and to the end; until then there are no other calls. Others wait for a rank that pauses, for as
        long as the time-out.

        Parameters
        ----------
        batches: iterable
            The inputs of each batch as for :meth:`run`: a sequence of them, or the only one.

        Raises
        ------
        InputError
            When this rank refuses a batch. In a pipeline that ends the partition on all ranks.
        CallError, CommunicationError, ArtifactError, HidetDistError
            As :meth:`run`.
        """
        if self._pipelined is None:
            results = (self.run(batch if isinstance(batch, Sequence) else [batch]) for batch in batches)
            return (outputs[0] if len(outputs) == 1 else outputs for outputs in results)
        return self._begin_stream(self._pipelined, batches)

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
            NumPy arrays, torch or hidet tensors, or whatever else has ``__dlpack__``, in the memory of the program's
            device: they are read where they lie. In host memory, what does not lie row by row is copied first. A
            program on a CUDA device takes tensors in host memory too, copied there and back.
        outputs: sequence of tensors, optional
            Where the results go: contiguous and writable, of the outputs' dtypes and shapes, and sharing no memory
            with an input or with one another. They save the time that the system takes to find new memory.

        Returns
        -------
        The outputs: those given, or new tensors of the first input's library (NumPy's where that is none of the three),
        on the first input's device.
        NumPy has no bfloat16, so a program with such outputs is given torch or hidet tensors, as its first input or as
        outputs. (The ml_dtypes package adds it: where that is imported, NumPy arrays will do.)

        Raises
        ------
        InputError
            When the number, dtypes, shapes or devices of inputs or outputs are not the program's, a symbolic dim's size
            is not a multiple of what was declared, or two inputs or two ranks disagree on it, or an input in host
            memory holds an index (such as the number of a token) that its table has not. All ranks refuse the call
            then, also those whose own inputs are right, and no data of the inputs has been sent.
        CallError
            When another rank failed before any data was sent, for instance for lack of memory. That rank raises its own
            error, all others this one; the next call can be made.
        CommunicationError
            When a collective fails, a rank fails after data was sent, or the ranks do not make the same calls; the
            partition cannot be used any more.
        ArtifactError
            When the weights' files were changed since they were loaded; the partition cannot be used any more.
        ForkError
            When this process is a child, made by ``fork``, of the one that loaded the partition.
        HidetDistError
            When the partition is closed, or may not be called from this thread. Other ranks do not hear of it until
            the next call, which fails on all of them unless they, too, have made a call that was refused so.
        """
        return self._execute(number, lambda: self._prepare(inputs, outputs), Purpose.RUN)[0]

    @numbered
    def warm_up(self, number: int, sizes: Mapping[str, int] | None = None) -> None:
        """Run the program once on zeros, so that the first request finds everything in place.

        That connects the ranks' groups, starts the kernels' threads, reads the weights into memory, and takes the
        memory for activations. All ranks call it together, like any call.

        Parameters
        ----------
        sizes: mapping, optional
            The whole sizes of symbolic dims, by name; those that the plan was made for by default.

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
        """Run, and say where the time went. All ranks call it together, like any call.

        Parameters
        ----------
        inputs, outputs:
            As for :meth:`run`.
        repeats: int
            How many calls to make; the profile is that of the call of median duration (the shorter of two), which may
            be another one on each rank: for traces to be merged, make one. The first call of a partition takes longer
            than those after it: see :meth:`warm_up`.

        Raises
        ------
        ConfigError
            When there are to be no calls.
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
        """Name, kernel, output and communication of a step of a pipeline, as profiles have them."""
        kernels = len(self.stage.kernels)
        return {
            "receive": (name, kernels, "inputs of the stage", "messages from earlier stages"),
            "send": (name, kernels + 1, "", "messages to later stages"),
            "results": (name, kernels + 2, "outputs of the graph", "messages from other stages"),
        }[name]

    def _prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[Any, Mapping[str, int]]:
        """Prepare a run, or a call of a pipeline, and tell the sizes of symbolic dims."""
        return (self._pipelined or self._program).prepare(inputs, outputs)

    def attach(self) -> None:
        """Make the calling thread the one that calls this partition, if it communicates. Waits for a call that runs."""
        self._calls.attach()

    def _execute(
        self,
        number: int,
        prepare: Callable[[], tuple[Any, Mapping[str, int]]],
        purpose: Purpose,
        record: bool = False,
    ) -> tuple[list[Any], np.ndarray | list[Interval] | None]:
        """Make a call: the outputs, and where ``record``, the times of its kernels, or what a pipeline did when."""

        def run(prepared: Any) -> tuple[list[Any], np.ndarray | list[Interval] | None]:
            if self._pipelined is not None:
                return self._pipelined.run(prepared, number, record)
            return self._program.run(prepared, self._communicator, record)

        return self._calls.make(number, purpose, prepare, run)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """The context in which kernels can be launched and the weights are unchanged."""
        with self._device.memory.active(), self._checking_weights():
            yield

    @contextmanager
    def _checking_weights(self) -> Iterator[None]:
        """Nothing that was made of changed weights is returned: they may change at any time."""
        self._check_weights()
        try:
            yield
        except CommunicationError:
            self._check_weights()  # if they have, that is why
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
        """Leave the other ranks and free the weights, after the call that runs. Closing twice does nothing.

        Nor does closing in a child of the process that loaded it.

        Raises
        ------
        HidetDistError
            When this thread is in a call, as a signal handler may be.
        """
        with self._calls.closing() as was_open:
            if was_open:
                if self._pipelined is not None:
                    self._pipelined.close()
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

    Every byte that is loaded is checked against the manifest's SHA-256 first. Weights are mapped, not copied: processes
    of a host share what they read of the same file, and builds replace artifacts without touching what is in use.

    Parameters
    ----------
    out_dir: str or Path
        The folder that ``auto_parallel`` wrote.
    rank: int, optional
        The rank to load; RANK of the environment (as torchrun sets it) by default.
    timeout_seconds: float, optional
        How long to wait for the other ranks, now and in each collective; 60 s unless ``init`` said otherwise.

    Raises
    ------
    ArtifactError
        When the artifacts are missing, incomplete, altered, or of another version.
    ConfigError
        When the rank or the world size is not the artifacts'.
    RendezvousError
        When the other ranks do not come; it names them.
    """
    if not isinstance(out_dir, str | Path):
        raise ArtifactError(f"load_partition takes the path of a folder with artifacts; got {shown(out_dir)}.")
    return LoadedPartition(Path(out_dir), rank, timeout_seconds)


def _open(folder: Path, rank: int | None, timeout_seconds: float | None) -> OpenedArtifacts:
    """Open artifacts that this process can load, their files verified; if they are replaced meanwhile, the new ones."""
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
            DEVICE_KINDS[manifest.target].check()  # before the ranks meet
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
    """List the files that a rank uses: those of its stage, other ranks' data aside, and those of no stage."""
    number = manifest.stage_of(rank)
    stage_manifest, ranks = manifest.stages[number], manifest.ranks_of(number)
    others = {stage_manifest.weights_file(other - ranks.start) for other in ranks if other != rank}
    for stage in manifest.stages[:number] + manifest.stages[number + 1 :]:
        others.update((*stage.libraries_of(), *(name for other in range(stage.size) for name in stage.data_of(other))))
    return [name for name in manifest.files if name not in others]


def _enter_session(rank: int | None, world_size: int, timeout_seconds: float | None, folder: Path) -> int:
    """Join the ranks as the arguments or the environment say. Refuses a rank or a number of ranks that does not fit."""
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
    session.meet()  # so that the others hear of what is wrong with this rank's files
    return settings.rank
