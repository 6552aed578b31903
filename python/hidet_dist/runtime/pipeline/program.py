"""One rank's part of a pipeline: for each micro-batch, it receives, runs its stage's program, and sends.

A rank receives the tensors that its stage reads of earlier stages, runs the stage's program, and sends the tensors that
later stages read. Meanwhile, the stage before works on the next micro-batch. On the host, a message of more than the
transport's buffer occupies its sender until the receiver takes it. On CUDA devices, messages go from device memory to
device memory on separate streams, while the stage computes. All ranks share the order of messages
(:mod:`hidet_dist.runtime.pipeline.arrivals`), so that ranks never wait for each other in a circle.

Two communicators have all ranks: one for messages forward, which the calling thread uses, and one for results
(:mod:`hidet_dist.runtime.pipeline.exchange`). A failure of any of a rank's communicators ends all of them. The one of
all ranks tells the other ranks which ranks are to blame.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hidet_dist.artifacts.manifest import ProgramManifest, StageManifest, TensorSignature
from hidet_dist.errors import CommunicationError, HidetDistError, InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.agreement import describe
from hidet_dist.runtime.arguments import CallSignature
from hidet_dist.runtime.arrays import HostArrays, raw_view
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import Memory
from hidet_dist.runtime.pipeline.arrivals import Arrival, Arrivals
from hidet_dist.runtime.pipeline.channel import MessageChannel
from hidet_dist.runtime.pipeline.ends import Ends, RankEnds, dtype_name
from hidet_dist.runtime.pipeline.exchange import Computed, Exchange
from hidet_dist.runtime.pipeline.messages import Inlet, Outlet, blamed, raw_dtype
from hidet_dist.runtime.pipeline.sizes import Sizes
from hidet_dist.runtime.program import StageProgram, with_planned
from hidet_dist.runtime.tensors import NUMPY, TensorBuffer
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.symbols import LocalSymbol, check_sizes, local_sizes


@dataclass(frozen=True)
class MicroBatchCall:
    """One micro-batch of a call.

    Attributes
    ----------
    sizes: the whole sizes of symbolic dims in it.
    inputs: the stage's inputs that are inputs of the graph, by their numbers in the stage.
    outputs: the memory of its part of the outputs, by the numbers of the graph's outputs.
    buffers: that of the whole outputs, with their devices and owners.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[int, TensorBuffer]
    outputs: Mapping[int, np.ndarray]
    buffers: Mapping[int, TensorBuffer]


@dataclass
class PreparedCall:
    """A call whose inputs and outputs are checked and in memory.

    Attributes
    ----------
    inputs: the inputs of the graph that the stage reads, contiguous, for all micro-batches.
    sizes: the sizes of symbolic dims that they have.
    device: the device of new outputs.
    kind: the library of new outputs; None if the caller gives the outputs.
    results: the outputs as they are returned; empty on ranks that return none.
    discards: whether the outputs are thrown away.
    micro_batches: the call's micro-batches; empty until the sizes of all symbolic dims are known.
    """

    inputs: Sequence[TensorBuffer]
    sizes: Mapping[str, int]
    device: tuple[int, int]
    kind: str | None
    results: list[Any]
    discards: bool = False
    micro_batches: Sequence[MicroBatchCall] = ()


@dataclass(frozen=True)
class StepInterval:
    """A step of a rank in a call, from ``begin`` to ``end`` by time.perf_counter_ns.

    Attributes
    ----------
    name: ``receive``, ``run`` or ``send`` for a step on one micro-batch, or ``results`` for the wait for the results of
        other stages, at the end of a call.
    micro_batch: the number of the micro-batch; None for ``results``.
    nbytes: bytes received or sent, by the other rank.
    kernels: the times of the kernels of a run: int64[kernels, 2].
    """

    name: str
    micro_batch: int | None
    begin: int
    end: int
    nbytes: Mapping[int, int] = field(default_factory=dict)
    kernels: np.ndarray | None = None


