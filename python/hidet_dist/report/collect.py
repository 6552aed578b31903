"""Collection of a report's data from a plan, its graph and its machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from hidet_dist.cost.model import PredictedCost
from hidet_dist.cost.work import kernel_class
from hidet_dist.errors import PlanError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.overlap.planned import AFTER, AT, PlannedTasks, overlapped
from hidet_dist.overlap.streams import spans
from hidet_dist.report import reasons
from hidet_dist.report.data import (
    ACTIVATION,
    COMMUNICATION,
    COMPUTE,
    CONVERT,
    DELIVER,
    INPUT,
    REDUCE,
    STATE,
    WEIGHT,
    AvoidingChange,
    Communication,
    MachineFigures,
    MemoryUse,
    Operator,
    RankMemory,
    Report,
    Span,
    Tensor,
)
from hidet_dist.report.layers import families
from hidet_dist.report.modules import operator_modules, parent
from hidet_dist.reshard.cost import itemsize, step_seconds
from hidet_dist.search.formulation.devices import DeviceHeld, held_by_ranks, memory_budget
from hidet_dist.search.formulation.memory import POINTS, holdings, point_bytes
from hidet_dist.search.report import SentStep, sent_steps
from hidet_dist.spec import StagePlan, TensorShardSpec
from hidet_dist.spec.report import RunnerUp
from hidet_dist.symbolic.planning import planning_view
from hidet_dist.view import GraphView
from hidet_dist.weights.storage import shard_nbytes

# Classes of kernels that are in the module of their weight even if several operators read it.
_NAMED_AFTER = ("matmul", "convolution", "lookup")


def collect(
    stage: StagePlan, graph: NormalGraph, cluster: Cluster, title: str = "", mem_budget: int | None = None
) -> Report:
    """Collect the data of a report.

    Parameters
    ----------
    stage: StagePlan
        The plan of a stage. The report of its search is ``stage.report``; without it the data has neither bounds nor
        alternatives.
    graph: NormalGraph
        The stage's graph.
    cluster: Cluster
        The machine, with the plan's mesh.
    title: str
        The title of the page.
    mem_budget: int, optional
        The memory budget of a device in bytes, for a plan without a report; by default the device's memory.

    Raises
    ------
    PlanError
        When the plan is for another graph or mesh.
    """
    if stage.mesh != cluster.mesh:
        raise PlanError(f"The plan is for the mesh {stage.mesh}; the machine has the mesh {cluster.mesh}.")
    declared = {symbol.name: symbol.declared for symbol in stage.symbols}
    view = planning_view(graph, declared, stage.mesh)
    if view.fingerprint() != stage.fingerprint:
        raise PlanError("The plan was made for another graph; plan this one again.")
    return _Collector(stage, view, cluster, mem_budget).report(title)


class _Collector:
    """The collection of the parts of a report on one stage."""

    def __init__(self, stage: StagePlan, view: GraphView, cluster: Cluster, mem_budget: int | None):
        self.stage, self.view, self.cluster = stage, view, cluster
        self.mesh = stage.mesh
        self.searched = stage.report
        self.mem_budget = mem_budget
        self.budget = memory_budget(cluster, mem_budget) if self.searched is None else self.searched.mem_budget
        self.operators = self._operators()
        self.tensors = self._tensors()
        self.tensor = {tensor.name: tensor for tensor in self.tensors}
        # The operators that read a tensor in a spec.
        self.consumers: dict[tuple[str, TensorShardSpec], list[int]] = defaultdict(list)
        for op, plan in zip(view.operators, self.stage.operators, strict=True):
            for x, spec in zip(op.inputs, plan.spec.in_specs, strict=True):
                self.consumers[view.names[x], spec].append(plan.index)

    def report(self, title: str) -> Report:
        stage, device = self.stage, self.cluster.device
        communications = self._communications()
        machine = MachineFigures(
            device.name,
            int(device.memory_bytes),
            tuple(float(link.bandwidth_bytes_per_second) for link in self.cluster.links),
            tuple(float(link.latency_seconds) for link in self.cluster.links),
            device.overlaps_communication,
        )
        return Report(
            title,
            self.mesh.shape,
            self.mesh.axis_names,
            machine,
            stage.fingerprint,
            self.stage.seconds,
            self.stage.makespan_seconds,
            None if stage.overlap is None else stage.overlap.held_bytes,
            tuple(self.view.outputs),
            self.stage.collectives(),
            tuple(self.tensors),
            tuple(self.operators),
            communications,
            self._memory(),
            self._timeline(),
            families(self.tensors, self.operators, communications),
            None if self.searched is None else self.searched.course(),
            mesh_shares=self.mesh.shares,
        )

    def _operators(self) -> list[Operator]:
        view, stage = self.view, self.stage
        names = [([view.names[x] for x in op.inputs], [view.names[y] for y in op.outputs]) for op in view.operators]
        labels = {weight.name: weight.label for weight in stage.weights if weight.label}
        reads = [ins for ins, _ in names]
        modules = operator_modules(
            reads,
            [outs for _, outs in names],
            {name: parent(label.partition("[")[0]) for name, label in labels.items()},
            self._named_after(reads, labels),
        )
        runner_ups = [None] * len(names) if self.searched is None else self.searched.runner_ups
        return [
            Operator(
                plan.index,
                plan.operator,
                plan.label,
                module,
                str(plan.spec),
                tuple(ins),
                tuple(outs),
                plan.compute_seconds,
                plan.reduce_seconds,
                plan.conversion_seconds,
                plan.note,
                runner_up,
            )
            for plan, module, (ins, outs), runner_up in zip(stage.operators, modules, names, runner_ups, strict=True)
        ]

    def _named_after(self, reads: Sequence[Sequence[str]], labels: Collection[str]) -> list[str | None]:
        """Find the weight that each operator is named after: the one of most dims that it has alone, as most have."""
        consumers = Counter(name for ins in reads for name in dict.fromkeys(ins) if name in labels)
        result: list[str | None] = []
        for op, ins in zip(self.view.operators, reads, strict=True):
            weights = [name for name in ins if name in labels]
            main = max(weights, key=lambda name: len(self.view.shape(name)), default=None)
            is_shared = main is not None and consumers[main] > 1 and kernel_class(op) not in _NAMED_AFTER
            result.append(None if is_shared else main)
        return result

    def _tensors(self) -> list[Tensor]:
        view, stage = self.view, self.stage
        alternatives = () if self.searched is None else self.searched.weights
        result = []
        for number, weight in enumerate(stage.weights):
            others = alternatives[number] if number < len(alternatives) else ()
            module = parent(weight.label.partition("[")[0])
            result.append(self._tensor(weight.name, WEIGHT, weight.spec, weight.label, module, others))
        result += [self._tensor(x.name, INPUT, x.spec, x.label) for x in stage.inputs]
        result += [self._tensor(x.name, STATE, x.spec, x.label, parent(x.label)) for x in stage.states]
        labels = {y.name: y.label for y in stage.outputs}
        for operator, plan in zip(self.operators, stage.operators, strict=True):
            for name, spec in zip(operator.outputs, plan.spec.out_specs, strict=True):
                result.append(self._tensor(name, ACTIVATION, spec, labels.get(name, ""), operator.module))
        known = {tensor.name for tensor in result}
        assert known == set(view.tensors), "every tensor is a weight, an input, a state or an operator's output"
        return result

    def _tensor(
        self,
        name: str,
        kind: str,
        spec: TensorShardSpec,
        label: str,
        module: str = "",
        alternatives: Sequence[RunnerUp] = (),
    ) -> Tensor:
        view, mesh = self.view, self.mesh
        shape = view.shape(name)
        return Tensor(
            name,
            label,
            kind,
            view.tensors[name].dtype.name,
            shape,
            view.nbytes(name),
            str(spec),
            spec.local_shape(shape, mesh),
            shard_nbytes(view.tensors[name], shape, spec, mesh),
            module,
            view.written(name),
            tuple(alternatives),
        )

    def _communications(self) -> tuple[Communication, ...]:
        hidden: dict[tuple[int | None, str, str], list[float]] = defaultdict(list)
        if self.stage.overlap is not None:
            for entry in self.stage.overlap.communications:
                hidden[entry.operator, entry.tensor, entry.step].append(entry.hidden_seconds)
        producers = {name: operator for operator in self.operators for name in operator.outputs}
        savings: Mapping[object, AvoidingChange] = {}
        if self.searched is not None:
            savings = {
                (entry.operator, entry.tensor, entry.target): AvoidingChange(
                    entry.changed, entry.spec, entry.at_least_seconds, entry.alone_seconds
                )
                for entry in self.searched.savings
            }
        result = []
        for sent in sent_steps(self.view, self.stage):
            if not sent.step.collective.communicates:
                continue
            tensor = self.tensor[sent.tensor]
            consumers = [self.operators[n] for n in self.consumers[sent.tensor, sent.target]]
            purpose = REDUCE if sent.reduces else DELIVER if sent.operator is None else CONVERT
            why = reasons.reason(
                purpose,
                tensor,
                producers.get(sent.tensor),
                consumers,
                sent.source,
                sent.target,
                sent.step.mesh_axes,
                sent.step.op,
                self.mesh,
            )
            operator = producers.get(sent.tensor) if sent.operator is None else self.operators[sent.operator]
            key = sent.operator, sent.tensor, str(sent.step)
            result.append(
                Communication(
                    sent.operator,
                    sent.tensor,
                    "" if operator is None else operator.module,
                    purpose,
                    sent.step.kind,
                    str(sent.step),
                    str(sent.before),
                    str(sent.after),
                    self.mesh.group_size(sent.step.mesh_axes),
                    sent.nbytes,
                    self._seconds(sent),
                    hidden[key].pop(0) if hidden[key] else 0.0,
                    why,
                    savings.get((sent.operator, sent.tensor, "" if sent.reduces else str(sent.target))),
                )
            )
        return tuple(result)

    def _seconds(self, sent: SentStep) -> float:
        """Predict the seconds of a step as the plan does: a reduction from the tensor's shape, a conversion from its
        pieces."""
        if sent.exchange is not None:
            return sent.exchange.seconds(self.cluster)
        shape, element = self.view.pieces(sent.tensor)
        if sent.reduces:
            shape, element = self.view.shape(sent.tensor), self.view.itemsize(sent.tensor)
        return step_seconds(sent.step, sent.before, sent.after, shape, itemsize(element), self.cluster)

    def _memory(self) -> MemoryUse:
        view, stage, places = self.view, self.stage, self.cluster.device.places_shards
        budget, at = self.budget, None
        ranks: list[DeviceHeld] = []
        if not stage.has_equal_shards:
            ranks = held_by_ranks(view, stage, self.cluster, self.mem_budget)
            fullest = max(ranks, key=lambda held: held.excess).device
            budget, at = fullest.nbytes, fullest.coordinate
        held = tuple(entry for entry in holdings(view, stage, places, at) if entry.nbytes)
        nbytes = tuple(point_bytes(view, stage, places, at))
        of_ranks = tuple(RankMemory(rank.most, rank.device.nbytes) for rank in ranks)
        return MemoryUse(budget, POINTS, nbytes, held, at or (), of_ranks)

    def _timeline(self) -> tuple[Span, ...]:
        model = PredictedCost(self.cluster)
        planned = PlannedTasks(self.view, self.cluster, model.fused(self.view))
        result = overlapped(planned, self.stage, self.budget)
        if not self.cluster.device.overlaps_communication:
            result = result.in_turn()
        timeline = []
        for task, (begin, seconds) in enumerate(spans(result.tasks, result.schedule.launches)):
            (place, part), communication = result.places[task], result.communications[task]
            operator = place if place < len(self.operators) else None
            what = ""
            if communication is not None:
                what = f"{communication.step} of {communication.tensor}"
            elif part != AT:
                what = "pack or unpack, after it" if part == AFTER else "pack or unpack, before it"
            stream = COMPUTE if communication is None else COMMUNICATION
            if seconds:
                timeline.append(Span(stream, operator, what, begin, seconds))
        return tuple(sorted(timeline, key=lambda span: span.begin_seconds))
