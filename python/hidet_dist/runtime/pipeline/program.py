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

from hidet_dist.artifacts.manifest import Manifest, StageManifest, TensorSignature
from hidet_dist.errors import CommunicationError, InputError
from hidet_dist.runtime import dlpack
from hidet_dist.runtime.agreement import describe
from hidet_dist.runtime.arguments import Signature
from hidet_dist.runtime.arrays import HostArrays, raw_view
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import Memory
from hidet_dist.runtime.pipeline.arrivals import Arrival, Arrivals
from hidet_dist.runtime.pipeline.channel import Channel
from hidet_dist.runtime.pipeline.exchange import Exchange, Route
from hidet_dist.runtime.pipeline.messages import Crossing, Inlet, Outlet, blamed, raw_dtype
from hidet_dist.runtime.program import Program
from hidet_dist.runtime.tensors import NUMPY, Buffer
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.transfer import MeshLayout, Transfer, plan_transfer


@dataclass(frozen=True)
class PreparedCall:
    """A call whose inputs and outputs are checked and in memory.

    Attributes
    ----------
    inputs: for each micro-batch, the stage's inputs that are inputs of the graph, by their numbers in the stage.
    results: the outputs as they are returned; empty on ranks that return none.
    outputs: the memory of the outputs, by the numbers of the graph's outputs.
    buffers: the same, with their devices and owners.
    """

    inputs: Sequence[Mapping[int, Buffer]]
    results: list[Any]
    outputs: Mapping[int, np.ndarray]
    buffers: Mapping[int, Buffer]