class PipelinedProgram:
    """The program of one stage on one rank, as part of its pipeline.

    Parameters
    ----------
    manifest: ProgramManifest
        The manifest of the program, with a pipeline.
    rank: int
        This rank, among those of all stages.
    program: StageProgram
        The stage's program.
    memory: Memory
        The memory of the program's tensors.
    world: Communicator
        The communicator of all ranks, for messages forward.
    own: Communicator
        The communicator of the stage's ranks.
    backward: Communicator or None
        The communicator of all ranks for results; None if no results are sent.
    """

    def __init__(
        self,
        manifest: ProgramManifest,
        rank: int,
        program: StageProgram,
        memory: Memory,
        world: Communicator,
        own: Communicator,
        backward: Communicator | None,
    ):
        assert manifest.pipeline is not None
        self._manifest, self._pipeline = manifest, manifest.pipeline
        self._number = manifest.stage_of(rank)
        self._rank, self._group_rank = rank, manifest.ranks_of(self._number).index(rank)
        self._stage = manifest.stages[self._number].at(self._group_rank)
        self._mesh = self._stage.mesh
        self._program, self._memory = program, memory
        self._world, self._own, self._backward = world, own, backward
        self._arrays, self._host = memory.arrays(), HostArrays()
        self._forward = MessageChannel(world, memory.arrays(world.stream))
        self._results = None if backward is None else MessageChannel(backward, memory.arrays(backward.stream))
        pipeline, number = self._pipeline, self._number
        # The inputs of the graph that the stage reads, with their numbers in the stage.
        self._read = {
            place: reader.number
            for place, x in enumerate(pipeline.inputs)
            for reader in x.readers
            if reader.stage == number
        }
        self._given = [place for place in range(len(pipeline.outputs)) if pipeline.gives_results(number)]
        self._signature = CallSignature(self._call_signature(), memory, list(self._read))
        self._unread = self._unread_inputs()
        self._unread_signature = CallSignature(self._unread_call_signature(), memory, list(self._unread))
        place_of = {own: place for place, own in self._read.items()}
        own_inputs = range(len(self._stage.inputs))
        self._checks = CallSignature(self._stage, memory, [place_of.get(own, -1) for own in own_inputs])
        self._sizes = Sizes(manifest, rank)
        self._ends = RankEnds(manifest, rank)
        self._receives = any(reader.stage == number for one in pipeline.boundaries for reader in one.readers)
        self._travelling = {
            y.source.number
            for y in pipeline.outputs
            for target in range(len(pipeline.stages))
            if y.source.stage == number != target and pipeline.gives_results(target)
        }
        self._scratch: dict[int, np.ndarray] = {}
        self._kept: list[np.ndarray] = []  # arrays of copies that are enqueued behind the last run
        self._exchange: Exchange | None = None
        self._lead()
        self._under_way = False  # whether a call or a stream has begun and not ended

    @property
    def gives_results(self) -> bool:
        """Whether this rank returns the outputs of the graph."""
        return self._pipeline.gives_results(self._number)

    @property
    def keeps_states(self) -> bool:
        """Whether a stage of the pipeline keeps states."""
        return any(stage.states for stage in self._manifest.stages)

    @property
    def lag(self) -> int:
        """The number of batches of a stream that a rank of this stage takes before it returns the first results.

        In a full pipeline, these results have then arrived.
        """
        return 0 if self._backward is None else len(self._pipeline.stages) - self._number

    def _lead(self) -> None:
        """Let the communicator of all ranks lead the others, which other programs of the rank may use as well."""
        others = [self._own] if self._backward is None else [self._own, self._backward]
        self._world.lead(others, self._waits)

    def _waits(self) -> tuple[int, ...]:
        """List the ranks that the calling thread waits for, in its stage or for results."""
        exchange, backward = self._exchange, self._backward
        if backward is not None and exchange is not None and exchange.awaited:
            return backward.peers
        return self._own.peers

    def prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[PreparedCall, Mapping[str, int]]:
        """Check and place the inputs and outputs of a call: those of the graph, for all micro-batches.

        Inputs that the stage does not read may be anything without a shape, such as None. Tensors must have the shape
        of the input, so that a batch that differs from the other ranks' is found.

        Returns
        -------
        The call, and the sizes of those symbolic dims that this rank knows.

        Raises
        ------
        InputError
            When inputs or outputs do not fit the graph.
        MemoryError
            When there is not enough memory.
        """
        count = len(self._pipeline.inputs)
        if len(inputs) != count:
            raise InputError(f"The program takes {count} inputs; {len(inputs)} were given.")
        given = self._signature.inputs([inputs[place] for place in self._read])
        sizes = self._known_sizes(inputs, given)
        buffers = self._signature.packed(given)
        kind = None
        if outputs is None:
            kind = self._signature.kind(inputs) if self._given else NUMPY
        device = self._result_device(inputs)
        prepared = PreparedCall(buffers, sizes, device, kind, [] if outputs is None else list(outputs))
        if self._sizes.complete(sizes):
            self._place(prepared, sizes)
        return prepared, sizes

    def _known_sizes(self, inputs: Sequence[Any], given: Sequence[TensorBuffer]) -> dict[str, int]:
        """Compute the sizes of symbolic dims that the inputs have, those that the stage does not read included."""
        sizes = self._signature.known_sizes(dict(zip(self._read, (buffer.shape for buffer in given), strict=True)))
        shapes = {place: getattr(inputs[place], "shape", None) for place in self._unread}
        others = self._unread_signature.known_sizes(
            {place: shape for place, shape in shapes.items() if isinstance(shape, tuple)}
        )
        for name, size in others.items():
            if sizes.setdefault(name, size) != size:
                raise InputError(
                    f"The symbolic dim {name} must be the same everywhere; it is {sizes[name]} in the inputs that this "
                    f"stage reads, but {size} in another."
                )
        return sizes

    def _result_device(self, inputs: Sequence[Any]) -> tuple[int, int]:
        """Return the device of new outputs: this rank's if the first input is on a device, or else the host."""
        first = inputs[0] if inputs else None  # which the stage may not read, so that it may be anything
        on_device = hasattr(first, "__dlpack_device__") and dlpack.device_of(first)[0] == dlpack.CUDA
        return self._arrays.device if on_device else (dlpack.CPU, 0)

    def prepare_zeros(self, sizes: Mapping[str, int]) -> tuple[PreparedCall, Mapping[str, int]]:
        """Prepare a call on zeros whose outputs are thrown away.

        ``sizes`` has whole sizes of symbolic dims, by name; the others have the sizes that the plan was made for.
        """
        whole = with_planned(self._sizes.planned, sizes)
        check_sizes(self._stage.symbols, whole)
        buffers = self._signature.zeros(local_sizes(self._stage.local_symbols, whole))
        prepared = PreparedCall(buffers, whole, self._arrays.device, None, [], discards=True)
        self._place(prepared, whole)
        return prepared, whole

    def run(self, prepared: PreparedCall, number: int, record: bool = False) -> tuple[list[Any], list[StepInterval]]:
        """Make call ``number``; return the outputs and, with ``record``, this rank's steps.

        Raises
        ------
        CommunicationError
            When a message or a collective failed, on this rank or another.
        """
        intervals: list[StepInterval] = []
        self.begin(number)
        try:
            self.process(prepared, intervals if record else None, agreed=True)
            processed = time.perf_counter_ns()
            results = self.collect(prepared)
            if record and self._exchange is not None:
                routes = [route for one in prepared.micro_batches for route in self._ends.at(one.sizes).routes]
                nbytes = _summed([route.inlet for route in routes if route.inlet is not None])
                intervals.append(StepInterval("results", None, processed, time.perf_counter_ns(), nbytes))
        except BaseException as error:
            self.fail(error)
            raise
        self.end()
        return results, intervals

    def run_alone(self) -> None:
        """Run the stage on zeros without messages, if messages will be pending while it runs.

        On a device, the first run loads kernels and allocates memory, which may wait for all other work, and so may the
        second, which is captured into a graph. All ranks of the stage call this together, with the memory active.

        Raises
        ------
        CommunicationError
            When a collective failed.
        """
        for _ in range(1 + self._stage.cuda_graph) if self._arrays.deferred else ():
            prepared, _ = self._program.prepare_zeros({})
            self._own.bind()
            self._program.run(prepared, self._own)

    def begin(self, number: int) -> None:
        """Begin call, or stream, ``number``."""
        self._under_way = True
        self._lead()
        self._own.begin_call(number)
        if self._results is not None:
            self._exchange = Exchange(self._results, number)

    def end(self) -> None:
        """End a call, or stream, whose results have all been collected."""
        self._under_way = False
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end()

    def leave(self) -> None:
        """End a stream that is under way, on all ranks. Afterwards, no thread of this rank sends or receives."""
        if self._under_way:
            self.fail(HidetDistError(f"rank {self._rank} left its stream before the end"))

    def process(
        self, prepared: PreparedCall, intervals: list[StepInterval] | None = None, *, agreed: bool = False
    ) -> None:
        """Run this rank's stage on all micro-batches of a call, receiving and sending.

        ``agreed`` says whether all ranks have agreed on the sizes of symbolic dims.

        Raises
        ------
        CommunicationError
            When a message or a collective failed.
        InputError
            When an earlier stage computed an index outside of a table of this stage, or ranks of a stream have
            different sizes of a symbolic dim.
        MemoryError
            When there is not enough memory for outputs whose sizes were not known before.
        """
        if self._stage.symbols:
            sizes = self._sizes.exchange(prepared.sizes, self._world, self._own, self._memory, agreed)
            if not prepared.micro_batches:
                self._place(prepared, sizes)
        ends_of = [self._ends.at(micro_batch.sizes) for micro_batch in prepared.micro_batches]
        arrivals = Arrivals(self._forward, [ends.arrivals for ends in ends_of], self._number)
        for number, (micro_batch, ends) in enumerate(zip(prepared.micro_batches, ends_of, strict=True)):
            sizes = local_sizes(self._stage.local_symbols, micro_batch.sizes)
            times = [time.perf_counter_ns()]
            received = arrivals.take(number)
            arguments = {**micro_batch.inputs, **self._completed(received)}
            times.append(time.perf_counter_ns())
            shards = self._shards(micro_batch, ends, sizes)
            inputs = [arguments[place] for place in range(len(self._stage.inputs))]
            if self._receives:
                self._checks.check_indices(inputs, sizes)
            self._own.bind()
            placed = self._program.place(inputs, [buffer for _, buffer in shards], sizes)
            _, kernels = self._program.run(placed, self._own, intervals is not None)
            self._kept.clear()  # a run ends behind them
            times.append(time.perf_counter_ns())
            if ends.outlets:
                self._forward.send([(outlet, shards[place][0]) for place, outlet in ends.outlets])
            self._deliver(micro_batch, ends, [shard for shard, _ in shards])
            times.append(time.perf_counter_ns())
            if intervals is not None:
                nbytes = _summed([one.inlet for one in ends.arrivals]), _summed([end for _, end in ends.outlets])
                intervals += [
                    StepInterval("receive", number, times[0], times[1], nbytes[0]),
                    StepInterval("run", number, times[1], times[2], kernels=kernels),
                    StepInterval("send", number, times[2], times[3], nbytes[1]),
                ]

    def collect(self, prepared: PreparedCall) -> list[Any]:
        """Return the outputs of a processed call, once they have arrived from other stages.

        Raises CommunicationError.
        """
        if self._exchange is not None:
            for micro_batch in prepared.micro_batches:
                received = self._exchange.take()
                if received:
                    self._own.bind()
                for place, inlet in ((route.output, route.inlet) for route in self._ends.at(micro_batch.sizes).routes):
                    if inlet is not None:
                        shard = inlet.complete(self._arrays, self._own, received[place])
                        into = micro_batch.outputs[place]
                        self._arrays.copy(into, shard.reshape(into.shape))
                        self._kept += [shard, received[place]]
        if self._arrays.deferred:
            self._arrays.wait(self._arrays.mark(), self._own)
        self._kept.clear()
        self._world.bind()
        return prepared.results

    def fail(self, error: BaseException) -> None:
        """End all communicators of this rank for an error, and tell the other ranks which ranks are to blame.

        Raises
        ------
        CommunicationError
            In place of a CommunicationError, with the ranks to blame among those of all stages.
        """
        self._under_way = False
        reason, ranks = describe(error), blamed(error, self._rank)
        self._world.give_up(reason, ranks)
        self._own.give_up(reason)
        if self._backward is not None:
            self._backward.interrupt(reason)
            self.end()
            self._backward.give_up(reason)
        if isinstance(error, CommunicationError):
            self._world.check()

    # Shapes and places.

    def _call_signature(self) -> StageManifest:
        """The signature of a call on this stage: the graph's inputs that it reads and the outputs that it returns."""
        count = self._pipeline.micro_batches
        inputs = tuple(
            _times(self._stage.inputs[number], self._pipeline.inputs[place].batch_dim, count)
            for place, number in self._read.items()
        )
        outputs = tuple(
            _times(self._output(place), self._pipeline.outputs[place].batch_dim, count) for place in self._given
        )
        return replace(self._stage, inputs=inputs, outputs=outputs, index_checks=())

    def _unread_inputs(self) -> dict[int, TensorSignature]:
        """The inputs of the graph that only other stages read, whole, by their numbers, in one micro-batch."""
        unread = {}
        for place, x in enumerate(self._pipeline.inputs):
            readers = [self._manifest.stages[reader.stage].inputs[reader.number] for reader in x.readers]
            if place not in self._read and readers and all(one.shape == one.whole_shape for one in readers):
                unread[place] = readers[0]
        return unread

    def _unread_call_signature(self) -> StageManifest:
        """The signature of the inputs of a call that the stage does not read."""
        inputs = tuple(
            _times(signature, self._pipeline.inputs[place].batch_dim, self._pipeline.micro_batches)
            for place, signature in self._unread.items()
        )
        whole = tuple(LocalSymbol(symbol.name, symbol.name, 1) for symbol in self._stage.symbols)
        return replace(self._stage, inputs=inputs, outputs=(), local_symbols=whole, index_checks=())

    def _output(self, place: int) -> TensorSignature:
        """An output of the graph on this rank, in one micro-batch."""
        y = self._pipeline.outputs[place]
        if y.source.stage == self._number:
            return self._stage.outputs[y.source.number]
        signature = self._manifest.stages[y.source.stage].outputs[y.source.number]
        whole = TensorShardSpec.replicated(len(signature.whole_shape))
        return replace(signature, shape=signature.whole_shape, spec=str(whole))

    def _place(self, prepared: PreparedCall, sizes: Mapping[str, int]) -> None:
        """Find memory for the outputs of a call with these ``sizes``, and cut it into micro-batches.

        Raises
        ------
        InputError
            When the given outputs do not fit, or an input holds an index out of range.
        MemoryError
            When there is not enough memory.
        """
        of_micro = self._sizes.of_micro_batches(sizes)
        shapes = [
            [self._output(place).local_at(one, self._mesh, self._group_rank) for place in self._given]
            for one in of_micro
        ]
        dims = [self._pipeline.outputs[place].batch_dim for place in self._given]
        wholes = [_joined([of[n] for of in shapes], dim) for n, dim in enumerate(dims)]
        for number, whole in enumerate(wholes):
            if min(whole, default=1) < 1:
                raise InputError(f"The inputs are too small: output {number} would be {list(whole)}.")
        if prepared.discards:
            places = self._signature.scratch(wholes)
        elif prepared.kind is not None:
            prepared.results, places = self._signature.new_outputs(prepared.kind, wholes, prepared.device)
        else:
            places = self._signature.outputs(prepared.results, wholes, prepared.inputs)
        parts = []
        for number, one in enumerate(of_micro):
            inputs = {
                own: self._part(buffer, place, own, of_micro, number)
                for (place, own), buffer in zip(self._read.items(), prepared.inputs, strict=True)
            }
            if not self._receives:
                local = local_sizes(self._stage.local_symbols, one)
                self._checks.check_indices([inputs[n] for n in range(len(self._stage.inputs))], local)
            outputs = {}
            for n, (place, buffer) in enumerate(zip(self._given, places, strict=True)):
                outputs[place] = _cut(_view(buffer), dims[n], [of[n] for of in shapes], number)
            parts.append(MicroBatchCall(one, inputs, outputs, dict(zip(self._given, places, strict=True))))
        prepared.micro_batches = parts

    def _part(
        self, buffer: TensorBuffer, place: int, own: int, sizes: Sequence[Mapping[str, int]], micro_batch: int
    ) -> TensorBuffer:
        """Make a micro-batch of a contiguous input of the graph, contiguous as well."""
        dim = self._pipeline.inputs[place].batch_dim
        if dim is None or len(sizes) == 1:
            return buffer
        shapes = [self._stage.inputs[own].local_at(one, self._mesh, self._group_rank) for one in sizes]
        part = _cut(_view(buffer), dim, shapes, micro_batch)
        arrays = self._host if buffer.device[0] in (dlpack.CPU, dlpack.CUDA_HOST) else self._arrays
        packed = arrays.packed(part)
        return replace(
            buffer,
            address=packed.ctypes.data,
            shape=part.shape,
            nbytes=part.nbytes,
            owner=(packed, buffer),
        )

    def _shards(
        self, micro_batch: MicroBatchCall, ends: Ends, sizes: Mapping[str, int]
    ) -> list[tuple[np.ndarray, TensorBuffer]]:
        """Find memory for the stage's outputs, within the graph's outputs if possible.

        An output that is sent on a stream is in separate memory, because the call may return before it is taken.
        """
        sent_later = {number for number, _ in ends.outlets} | self._travelling if self._arrays.deferred else set()
        shards = []
        for number, shape in enumerate(self._program.output_shapes(sizes)):
            dtype = raw_dtype(dtype_name(self._stage.outputs[number]))
            for place in () if number in sent_later else self._given:
                source = self._pipeline.outputs[place].source
                if (source.stage, source.number) == (self._number, number):
                    direct = micro_batch.outputs[place]
                    if direct.flags.c_contiguous:
                        shards.append((direct, self._buffer(direct, number, micro_batch.buffers[place].device)))
                        break
            else:
                if number in self._travelling | sent_later:  # it is sent while the next micro-batch is computed
                    shard = self._arrays.empty(shape, dtype)
                else:
                    if number not in self._scratch or self._scratch[number].shape != shape:
                        self._scratch[number] = self._arrays.empty(shape, dtype)
                    shard = self._scratch[number]
                shards.append((shard, self._buffer(shard, number, self._arrays.device)))
        return shards

    def _buffer(self, shard: np.ndarray, number: int, device: tuple[int, int]) -> TensorBuffer:
        dtype = dtype_name(self._stage.outputs[number])
        return TensorBuffer(shard.ctypes.data, shard.shape, dtype, shard.nbytes, True, device, False, shard)

    def _deliver(self, micro_batch: MicroBatchCall, ends: Ends, shards: Sequence[np.ndarray]) -> None:
        """Copy this rank's outputs of the graph to the call's outputs, and queue them for other ranks."""
        computed = {}
        for place, y in enumerate(self._pipeline.outputs):
            if y.source.stage != self._number:
                continue
            shard = shards[y.source.number]
            computed[place] = shard
            if place in self._given:
                into = micro_batch.outputs[place]
                if into.size and into.ctypes.data != shard.ctypes.data:
                    self._arrays.copy(into, shard.reshape(into.shape))
                    self._kept.append(shard)
        if self._exchange is not None:
            self._exchange.add(Computed(computed, ends.routes))

    # Messages.

    def _completed(self, received: Sequence[tuple[Arrival, np.ndarray]]) -> dict[int, TensorBuffer]:
        """Complete the stage's inputs that earlier stages computed, by their numbers in the stage."""
        self._own.bind()
        arguments = {}
        for arrival, part in received:
            shard = arrival.inlet.complete(self._arrays, self._own, part)
            arguments[arrival.number] = TensorBuffer(
                shard.ctypes.data,
                shard.shape,
                dtype_name(self._stage.inputs[arrival.number]),
                shard.nbytes,
                True,
                self._arrays.device,
                False,
                (shard, part),
            )
        return arguments


