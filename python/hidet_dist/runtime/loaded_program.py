"""One program of a loaded partition: its calls, streams and profiles on one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hidet_dist.artifacts.manifest import StageManifest
from hidet_dist.errors import ConfigError, InputError
from hidet_dist.runtime.agreement import Purpose, describe
from hidet_dist.runtime.calls import Calls, numbered
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.process import resident_bytes
from hidet_dist.runtime.profile import OperatorTime, PipelineStep, Profile
from hidet_dist.runtime.program import StageProgram
from hidet_dist.runtime.runner import Runner, StageRunner
from hidet_dist.runtime.states import States
from hidet_dist.spec.interface import Interface

if TYPE_CHECKING:
    from hidet_dist.runtime.pipeline.program import PipelinedProgram, StepInterval

_NANOSECONDS = 1e9  # per second


class LoadedProgram:
    """One program of a loaded partition, on one rank. Call it with the rank's shards of the graph inputs.

    Its weights, workspace and communicators are the partition's, which its other programs use as well. Calls of all
    programs are made one at a time, and all ranks make them in the same order; see
    :class:`hidet_dist.runtime.partition.LoadedPartition`.

    Parameters
    ----------
    name: str
        The name of the program.
    number: int
        Its number among the programs.
    stage: StageManifest
        The rank's stage of it, with the shapes that the rank has.
    stage_number: int
        The number of that stage.
    ranks: tuple of int
        This rank, and the number of ranks.
    program: StageProgram
        The stage's program.
    pipelined: PipelinedProgram or None
        The stage as a part of its pipeline; None without one.
    calls: Calls
        The calls of the partition.
    communicators: tuple of Communicator
        The communicator of the stage's ranks, and the one that calls are agreed on in.
    resident: int or None
        Bytes of the process in memory before the partition was loaded, if they are known.
    states: States
        The states of the rank, which its other programs write as well.
    """

    def __init__(
        self,
        name: str,
        number: int,
        stage: StageManifest,
        stage_number: int,
        ranks: tuple[int, int],
        program: StageProgram,
        pipelined: PipelinedProgram | None,
        calls: Calls,
        communicators: tuple[Communicator, Communicator],
        resident: int | None,
        states: States,
    ):
        self.name = name
        self.stage = stage
        self.rank, self.world_size = ranks
        self._number = number
        self._stage_number = stage_number
        own, self._communicator = communicators
        self._pipelined = pipelined
        self._runner: Runner = pipelined or StageRunner(program, own, self._communicator)
        self._calls = calls
        self._resident = resident
        self._states = states

    def __repr__(self) -> str:
        return f"LoadedProgram({self.name!r}, rank {self.rank} of {self.world_size})"

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
        outputs = self._execute(number, lambda: self._runner.prepare(self._inputs_of(args, kwargs), None), Purpose.RUN)[
            0
        ]
        if not self._runner.gives_results:
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
            When a batch does not fit the program; in a pipeline this closes the partition on all ranks. When the
            program is a pipeline that keeps states; no data was sent then.
        CallError, CommunicationError, ArtifactError, HidetDistError
            As :meth:`run`.
        """
        if self._pipelined is None:
            results = (self._run_batch(batch if isinstance(batch, Sequence) else [batch]) for batch in batches)
            return (outputs[0] if len(outputs) == 1 else outputs for outputs in results)
        if self._pipelined.keeps_states:
            raise InputError(
                f"The program {self.name} is a pipeline that keeps states, and a batch of a stream would find what "
                "another one has written: make one call after another."
            )
        return self._begin_stream(self._pipelined, batches)

    @numbered
    def _run_batch(self, number: int, inputs: Sequence[Any]) -> list[Any]:
        return self._execute(number, lambda: self._runner.prepare(inputs, None), Purpose.BATCH)[0]

    @numbered
    def _begin_stream(self, number: int, pipelined: PipelinedProgram, batches: Iterable[Any]) -> Iterator[Any]:
        self._calls.make(number, Purpose.STREAM, lambda: (None, {}), lambda _: pipelined.begin(number), self._number)
        from hidet_dist.runtime.pipeline.stream import ResultStream

        return ResultStream(pipelined, self._calls, batches, self._end_stream)

    @numbered
    def _end_stream(self, number: int) -> None:
        self._calls.make(number, Purpose.END_OF_STREAM, lambda: (None, {}), lambda _: None, self._number)

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
        return self._execute(number, lambda: self._runner.prepare(inputs, outputs), Purpose.RUN)[0]

    @numbered
    def run_agreed(self, number: int, inputs: Sequence[Any], outputs: Sequence[Any] | None = None) -> list[Any]:
        """Run once as :meth:`run` does, where the ranks have agreed to the call by messages of their own.

        :meth:`run` exchanges a message before each call, by which all ranks refuse it if one of them must. Callers that
        tell all ranks the same inputs anyway, and have checked them, do without it. If a rank cannot make the call
        nevertheless, the partition cannot be used any more, on any rank.

        Raises
        ------
        InputError, CommunicationError, ArtifactError, ForkError, HidetDistError
            As :meth:`run`, with these consequences.
        """
        return self._execute(number, lambda: self._runner.prepare(inputs, outputs), Purpose.RUN, agreed=True)[0]

    @numbered
    def warm_up(self, number: int, sizes: Mapping[str, int] | None = None) -> None:
        """Run the program once on zeros, so that the first request is not slower than later ones.

        This connects the groups of ranks, starts the kernels' threads, reads the weights into memory, and allocates
        memory for activations. States stay as they are. All ranks call it together, like any call.

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
        self._execute(number, lambda: self._runner.prepare_zeros(sizes or {}), Purpose.WARM_UP, keeps_states=True)

    @numbered
    def profile(
        self, number: int, /, *args: Any, outputs: Sequence[Any] | None = None, repeats: int = 1, **kwargs: Any
    ) -> Profile:
        """Run, and return the time of each operator. All ranks call it together, like any call.

        It finds states of zeros, and leaves the states as they are.

        Parameters
        ----------
        args, kwargs:
            The model's arguments, as for a call of the program; of a bare graph, its inputs by position. The flat
            inputs of :meth:`run` are taken by position as well.
        outputs:
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
            return self._runner.prepare(self._inputs_of(args, kwargs) if kwargs else args, outputs)

        profiles = [self._profile(number, prepare)]
        profiles += [self._next_profile(prepare) for _ in range(repeats - 1)]
        median = statistics.median_low(profile.call_seconds for profile in profiles)
        return next(profile for profile in profiles if profile.call_seconds == median)

    @numbered
    def _next_profile(self, number: int, prepare: Callable[[], tuple[Any, Mapping[str, int]]]) -> Profile:
        return self._profile(number, prepare)

    def _profile(self, number: int, prepare: Callable[[], tuple[Any, Mapping[str, int]]]) -> Profile:
        begin = time.perf_counter_ns()
        _, times = self._execute(number, prepare, Purpose.RUN, record=True, keeps_states=True)
        end = time.perf_counter_ns()
        assert times is not None
        from hidet_dist.runtime.pipeline.program import StepInterval

        launches = [
            (self.stage.kernels[launch.kernel], launch.kernel, launch.output, launch.communication)
            for launch in self.stage.launches
        ]
        known: list[tuple[tuple[str, int, str, str], int, int]] = []
        for interval in times if isinstance(times, list) else [StepInterval("run", 0, begin, end, kernels=times)]:
            if interval.kernels is None:
                known.append((self._message(interval.name), interval.begin, interval.end))
            else:
                known += [(one, int(a), int(b)) for one, (a, b) in zip(launches, interval.kernels, strict=True)]
        operators = tuple(
            OperatorTime(place, *one, (start - begin) / _NANOSECONDS, (stop - start) / _NANOSECONDS)
            for place, (one, start, stop) in enumerate(known)
        )
        seconds = begin / _NANOSECONDS, (end - begin) / _NANOSECONDS
        resident = resident_bytes()
        grown = None if resident is None or self._resident is None else resident - self._resident
        if not isinstance(times, list):
            return Profile(self.rank, self.world_size, *seconds, operators, process_bytes=grown)
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
        return Profile(self.rank, self.world_size, *seconds, operators, self._stage_number, steps, grown)

    def _message(self, name: str) -> tuple[str, int, str, str]:
        """Return the name, kernel, output and communication with which a profile shows a pipeline's message step."""
        kernels = len(self.stage.kernels)
        return {
            "receive": (name, kernels, "inputs of the stage", "messages from earlier stages"),
            "send": (name, kernels + 1, "", "messages to later stages"),
            "results": (name, kernels + 2, "outputs of the graph", "messages from other stages"),
        }[name]

    def _execute(
        self,
        number: int,
        prepare: Callable[[], tuple[Any, Mapping[str, int]]],
        purpose: Purpose,
        record: bool = False,
        keeps_states: bool = False,
        agreed: bool = False,
    ) -> tuple[list[Any], np.ndarray | list[StepInterval] | None]:
        """Make a call. Returns the outputs and, with ``record``, the times of its kernels or of a pipeline's steps.

        With ``keeps_states`` it finds states of zeros, and leaves the states as they are. With ``agreed`` the ranks
        have agreed to it.
        """

        def run(prepared: Any) -> tuple[list[Any], np.ndarray | list[StepInterval] | None]:
            with self._states.aside(self._communicator.give_up) if keeps_states else self._writing_states(number):
                return self._runner.run(prepared, number, record)

        return self._calls.make(number, purpose, prepare, run, self._number, agreed)

    @contextmanager
    def _writing_states(self, number: int) -> Iterator[None]:
        """End the partition where the block fails and has written states, also where no other rank would notice."""
        self._states.begin_run()
        try:
            yield
        except BaseException as error:
            if self.stage.states:
                self._communicator.give_up(f"states may be half written, as call {number} failed: {describe(error)}")
            raise
