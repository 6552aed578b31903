"""Pipelines: stages on disjoint ranks, the tensors that cross between stages, and the micro-batches.

A plan of several stages has a pipeline, and so has the manifest built from it. The pipeline describes how the stages
form one graph: the operators of each stage, and the outputs of stages that are inputs of others. The sharding specs are
in the inputs and outputs of the stages' plans.

The graph that is cut into stages is that of one micro-batch; with one micro-batch, it is the whole graph.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.codec import LARGEST, OMITTED, RUNS, Positive
from hidet_dist.errors import SpecError
from hidet_dist.limits import MOST_MICRO_BATCHES
from hidet_dist.spec.objectives import DEFAULT, OBJECTIVES

ALL, LAST = "all", "last"
RESULTS = (ALL, LAST)
"""The ranks on which a call returns the graph's outputs: all of them, or those of the last stage."""


@dataclass(frozen=True)
class Port:
    """An input or an output of a stage: the stage's number, and the number of the input or output in the stage."""

    stage: int
    number: int

    def to_plain(self) -> list[int]:
        """Convert to plain JSON values."""
        return [self.stage, self.number]

    @classmethod
    def from_plain(cls, data: Any) -> Port:
        """Read the JSON values that :meth:`to_plain` makes. Raises SpecError for others."""
        if not isinstance(data, list) or len(data) != 2 or not all(is_whole(number, 0, LARGEST) for number in data):
            raise SpecError(f"A port must be the numbers of a stage and of its input or output; got {shown(data)}.")
        return cls(*data)

    def __str__(self) -> str:
        return f"{self.number} of stage {self.stage}"


@dataclass(frozen=True)
class Boundary:
    """A tensor that one stage computes and later ones read.

    Attributes
    ----------
    tensor: its name in the graph that was cut, such as ``t7.0``.
    source: the output of the stage that computes it.
    readers: the stages' inputs that take the tensor, in the order of the stages; one per stage that reads it.
    nbytes: bytes of the whole tensor, in one micro-batch.
    seconds: predicted time of sending it to all readers, in one micro-batch.
    """

    tensor: str
    source: Port
    readers: tuple[Port, ...]
    nbytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class PipelineInput:
    """An input of the graph: the stages' inputs that take it, and the dim that micro-batches split; None for no dim."""

    readers: tuple[Port, ...]
    batch_dim: int | None = None


@dataclass(frozen=True)
class PipelineOutput:
    """An output of the graph: the stage's output that computes it, and the dim split by micro-batches, or None.

    ``seconds`` is the predicted time of sending it to the last stage, in one micro-batch; 0 if that computes it.
    """

    source: Port
    batch_dim: int | None = None
    seconds: Annotated[float, OMITTED] = 0.0


@dataclass(frozen=True)
class PipelineStage:
    """The operators of a stage, as numbers in the graph that is cut, and its ranks.

    Both are in ascending order. The n-th rank of the stage is the n-th device of the stage's mesh.
    """

    operators: Annotated[tuple[int, ...], RUNS]
    ranks: Annotated[tuple[int, ...], RUNS]


@dataclass(frozen=True)
class StageTensor:
    """The properties of a stage's input or output against which a pipeline is checked; the shape is the whole tensor's.

    ``replicated`` says whether every rank of the stage holds the tensor whole; ``split`` has the dims that its ranks
    split.
    """

    dtype: str
    shape: tuple[int | str, ...]
    replicated: bool
    split: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageTensors:
    """The properties of a stage against which a pipeline is checked: its number of ranks, inputs and outputs."""

    size: int
    inputs: tuple[StageTensor, ...]
    outputs: tuple[StageTensor, ...]


