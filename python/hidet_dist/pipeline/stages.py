"""Planned stages, the messages between them, and the pipelines that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hidet_dist.cost.transfer import transfer_seconds
from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster
from hidet_dist.machine.slices import MeshSlice, link_between
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.micro_batches import MicroBatchGraph
from hidet_dist.partitioning.stages import cut_graph
from hidet_dist.pipeline.given import with_seconds
from hidet_dist.pipeline.messages import delivery_seconds
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.tables import part_names
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import SearchOptions, SearchResult, search
from hidet_dist.search.formulation.devices import memory_budget, with_budget
from hidet_dist.search.limits import Limits
from hidet_dist.spec import DeviceMesh, Plan, StagePlan, TensorShardSpec
from hidet_dist.spec.objectives import Objective
from hidet_dist.spec.pipeline import PipelineSearch
from hidet_dist.symbolic.planning import part_view, planning_view
from hidet_dist.transfer import MeshLayout, plan_transfer
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class StagePart:
    """The part of a graph that a stage has.

    Attributes
    ----------
    operators: the numbers of its operators in the graph, ascending.
    graph: the part as a separate graph.
    view: the view in which it is planned.
    names: the names of tensors in the part, by those in the graph.
    delivered: the tensors of the part, by their names in it, that are outputs of the graph.
    """

    operators: Sequence[int]
    graph: NormalGraph
    view: GraphView
    names: Mapping[str, str]
    delivered: frozenset[str]

    @classmethod
    def of(cls, whole: GraphView, operators: Sequence[int], mesh: DeviceMesh) -> StagePart:
        """Cut operators out of a graph, to be planned for ``mesh``."""
        part, view = part_view(whole, operators, mesh)
        names = part_names(whole, part, view, operators)
        delivered = frozenset(names[name] for name in whole.outputs if name in names)
        return cls(operators, part.graph, view, names, delivered)

    def plan(
        self, cluster: Cluster, options: SearchOptions, limits: Limits, rules: RuleTable, buffered: bool
    ) -> SearchResult:
        """Plan the stage on its sub-mesh under its memory budget.

        Parameters
        ----------
        options: pins and specs by the names in the part; inputs without a spec arrive replicated.
        rules: the rules of the sub-mesh, with the parts that are offered to all stages there.
        buffered: whether a device also holds the inputs of the next micro-batch.

        Raises
        ------
        InfeasibleError
            When nothing fits the memory budget. Its bytes are with those of buffers.
        """
        buffers = self.buffer_bytes(cluster.mesh, options.input_specs) if buffered else 0
        if buffers >= memory_budget(cluster, options.mem_budget):
            options = replace(options, mem_budget=buffers + 1)  # too little as well, for an error with what is needed
        changed = self.options(cluster, options, buffered)
        within, left = with_budget(cluster, options.mem_budget, memory_budget(cluster, changed.mem_budget))
        try:
            own = replace(changed, mem_budget=left, report=False, overlap=False)
            return search(self.graph, within, own, rules=rules, limits=limits, offered=rules.offered)
        except InfeasibleError as error:
            raise InfeasibleError(str(error), error.least_budget + buffers, error.bound_bytes + buffers) from error

    def buffer_bytes(self, mesh: DeviceMesh, input_specs: Sequence[TensorShardSpec | None] | None) -> int:
        """Compute the bytes of a device's buffer for the inputs of the next micro-batch, which arrive in these specs.

        An input without a spec arrives replicated.
        """
        nbytes = 0
        for name, spec in zip(self.view.inputs, input_specs or [None] * len(self.view.inputs), strict=True):
            shape = self.view.shape(name)
            arriving = TensorShardSpec.replicated(len(shape)) if spec is None else spec
            nbytes += arriving.local_nbytes(shape, self.view.itemsize(name), mesh)
        return nbytes

    def options(self, cluster: Cluster, options: SearchOptions, buffered: bool) -> SearchOptions:
        """Make the options of the stage's search: without the buffers' bytes, and with any specs of what it sends.

        The parameters and errors are those of :meth:`plan`.
        """
        pins = dict(options.pins or {})
        for number, name in enumerate(self.view.outputs):
            if name not in self.delivered:
                pins.setdefault(f"y{number}", "?")
        buffers = self.buffer_bytes(cluster.mesh, options.input_specs) if buffered else 0
        budget = memory_budget(cluster, options.mem_budget)
        if buffers >= budget:
            raise InfeasibleError(
                f"The buffers of a stage's micro-batches take {buffers} bytes, and mem_budget is {budget}.", 2 * buffers
            )
        return replace(
            options,
            mem_budget=budget - buffers,
            pins=pins,
            solver_gap=options.solver_gap / 2,
            on_incumbent=None,
        )


@dataclass(frozen=True)
class StageMessage:
    """A tensor that is sent from stage ``source`` to stage ``target``, in one micro-batch.

    Attributes
    ----------
    tensor: its name in the graph.
    produced, required: its specs on the two stages.
    nbytes: bytes of the whole tensor.
    seconds: predicted.
    """

    tensor: str
    source: int
    target: int
    produced: TensorShardSpec
    required: TensorShardSpec
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage: its operators by number, ascending, its slice of the mesh, the slice as a machine, and its plan."""

    operators: Sequence[int]
    part: MeshSlice
    cluster: Cluster
    plan: StagePlan