def _view(buffer: TensorBuffer) -> np.ndarray:
    """View the memory of a contiguous tensor. The view keeps it alive, because a thread may send from it later."""
    return raw_view(buffer.address, buffer.shape, raw_dtype(buffer.dtype), buffer)


def _summed(ends: Sequence[Inlet | Outlet]) -> dict[int, int]:
    """Sum the bytes that cross at several ends, by the other rank."""
    result: dict[int, int] = {}
    for end in ends:
        for rank, nbytes in end.nbytes.items():
            result[rank] = result.get(rank, 0) + nbytes
    return result


def _times(signature: TensorSignature, dim: int | None, count: int) -> TensorSignature:
    """Make the signature of a tensor of ``count`` micro-batches from that of one; a symbolic dim has any size."""
    if dim is None:
        return signature

    def times(shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return tuple(n * count if place == dim and isinstance(n, int) else n for place, n in enumerate(shape))

    return replace(signature, shape=times(signature.shape), whole_shape=times(signature.whole_shape))


def _joined(shapes: Sequence[tuple[int, ...]], dim: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor whose parts along a dim have these shapes; without a dim, that of one part."""
    if dim is None:
        return shapes[0]
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


def _cut(whole: np.ndarray, dim: int | None, shapes: Sequence[tuple[int, ...]], number: int) -> np.ndarray:
    """Return part ``number`` of a tensor whose parts along a dim have these shapes; without a dim, the whole tensor."""
    if dim is None or len(shapes) == 1:
        return whole
    begin = sum(shape[dim] for shape in shapes[:number])
    return whole[(slice(None),) * dim + (slice(begin, begin + shapes[number][dim]),)]