@dataclass(frozen=True)
class Interval:
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
    manifest: Manifest
        The manifest of the artifacts, with a pipeline.
    rank: int
        This rank, among those of all stages.
    program: Program
        The stage's program.
    memory: Memory
        The memory of the program's tensors.
    world: Communicator
        The communicator of all ranks, for messages forward.
    own: Communicator
        The communicator of the stage's ranks.
    backward: Communicator or None
        The communicator of all ranks for results; None if no results are sent (:meth:`exchanges_results`).
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        program: Program,
        memory: Memory,
        world: Communicator,
        own: Communicator,
        backward: Communicator | None,
    ):
        assert manifest.pipeline is not None
        self._manifest, self._pipeline = manifest, manifest.pipeline
        self._number = manifest.stage_of(rank)
        self._stage = manifest.stages[self._number]
        self._rank, self._ranks = rank, manifest.ranks_of(self._number)
        self._program, self._memory = program, memory
        self._world, self._own, self._backward = world, own, backward
        self._arrays, self._host = memory.arrays(), HostArrays()
        self._forward = Channel(world, memory.arrays(world.stream))
        self._results = None if backward is None else Channel(backward, memory.arrays(backward.stream))
        pipeline, number = self._pipeline, self._number
        # The inputs of the graph that the stage reads, with their numbers in the stage.
        self._read = {
            place: reader.number
            for place, x in enumerate(pipeline.inputs)
            for reader in x.readers
            if reader.stage == number
        }
        self._given = [place for place in range(len(pipeline.outputs)) if pipeline.gives_results(number)]
        self._signature = Signature(self._call_signature(), memory, list(self._read))
        self._checks = Signature(self._stage, memory)
        self._output_shapes = [tuple(int(n) for n in self._call_output(place).shape) for place in self._given]
        self._inlets: dict[int, tuple[Inlet, ...]] = {}
        self._outlets: list[tuple[int, Outlet]] = []
        self._receives: list[Arrival] = []
        for boundary in pipeline.boundaries:
            for reader in boundary.readers:
                source = boundary.source
                if number == source.stage:
                    self._outlets.append((source.number, self._outlet(source.number, reader.stage, reader.number)))
                if number == reader.stage:
                    transfer, dtype = self._transfer(source.stage, source.number, reader.stage, reader.number)
                    peers = manifest.ranks_of(source.stage)
                    inlet = Inlet(Crossing(transfer, self._ranks.index(rank), peers, dtype))
                    self._receives.append(Arrival(source.stage, reader.number, inlet))
        self._routes = self._result_routes()
        self._scratch: dict[int, np.ndarray] = {}
        self._kept: list[np.ndarray] = []  # arrays of copies that are enqueued behind the last run
        self._exchange: Exchange | None = None

    @staticmethod
    def exchanges_results(pipeline: Pipeline) -> bool:
        """Whether results are sent between stages."""
        return any(
            stage != y.source.stage and pipeline.gives_results(stage)
            for y in pipeline.outputs
            for stage in range(len(pipeline.stages))
        )

    @property
    def gives_results(self) -> bool:
        """Whether this rank returns the outputs of the graph."""
        return self._pipeline.gives_results(self._number)

    @property
    def lag(self) -> int:
        """The number of batches of a stream that a rank of this stage takes before it returns the first results.

        In a full pipeline, these results have then arrived.
        """
        return 0 if self._backward is None else len(self._pipeline.stages) - self._number

    def prepare(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> tuple[PreparedCall, Mapping[str, int]]:
        """Check and place the inputs and outputs of a call: those of the graph, for all micro-batches.

        Inputs that the stage does not read may be anything, such as None.

        Returns
        -------
        The call, and the sizes of symbolic dims: none, as pipelines have no symbolic dims.

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
        buffers = self._signature.packed(self._signature.inputs([inputs[place] for place in self._read]))
        if outputs is None:
            kind = self._signature.kind(inputs) if self._given else NUMPY
            results, places = self._signature.new_outputs(kind, self._output_shapes, self._result_device(inputs))
        else:
            results, places = list(outputs), self._signature.outputs(outputs, self._output_shapes, buffers)
        return self._prepared(buffers, results, places), {}

    def _result_device(self, inputs: Sequence[Any]) -> tuple[int, int]:
        """Return the device of new outputs: this rank's if the first input is on a device, or else the host."""
        first = inputs[0] if inputs else None  # which the stage may not read, so that it may be anything
        on_device = hasattr(first, "__dlpack_device__") and dlpack.device_of(first)[0] == dlpack.CUDA
        return self._arrays.device if on_device else (dlpack.CPU, 0)

    def prepare_zeros(self, sizes: Mapping[str, int]) -> tuple[PreparedCall, Mapping[str, int]]:
        """Prepare a call on zeros whose outputs are thrown away; ``sizes`` of symbolic dims must be empty."""
        if sizes:
            raise InputError(f"The program has no symbolic dim {', '.join(sorted(sizes))}; it has none.")
        places = self._signature.scratch(self._output_shapes)
        return self._prepared(self._signature.zeros({}), [], places), {}

    def run(self, prepared: PreparedCall, number: int, record: bool = False) -> tuple[list[Any], list[Interval]]:
        """Make call ``number``; return the outputs and, with ``record``, this rank's steps.

        Raises
        ------
        CommunicationError
            When a message or a collective failed, on this rank or another.
        """
        intervals: list[Interval] = []
        self.begin(number)
        try:
            self.process(prepared, intervals if record else None)
            processed = time.perf_counter_ns()
            results = self.collect(prepared)
            if record and self._exchange is not None:
                inlets = [route.inlet for route in self._routes if route.inlet is not None]
                nbytes = _summed(inlets, len(prepared.inputs))
                intervals.append(Interval("results", None, processed, time.perf_counter_ns(), nbytes))
        except BaseException as error:
            self.fail(error)
            raise
        self.end()
        return results, intervals

    def begin(self, number: int) -> None:
        """Begin call, or stream, ``number``."""
        self._own.begin_call(number)
        if self._results is not None:
            self._exchange = Exchange(self._results, self._routes, number)

    def end(self) -> None:
        """End a call, or stream, whose results have all been collected."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end()

    def close(self) -> None:
        """End an unfinished stream, so that communicators can be closed."""
        if self._exchange is not None:
            self.fail(RuntimeError("the partition was closed within a stream"))

    def process(self, prepared: PreparedCall, intervals: list[Interval] | None = None) -> None:
        """Run this rank's stage on all micro-batches of a call, receiving and sending.

        Raises
        ------
        CommunicationError
            When a message or a collective failed.
        InputError
            When an earlier stage computed an index outside of a table of this stage.
        """
        arrivals = Arrivals(self._forward, self._receives, self._number, len(prepared.inputs))
        for micro_batch, given in enumerate(prepared.inputs):
            times = [time.perf_counter_ns()]
            received = arrivals.take(micro_batch)
            arguments = {**given, **self._completed(received)}
            times.append(time.perf_counter_ns())
            shards = self._shards(prepared, micro_batch)
            inputs = [arguments[place] for place in range(len(self._stage.inputs))]
            if self._receives:
                self._checks.check_indices(inputs, {})
            self._own.bind()
            placed = self._program.place(inputs, [buffer for _, buffer in shards])
            _, kernels = self._program.run(placed, self._own, intervals is not None)
            self._kept.clear()  # a run ends behind them
            times.append(time.perf_counter_ns())
            if self._outlets:
                self._forward.send([(outlet, shards[number][0]) for number, outlet in self._outlets])
            self._deliver(prepared, micro_batch, [shard for shard, _ in shards])
            times.append(time.perf_counter_ns())
            if intervals is not None:
                nbytes = _summed([one.inlet for one in self._receives]), _summed([end for _, end in self._outlets])
                intervals += [
                    Interval("receive", micro_batch, times[0], times[1], nbytes[0]),
                    Interval("run", micro_batch, times[1], times[2], kernels=kernels),
                    Interval("send", micro_batch, times[2], times[3], nbytes[1]),
                ]

    def collect(self, prepared: PreparedCall) -> list[Any]:
        """Return the outputs of a processed call, once they have arrived from other stages.

        Raises CommunicationError.
        """
        if self._exchange is not None:
            for micro_batch in range(len(prepared.inputs)):
                received = self._exchange.take()
                if received:
                    self._own.bind()
                for place, inlet in ((route.output, route.inlet) for route in self._routes):
                    if inlet is not None:
                        shard = inlet.complete(self._arrays, self._own, received[place])
                        into = self._slice(prepared, place, micro_batch)
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
        outputs = tuple(self._call_output(place) for place in self._given)
        return replace(self._stage, inputs=inputs, outputs=outputs, index_checks=())

    def _call_output(self, place: int) -> TensorSignature:
        """An output of the graph on this rank."""
        y = self._pipeline.outputs[place]
        signature = self._manifest.stages[y.source.stage].outputs[y.source.number]
        if y.source.stage != self._number:  # it is replicated
            signature = replace(signature, shape=signature.whole_shape)
        return _times(signature, y.batch_dim, self._pipeline.micro_batches)

    def _prepared(self, buffers: Sequence[Buffer], results: list[Any], places: Sequence[Buffer]) -> PreparedCall:
        parts: list[dict[int, Buffer]] = []
        for micro_batch in range(self._pipeline.micro_batches):
            own = {
                number: self._part(buffer, self._pipeline.inputs[place].batch_dim, micro_batch)
                for (place, number), buffer in zip(self._read.items(), buffers, strict=True)
            }
            if not self._receives:
                self._checks.check_indices([own[n] for n in range(len(self._stage.inputs))], {})
            parts.append(own)
        outputs = {place: _view(buffer) for place, buffer in zip(self._given, places, strict=True)}
        return PreparedCall(parts, [*results] if results else [], outputs, dict(zip(self._given, places, strict=True)))

    def _part(self, buffer: Buffer, dim: int | None, micro_batch: int) -> Buffer:
        """Make a micro-batch of a contiguous tensor, contiguous as well."""
        if dim is None or self._pipeline.micro_batches == 1:
            return buffer
        part = _cut(_view(buffer), dim, micro_batch, self._pipeline.micro_batches)
        arrays = self._host if buffer.device[0] in (dlpack.CPU, dlpack.CUDA_HOST) else self._arrays
        packed = arrays.packed(part)
        return replace(
            buffer,
            address=packed.ctypes.data,
            shape=part.shape,
            nbytes=part.nbytes,
            owner=(packed, buffer),
        )

    def _slice(self, prepared: PreparedCall, place: int, micro_batch: int) -> np.ndarray:
        """View the part of an output of the graph that a micro-batch has."""
        return _cut(
            prepared.outputs[place], self._pipeline.outputs[place].batch_dim, micro_batch, self._pipeline.micro_batches
        )

    def _shards(self, prepared: PreparedCall, micro_batch: int) -> list[tuple[np.ndarray, Buffer]]:
        """Find memory for the stage's outputs, within the graph's outputs if possible.

        An output that is sent on a stream is in separate memory, because the call may return before it is taken.
        """
        travelling = {self._pipeline.outputs[route.output].source.number for route in self._routes if route.outlet}
        sent_later = {number for number, _ in self._outlets} | travelling if self._arrays.deferred else set()
        shards = []
        for number, signature in enumerate(self._stage.outputs):
            shape, dtype = tuple(int(n) for n in signature.shape), raw_dtype(_name(signature))
            for place in () if number in sent_later else self._given:
                source = self._pipeline.outputs[place].source
                if (source.stage, source.number) == (self._number, number):
                    direct = self._slice(prepared, place, micro_batch)
                    if direct.flags.c_contiguous:
                        shards.append((direct, self._buffer(direct, number, prepared.buffers[place].device)))
                        break
            else:
                if number in travelling | sent_later:  # it is sent while the next micro-batch is computed
                    shard = self._arrays.empty(shape, dtype)
                else:
                    if number not in self._scratch:
                        self._scratch[number] = self._arrays.empty(shape, dtype)
                    shard = self._scratch[number]
                shards.append((shard, self._buffer(shard, number, self._arrays.device)))
        return shards

    def _buffer(self, shard: np.ndarray, number: int, device: tuple[int, int]) -> Buffer:
        dtype = _name(self._stage.outputs[number])
        return Buffer(shard.ctypes.data, shard.shape, dtype, shard.nbytes, True, device, False, shard)

    def _deliver(self, prepared: PreparedCall, micro_batch: int, shards: Sequence[np.ndarray]) -> None:
        """Copy this rank's outputs of the graph to the call's outputs, and queue them for other ranks."""
        computed = {}
        for place, y in enumerate(self._pipeline.outputs):
            if y.source.stage != self._number:
                continue
            shard = shards[y.source.number]
            computed[place] = shard
            if place in self._given:
                into = self._slice(prepared, place, micro_batch)
                if into.size and into.ctypes.data != shard.ctypes.data:
                    self._arrays.copy(into, shard.reshape(into.shape))
                    self._kept.append(shard)
        if self._exchange is not None:
            self._exchange.add(computed)

    # Messages.

    def _completed(self, received: Sequence[tuple[Arrival, np.ndarray]]) -> dict[int, Buffer]:
        """Complete the stage's inputs that earlier stages computed, by their numbers in the stage."""
        self._own.bind()
        arguments = {}
        for arrival, part in received:
            shard = arrival.inlet.complete(self._arrays, self._own, part)
            signature = self._stage.inputs[arrival.number]
            shape = tuple(int(n) for n in signature.shape)
            arguments[arrival.number] = Buffer(
                shard.ctypes.data,
                shape,
                _name(signature),
                shard.nbytes,
                True,
                self._arrays.device,
                False,
                (shard, part),
            )
        return arguments

    def _transfer(self, source: int, output: int, target: int, number: int | None) -> tuple[Transfer, str]:
        """Plan the transfer of an output to another stage's input ``number``, or replicated; also return its dtype."""
        stages = self._manifest.stages
        y = stages[source].outputs[output]
        shape = tuple(int(n) for n in y.whole_shape)
        replicated = TensorShardSpec.replicated(len(shape))
        spec = replicated if number is None else TensorShardSpec.parse(stages[target].inputs[number].spec)
        layouts = (
            MeshLayout(DeviceMesh(stages[source].mesh_shape), TensorShardSpec.parse(y.spec)),
            MeshLayout(DeviceMesh(stages[target].mesh_shape), spec),
        )
        return plan_transfer(shape, *layouts), _name(y)

    def _outlet(self, output: int, target: int, number: int | None) -> Outlet:
        transfer, dtype = self._transfer(self._number, output, target, number)
        return Outlet(Crossing(transfer, self._ranks.index(self._rank), self._manifest.ranks_of(target), dtype))

    def _result_routes(self) -> list[Route]:
        """List the routes of results that this rank takes part in, in the order that all ranks share."""
        routes = []
        for place, y in enumerate(self._pipeline.outputs):
            for target in range(len(self._pipeline.stages)):
                if target == y.source.stage or not self._pipeline.gives_results(target):
                    continue
                if self._number == y.source.stage:
                    routes.append(Route(place, self._outlet(y.source.number, target, None), None))
                elif self._number == target:
                    transfer, dtype = self._transfer(y.source.stage, y.source.number, target, None)
                    senders = self._manifest.ranks_of(y.source.stage)
                    inlet = Inlet(Crossing(transfer, self._ranks.index(self._rank), senders, dtype))
                    routes.append(Route(place, None, inlet))
        return routes


def _view(buffer: Buffer) -> np.ndarray:
    """View the memory of a contiguous tensor, which the view does not keep alive."""
    return raw_view(buffer.address, buffer.shape, raw_dtype(buffer.dtype))


def _summed(ends: Sequence[Inlet | Outlet], times: int = 1) -> dict[int, int]:
    """Sum the bytes that cross at several ends, by the other rank, in so many micro-batches."""
    result: dict[int, int] = {}
    for end in ends:
        for rank, nbytes in end.nbytes.items():
            result[rank] = result.get(rank, 0) + times * nbytes
    return result


def _times(signature: TensorSignature, dim: int | None, count: int) -> TensorSignature:
    """Make the signature of a tensor of ``count`` micro-batches from that of one."""
    if dim is None:
        return signature
    shape, whole = list(signature.shape), list(signature.whole_shape)
    shape[dim], whole[dim] = int(shape[dim]) * count, int(whole[dim]) * count
    return replace(signature, shape=tuple(shape), whole_shape=tuple(whole))


def _cut(whole: np.ndarray, dim: int | None, number: int, count: int) -> np.ndarray:
    """Return part ``number`` of ``count`` along a dim, or the whole tensor without a dim."""
    if dim is None or count == 1:
        return whole
    extent = whole.shape[dim] // count
    return whole[(slice(None),) * dim + (slice(number * extent, (number + 1) * extent),)]


def _name(signature: TensorSignature) -> str:
    """Return the name of a tensor's dtype in NumPy."""
    return "bool" if signature.dtype == "boolean" else signature.dtype