@dataclass(frozen=True)
class PipelineResult:
    """The best pipeline of a search.

    Attributes
    ----------
    micro: the graph of a micro-batch; the whole graph if there is only one micro-batch.
    stages: in order; one stage on the whole machine if no pipeline is better.
    messages: the tensors that are sent between stages, in one micro-batch.
    delivery_seconds: predicted, to send the outputs from the last stage to the ranks of all others.
    value: the objective's value, in seconds.
    bound_seconds: a lower bound of the value of all candidates; 0 if the time limit left candidates out.
    time_limit_reached: whether the time limit cut the search short.
    """

    micro: MicroBatchGraph
    stages: tuple[PlannedStage, ...]
    messages: tuple[StageMessage, ...]
    delivery_seconds: float
    value: float
    bound_seconds: float
    time_limit_reached: bool = False

    @property
    def gap(self) -> float:
        """The relative distance between the value and the bound."""
        return max(0.0, 1 - self.bound_seconds / self.value) if self.value else 0.0

    def plan(self, cluster: Cluster, options: PipelineOptions) -> Plan:
        """Make the plan; ``options`` are those of the search."""
        plans = [stage.plan for stage in self.stages]
        if len(plans) == 1 and self.micro.count == 1:
            return Plan((plans[0],))
        operators = [stage.operators for stage in self.stages]
        pipeline = cut_graph(self.micro, operators).pipeline(
            operators, [s.part.ranks for s in self.stages], options.outputs
        )
        search = PipelineSearch(options.objective, self.value, self.bound_seconds)
        return Plan(tuple(plans), replace(with_seconds(pipeline, plans, cluster), search=search))

    @property
    def periods(self) -> list[float]:
        """Predicted seconds from one micro-batch to the next at each stage, with what it sends and receives."""
        return periods([stage.plan.seconds for stage in self.stages], self.messages, self.delivery_seconds)


def periods(seconds: Sequence[float], messages: Sequence[StageMessage], delivery: float) -> list[float]:
    """Add to the seconds of each stage those of what it sends and receives."""
    result = list(seconds)
    for message in messages:
        result[message.source] += message.seconds
        result[message.target] += message.seconds
    result[-1] += delivery
    return result


def objective_seconds(
    objective: Objective,
    micro_batches: int,
    seconds: Sequence[float],
    messages: Sequence[StageMessage],
    delivery: float,
) -> float:
    """Compute an objective's value.

    A micro-batch takes the longest way through the stages. A stage sends its messages one after the other, and a stage
    that receives one starts when the sender has sent all of its messages.

    Parameters
    ----------
    seconds: of each stage, in one micro-batch.
    messages: the tensors that are sent between stages, in one micro-batch; from earlier stages to later ones.
    delivery: seconds to send the outputs from the last stage to the ranks of all others.
    """
    sent: list[float] = []  # when each stage has sent its messages
    for number, own in enumerate(seconds):
        ready = max((sent[message.source] for message in messages if message.target == number), default=0.0)
        sent.append(math.fsum([ready, own, *(message.seconds for message in messages if message.source == number)]))
    return objective.seconds(sent[-1] + delivery, max(periods(seconds, messages, delivery)), micro_batches)


def delivered_seconds(view: GraphView, cluster: Cluster, options: PipelineOptions, last: MeshSlice) -> float:
    """Predict the seconds to send the outputs from the last stage's slice, ``last``, to the ranks of the others."""
    if options.outputs != "all":
        return 0.0
    return delivery_seconds(cluster, last, sum(map(view.nbytes, dict.fromkeys(view.outputs))))


def pipeline_of(
    micro: MicroBatchGraph,
    cluster: Cluster,
    options: PipelineOptions,
    stages: Sequence[PlannedStage],
    bound: float = 0.0,
) -> PipelineResult:
    """Make the pipeline of planned stages; ``bound`` is a lower bound of its value with any plans of its stages."""
    view = planning_view(micro.graph, micro.declared, cluster.mesh)
    messages = tuple(messages_between(view, cluster, stages))
    delivery = delivered_seconds(view, cluster, options, stages[-1].part)
    seconds = [stage.plan.seconds for stage in stages]
    value = objective_seconds(options.value, micro.count, seconds, messages, delivery)
    return PipelineResult(micro, tuple(stages), messages, delivery, value, min(bound, value))


def messages_between(view: GraphView, cluster: Cluster, stages: Sequence[PlannedStage]) -> Iterator[StageMessage]:
    """Find the tensors that are sent between stages, in the order of their targets; outputs go to the last stage."""
    stage_of = {operator: k for k, stage in enumerate(stages) for operator in stage.operators}
    source_of = {view.names[y]: stage_of[n] for n, op in enumerate(view.operators) for y in op.outputs}
    names = [StagePart.of(view, stage.operators, stage.cluster.mesh).names for stage in stages]
    inputs = [{tensor.name: tensor.spec for tensor in stage.plan.inputs} for stage in stages]
    results = [{tensor.name: tensor.spec for tensor in stage.plan.outputs} for stage in stages]

    def message(name: str, target: int, required: TensorShardSpec) -> StageMessage:
        source = source_of[name]
        sender, receiver = stages[source], stages[target]
        produced = results[source][names[source][name]]
        link, nbytes = link_between(cluster, sender.part, receiver.part), view.nbytes(name)
        layouts = MeshLayout(sender.cluster.mesh, produced), MeshLayout(receiver.cluster.mesh, required)
        seconds = transfer_seconds(plan_transfer(view.shape(name), *layouts), nbytes, link, receiver.cluster)
        return StageMessage(name, source, target, produced, required, nbytes, seconds)

    last = len(stages) - 1
    for target, part_names_of in enumerate(names):
        for name, part_name in part_names_of.items():
            if name in source_of and part_name in inputs[target]:
                yield message(name, target, inputs[target][part_name])
    for name in dict.fromkeys(view.outputs):
        if source_of.get(name, last) != last:
            yield message(name, last, TensorShardSpec.replicated(len(view.shape(name))))