@dataclass(frozen=True)
class PipelineSearch:
    """The result of the search that chose a pipeline: the objective's predicted seconds, and a lower bound of them.

    The bound is 0 if the time limit left pipelines out.
    """

    objective: str
    seconds: float
    bound_seconds: float

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SpecError(f"The objective must be one of {', '.join(OBJECTIVES)}; got {shown(self.objective)}.")

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds, the most that a better pipeline could save."""
        return max(0.0, 1 - self.bound_seconds / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class Pipeline:
    """The stages of a plan as one graph.

    A stage reads tensors of earlier stages only. Its ranks follow those of the stage before.

    Attributes
    ----------
    stages: the operators and ranks of each stage.
    boundaries: the tensors that cross between stages, in the order of their sources.
    inputs, outputs: those of the whole graph.
    micro_batches: the number of micro-batches of a call.
    results: ``all`` or ``last``, of :data:`RESULTS`.
    search: the result of the search that chose it; None for a given or edited pipeline.
    delivery_seconds: predicted time of sending the outputs from the last stage to the ranks of all others that return
        them, in one micro-batch.
    """

    stages: tuple[PipelineStage, ...]
    boundaries: tuple[Boundary, ...]
    inputs: tuple[PipelineInput, ...]
    outputs: tuple[PipelineOutput, ...]
    micro_batches: Positive = 1
    results: str = ALL
    search: Annotated[PipelineSearch | None, OMITTED] = None
    delivery_seconds: Annotated[float, OMITTED] = 0.0

    @property
    def is_buffered(self) -> bool:
        """Whether a device holds the inputs of the next micro-batch beside those of the present one."""
        name = DEFAULT if self.search is None else self.search.objective
        return OBJECTIVES[name].is_buffered(self.micro_batches)

    def gives_results(self, stage: int) -> bool:
        """Tell whether a call returns the graph's outputs on the ranks of a stage."""
        return self.results == ALL or stage == len(self.stages) - 1

    @property
    def exchanges_results(self) -> bool:
        """Whether results are sent between stages."""
        stages = range(len(self.stages))
        return any(stage != y.source.stage and self.gives_results(stage) for y in self.outputs for stage in stages)

    def interval_seconds(self, seconds: Sequence[float]) -> float:
        """Predict the seconds from one micro-batch to the next, which are those of the slowest stage."""
        return max(self.period_seconds(seconds))

    def period_seconds(self, seconds: Sequence[float]) -> list[float]:
        """Predict the seconds for which one micro-batch occupies each stage.

        A stage receives a micro-batch, computes, and sends its results before it takes the next micro-batch. The last
        stage has all outputs of the graph, and delivers them to the ranks of the other stages.
        """
        sends, receives = [0.0] * len(seconds), [0.0] * len(seconds)
        for boundary in self.boundaries:
            sends[boundary.source.stage] += boundary.seconds
            for reader in boundary.readers:
                receives[reader.stage] += boundary.seconds / len(boundary.readers)
        for y in self.outputs:
            sends[y.source.stage] += y.seconds
            receives[-1] += y.seconds
        sends[-1] += self.delivery_seconds
        return [
            computing + sending + receiving
            for computing, sending, receiving in zip(seconds, sends, receives, strict=True)
        ]

    def call_seconds(self, seconds: Sequence[float]) -> float:
        """Predict the seconds of a call from those of the stages.

        The first micro-batch takes the longest path through the stages; in a chain, that is their sum. A stage starts
        when the stages that it reads have sent all of their messages. Each further micro-batch adds the seconds of the
        slowest stage (Zheng et al., "Alpa", OSDI 2022, section 5).
        """
        last = len(seconds) - 1
        sent: list[float] = []  # when each stage has sent its messages
        for number, stage_seconds in enumerate(seconds):
            sources = [
                one.source.stage for one in self.boundaries if any(reader.stage == number for reader in one.readers)
            ]
            sources += [y.source.stage for y in self.outputs if number == last and y.source.stage != last]
            messages = [one.seconds for one in self.boundaries if one.source.stage == number]
            messages += [y.seconds for y in self.outputs if y.source.stage == number]
            ready = max((sent[source] for source in sources), default=0.0)
            sent.append(math.fsum([ready, stage_seconds, *messages]))
        first = max(sent) + self.delivery_seconds
        return first + (self.micro_batches - 1) * self.interval_seconds(seconds)

    def check(self, stages: Sequence[StageTensors]) -> None:
        """Check that a pipeline is consistent in itself and with its stages.

        Raises
        ------
        SpecError
            When it is not; the message names the part that does not fit.
        """
        if len(stages) != len(self.stages):
            raise SpecError(f"The pipeline has {len(self.stages)} stages; there are {len(stages)}.")
        if self.results not in RESULTS:
            raise SpecError(f"The pipeline's results must be one of {', '.join(RESULTS)}; got {self.results!r}.")
        if not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise SpecError(
                f"A pipeline has 1 to {MOST_MICRO_BATCHES} micro-batches; this one has {self.micro_batches}."
            )
        self._check_operators()
        self._check_ranks(stages)
        self._check_boundaries(stages)
        self._check_inputs(stages)
        self._check_outputs(stages)

    def _check_operators(self) -> None:
        for number, stage in enumerate(self.stages):
            if not stage.operators or any(a >= b for a, b in itertools.pairwise(stage.operators)):
                raise SpecError(f"The operators of stage {number} must be one or more, each once, and ascend.")
        count = sum(len(stage.operators) for stage in self.stages)
        if {number for stage in self.stages for number in stage.operators} != set(range(count)):
            raise SpecError(f"The stages must have each of the operators 0 to {count - 1} once.")

    def _check_ranks(self, stages: Sequence[StageTensors]) -> None:
        first = 0
        for number, (stage, tensors) in enumerate(zip(self.stages, stages, strict=True)):
            if stage.ranks != tuple(range(first, first + tensors.size)):
                raise SpecError(
                    f"Stage {number} has a mesh of {tensors.size} devices, so that its ranks are {first} to "
                    f"{first + tensors.size - 1}, after those of the stages before; got {_shown(stage.ranks)}."
                )
            first += tensors.size

    def _check_boundaries(self, stages: Sequence[StageTensors]) -> None:
        for boundary in self.boundaries:
            what = f"the boundary {boundary.tensor}"
            source = _output(stages, boundary.source, what)
            readers = [reader.stage for reader in boundary.readers]
            if not readers or any(a >= b for a, b in itertools.pairwise([boundary.source.stage, *readers])):
                raise SpecError(
                    f"{what} is computed by stage {boundary.source.stage}; the stages that read it must be later ones, "
                    f"each once, and ascend; got {_shown(readers)}."
                )
            for reader in boundary.readers:
                read = _input(stages, reader, what)
                if (read.dtype, read.shape) != (source.dtype, source.shape):
                    raise SpecError(
                        f"{what} is computed as {_text(source)}; input {reader} must be the same, and is {_text(read)}."
                    )
        sources = Counter(boundary.source for boundary in self.boundaries)
        for port, count in sources.items():
            if count > 1:
                raise SpecError(f"Output {port} is {count} boundaries; it must be one.")

    def _check_inputs(self, stages: Sequence[StageTensors]) -> None:
        fed = Counter(
            reader for group in (self.boundaries, self.inputs) for tensor in group for reader in tensor.readers
        )
        for number, stage in enumerate(stages):
            for place in range(len(stage.inputs)):
                if fed[Port(number, place)] != 1:
                    raise SpecError(
                        f"Input {Port(number, place)} must be one boundary or one input of the graph; it is "
                        f"{fed[Port(number, place)]}."
                    )
        for number, x in enumerate(self.inputs):
            what = f"input {number} of the graph"
            tensors = [_input(stages, reader, what) for reader in x.readers]
            for reader, tensor in zip(x.readers, tensors, strict=True):
                if (tensor.dtype, tensor.shape) != (tensors[0].dtype, tensors[0].shape):
                    raise SpecError(f"{what} is {_text(tensors[0])} and, as input {reader}, {_text(tensor)}.")
                _check_batch_dim(what, x.batch_dim, tensor)

    def _check_outputs(self, stages: Sequence[StageTensors]) -> None:
        used = {boundary.source for boundary in self.boundaries} | {y.source for y in self.outputs}
        for number, tensors in enumerate(stages):
            for place in range(len(tensors.outputs)):
                if Port(number, place) not in used:
                    raise SpecError(f"Output {Port(number, place)} is neither a boundary nor an output of the graph.")
        for number, y in enumerate(self.outputs):
            what = f"output {number} of the graph"
            tensor = _output(stages, y.source, what)
            _check_batch_dim(what, y.batch_dim, tensor)
            travels = self.results == ALL or y.source.stage != len(self.stages) - 1
            if travels and not tensor.replicated:
                raise SpecError(
                    f"{what} is returned on ranks of other stages as well, so stage {y.source.stage} must have it "
                    "replicated."
                )


def _check_batch_dim(what: str, dim: int | None, tensor: StageTensor) -> None:
    if dim is not None and not 0 <= dim < len(tensor.shape):
        raise SpecError(f"{what} is {_text(tensor)}; it has no dim {dim} for micro-batches.")
    if dim in tensor.split:
        raise SpecError(
            f"{what} is split along dim {dim} over the ranks of its stage, and micro-batches split the same dim: a "
            "rank's part of the batch would not be that of the micro-batches. Leave the dim whole in the spec, or use "
            "one micro-batch."
        )


def _input(stages: Sequence[StageTensors], port: Port, what: str) -> StageTensor:
    if not (0 <= port.stage < len(stages) and 0 <= port.number < len(stages[port.stage].inputs)):
        raise SpecError(f"{what} is read as input {port}, which does not exist.")
    return stages[port.stage].inputs[port.number]


def _output(stages: Sequence[StageTensors], port: Port, what: str) -> StageTensor:
    if not (0 <= port.stage < len(stages) and 0 <= port.number < len(stages[port.stage].outputs)):
        raise SpecError(f"{what} is output {port}, which does not exist.")
    return stages[port.stage].outputs[port.number]


def _text(tensor: StageTensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") or "none"
