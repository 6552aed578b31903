"""The kernels and collectives of a plan as tasks of two streams, and the plan's schedule on them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.cost.dispatch import dispatch_seconds
from hidet_dist.cost.fusion import Fusions, Member, sharing
from hidet_dist.errors import VerificationError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.streams import START, Schedule, StreamTask, schedule, serial
from hidet_dist.reshard import Element, Step, StepSeconds, step_parts
from hidet_dist.reshard.cost import itemsize
from hidet_dist.rules.scratch import scratch_nbytes
from hidet_dist.spec import ReduceFn, StagePlan, TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.spec.overlap import HiddenPlan, OverlapPlan
from hidet_dist.spec.partial import Layout, PartialSpec, split_of
from hidet_dist.spec.plan import ConversionPlan
from hidet_dist.view import GraphView


@dataclass(frozen=True)
class TaskPurpose:
    """The purpose of a collective: a conversion of ``tensor`` to ``target``, or the reduction of an operator's output.

    ``operator`` is where the plan has it, None for a graph output; ``target`` is None for a reduction.
    """

    operator: int | None
    tensor: str
    target: TensorShardSpec | None
    step: str


@dataclass
class _Unit:
    """A task that is not yet ordered among the others."""

    place: Place
    seconds: float
    nbytes: int
    reads: list[int] = field(default_factory=list)
    aliases: int | None = None
    communication: TaskPurpose | None = None


@dataclass(frozen=True)
class _StepPart:
    """A part of a conversion step: its seconds, the bytes of its result, and the step's text if it communicates."""

    seconds: float
    nbytes: int
    step: str | None


BEFORE, AT, AFTER = range(3)
"""The parts of an operator that are tasks: its inputs' conversions, its kernel, the reduction of its results."""

Place = tuple[int, int]
"""The operator of a task (the number of operators for graph outputs), and the part of it that the task is."""


class PlannedTasks:
    """The tasks of plans of one graph on one machine; parts are cached across plans.

    Operators that share a kernel (``fused``) are one task, unless a tensor between them is reduced or converted.
    """

    def __init__(self, view: GraphView, cluster: Cluster, fused: Fusions):
        self.view = view
        self.cluster = cluster
        self.fused = fused
        self._maker = {view.names[y]: i for i, op in enumerate(view.operators) for y in op.outputs}
        self._readers: dict[str, list[int]] = {}
        for name, use in view.uses():
            if use.operator is not None:
                self._readers.setdefault(name, []).append(use.operator)
        self._parts: dict[object, tuple[_StepPart, ...]] = {}
        self._sizes: dict[tuple[str, TensorShardSpec], int] = {}

    def of(self, stage: StagePlan) -> tuple[list[StreamTask], list[TaskPurpose | None], list[Place]]:
        """List the tasks of a plan in execution order, the purpose of each collective, and the place of each task."""
        units = _Units(self, stage, self._kernels(stage)).units
        order = _sorted(units)
        if len(order) < len(units):
            # hidet does not fuse operators if one depends on the other through a third.
            units = _Units(self, stage, list(range(len(self.view.operators)))).units
            order = _sorted(units)
        number = {unit: n for n, unit in enumerate(order)}
        tasks = []
        for unit in order:
            entry = units[unit]
            reads = tuple(sorted({number[read] for read in entry.reads}))
            aliases = None if entry.aliases is None else number[entry.aliases]
            tasks.append(StreamTask(entry.seconds, entry.communication is not None, reads, entry.nbytes, aliases))
        return tasks, [units[unit].communication for unit in order], [units[unit].place for unit in order]

    def _kernels(self, stage: StagePlan) -> list[int]:
        """Map each operator to the one that represents its kernel."""
        apart = {conversion.tensor for op in stage.operators for conversion in op.conversions}
        apart |= {conversion.tensor for conversion in stage.output_conversions}
        kernel = list(range(len(self.view.operators)))

        def root(number: int) -> int:
            while kernel[number] != number:
                kernel[number] = kernel[kernel[number]]
                number = kernel[number]
            return number

        for number in self.fused:
            entry = sharing(self.fused.get(number), stage.operators[number].spec)
            outputs = [self.view.names[y] for y in self.view.operators[number].outputs]
            if isinstance(entry, Member):
                within = [outputs[o] for o in entry.inner]
                if entry.beside is not None:
                    kernel[root(number)] = root(entry.beside)
            else:
                within = [] if entry is None else [entry.tensor]
            for name in within:
                producer = self._maker[name]
                made = [self.view.names[y] for y in self.view.operators[producer].outputs].index(name)
                if name in apart or stage.operators[producer].spec.reduce_fns[made]:
                    continue
                for other in self._readers[name] if name in outputs else [producer]:
                    kernel[root(number)] = root(other)
        return [root(number) for number in range(len(kernel))]

    def size(self, name: str, spec: TensorShardSpec) -> int:
        """Bytes of a shard's buffer."""
        key = name, spec
        if key not in self._sizes:
            nbytes = spec.local_nbytes(self.view.shape(name), self.view.itemsize(name), self.cluster.mesh)
            self._sizes[key] = buffer_nbytes(nbytes)
        return self._sizes[key]

    def converting(self, conversion: ConversionPlan) -> tuple[_StepPart, ...]:
        """List the parts of a conversion."""
        shape, element = self.view.pieces(conversion.tensor)
        key = shape, itemsize(element), conversion.source, conversion.steps
        if key not in self._parts:
            steps = tuple(map(Step.parse, conversion.steps))
            self._parts[key] = self._cut(shape, element, conversion.source, steps)
        return self._parts[key]

    def reducing(self, name: str, partial: TensorShardSpec, fns: tuple[ReduceFn, ...]) -> tuple[_StepPart, ...]:
        """List the parts of an output's reduction."""
        shape, element = self.view.shape(name), self.view.itemsize(name)
        key = shape, element, partial, fns
        if key not in self._parts:
            axes = tuple(axis for fn in fns for axis in fn.mesh_axes)
            spec_of = PartialSpec(partial, fns[0].op, axes)
            self._parts[key] = self._cut(shape, element, spec_of, tuple(map(Step.of, fns)))
        return self._parts[key]

    def _cut(
        self, shape: tuple[int, ...], element: Element, source: Layout, steps: Sequence[Step]
    ) -> tuple[_StepPart, ...]:
        mesh, element_bytes = self.cluster.mesh, itemsize(element)
        parts: list[_StepPart] = []
        for step in steps:
            after = step.after(source, shape, mesh)
            seconds: StepSeconds = step_parts(step, source, after, shape, element_bytes, self.cluster)
            sent = split_of(source).local_nbytes(shape, element_bytes, mesh)
            result = split_of(after).local_nbytes(shape, element_bytes, mesh)
            source = after
            if not step.collective.communicates:
                parts.append(_StepPart(seconds.pack, buffer_nbytes(result), None))
                continue
            received = result
            if step.exchanges(self.cluster.device.places_shards):
                received = step.exchanged_nbytes(sent, result, mesh)
            elif not step.is_uneven(mesh):
                received = step.received_nbytes(sent, result, mesh)
            if seconds.pack:
                parts.append(_StepPart(seconds.pack, buffer_nbytes(sent), None))
            parts.append(_StepPart(seconds.communicate, buffer_nbytes(received), str(step)))
            if seconds.unpack:
                parts.append(_StepPart(seconds.unpack, buffer_nbytes(result), None))
        return tuple(parts)


class _Units:
    """The unordered tasks of one plan; ``kernel`` maps each operator to the one that represents its kernel."""

    def __init__(self, planned: PlannedTasks, stage: StagePlan, kernel: Sequence[int]):
        self.planned = planned
        self.view = planned.view
        self.stage = stage
        self.units: list[_Unit] = []
        self.spec_of = {tensor.name: tensor.spec for tensor in stage.stored}
        self.resident = {(name, y.spec) for name, y in zip(planned.view.outputs, stage.outputs, strict=True)}
        self.unit_of: dict[tuple[str, TensorShardSpec], int | None] = {
            (tensor.name, tensor.spec): None for tensor in stage.stored
        }
        self._kernels(kernel)
        for plan in stage.operators:
            for conversion in plan.conversions:
                self._convert(plan.index, conversion)
        for conversion in stage.output_conversions:
            self._convert(None, conversion)
        self._reads(kernel)

    def _kernels(self, kernel: Sequence[int]) -> None:
        of_kernel: dict[int, int] = {}
        self.unit_of_operator: list[int] = []
        for number, (op, plan) in enumerate(zip(self.view.operators, self.stage.operators, strict=True)):
            unit = of_kernel.setdefault(kernel[number], len(self.units))
            if unit == len(self.units):
                self.units.append(_Unit((number, AT), 0.0, 0))
            self.unit_of_operator.append(unit)
            entry = self.units[unit]
            entry.place = number, AT  # the place of its last operator
            entry.seconds += plan.compute_seconds
            entry.nbytes += buffer_nbytes(scratch_nbytes(op, plan.spec, self.view.shape_of, self.stage.mesh))
            if plan.spec.dispatch is not None:  # it waits for the device to count rows, and so runs beside nothing
                entry.seconds += dispatch_seconds(op, plan.spec, self.planned.cluster)
            for o, (y, fns) in enumerate(zip(op.outputs, plan.spec.reduce_fns, strict=True)):
                name, spec = self.view.names[y], plan.spec.out_specs[o]
                self.spec_of[name] = spec
                planned = self.planned
                passes = [kernel[reader] for reader in planned._readers.get(name, ())]
                inside = bool(passes) and name not in self.view.outputs and set(passes) == {kernel[number]}
                if fns:
                    partial = plan.spec.partial_spec(o)
                    entry.nbytes += planned.size(name, partial)
                    reduced, others = plan.spec.reductions(o)
                    entry.nbytes += planned.size(name, reduced) if reduced != partial else 0
                    parts = planned.reducing(name, reduced, others) if others else ()
                    self.unit_of[name, spec] = self._chain((number, AFTER), parts, unit, number, name, None, spec)
                else:
                    is_alias = o in op.task.share_map or number in self.view.updates
                    if not inside and (name, spec) not in self.resident and not is_alias:
                        entry.nbytes += planned.size(name, spec)
                    self.unit_of[name, spec] = unit

    def _chain(
        self,
        place: Place,
        parts: Sequence[_StepPart],
        source: int | None,
        operator: int | None,
        name: str,
        target: TensorShardSpec | None,
        result: TensorShardSpec,
    ) -> int | None:
        """Add a task for each part, one after the other, and return the last one."""
        for n, part in enumerate(parts):
            communication = None if part.step is None else TaskPurpose(operator, name, target, part.step)
            last = n == len(parts) - 1
            nbytes = 0 if last and (name, result) in self.resident else part.nbytes
            reads = [] if source is None else [source]
            source = len(self.units)
            self.units.append(_Unit(place, part.seconds, nbytes, reads, communication=communication))
        return source

    def _convert(self, operator: int | None, conversion: ConversionPlan) -> None:
        name, target = conversion.tensor, conversion.target
        place = len(self.view.operators) if operator is None else operator, BEFORE
        parts, source = self.planned.converting(conversion), self.unit_of[name, conversion.source]
        self.unit_of[name, target] = self._chain(place, parts, source, operator, name, target, target)

    def _reads(self, kernel: Sequence[int]) -> None:
        members = Counter(kernel)
        for number, (op, plan) in enumerate(zip(self.view.operators, self.stage.operators, strict=True)):
            unit = self.unit_of_operator[number]
            entry = self.units[unit]
            sources = []
            for x, spec in zip(op.inputs, plan.spec.in_specs, strict=True):
                source = self.unit_of[self.view.names[x], spec]
                sources.append(source)
                if source is not None and source != unit:
                    entry.reads.append(source)
            if op.task.share_map and members[kernel[number]] == 1:
                (position,) = op.task.share_map.values()
                entry.aliases = sources[position]


def _sorted(units: Sequence[_Unit]) -> list[int]:
    """Sort units topologically, by place among independent ones; units in a cycle are left out."""
    readers: list[list[int]] = [[] for _ in units]
    missing = [0] * len(units)
    for number, unit in enumerate(units):
        for read in set(unit.reads):
            readers[read].append(number)
            missing[number] += 1
    ready = [(unit.place, number) for number, unit in enumerate(units) if not missing[number]]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)[1]
        order.append(number)
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (units[reader].place, reader))
    return order


def resident_bytes(stage: StagePlan) -> int:
    """Compute the bytes that a device holds during the whole run: weights, states, graph inputs and outputs."""
    return sum(tensor.local_nbytes(stage.mesh) for tensor in (*stage.stored, *stage.outputs))


@dataclass(frozen=True)
class Overlapped:
    """A plan's schedule, its tasks, the purpose of each task that communicates, and the place of each task."""

    schedule: Schedule
    tasks: Sequence[StreamTask]
    communications: Sequence[TaskPurpose | None]
    places: Sequence[Place]

    def in_turn(self) -> Overlapped:
        """Schedule the same tasks one after the other, as on a device without overlap."""
        return replace(self, schedule=serial(self.tasks))

    def plan(self, stage: StagePlan) -> StagePlan:
        """Attach the overlap to its stage."""
        hidden = []
        for launch in self.schedule.launches:
            communication = self.communications[launch.task]
            if launch.what == START and communication is not None:
                seconds = self.tasks[launch.task].seconds
                hid = max(0.0, seconds - self.schedule.exposed_seconds[launch.task])
                hidden.append(
                    HiddenPlan(communication.operator, communication.tensor, communication.step, seconds, hid)
                )
        # Times are summed in another order: a schedule that hides nothing may be an ulp longer than the plan.
        seconds = min(self.schedule.seconds, stage.seconds)
        held = resident_bytes(stage) + self.schedule.peak_bytes
        return replace(stage, overlap=OverlapPlan(seconds, held, tuple(hidden)))


def overlapped(planned: PlannedTasks, stage: StagePlan, budget: int) -> Overlapped:
    """Schedule a plan on two streams within ``budget`` bytes per device, which the plan without overlap fits.

    Raises
    ------
    VerificationError
        When the times of the tasks do not add up to the plan's time.
    """
    tasks, communications, places = planned.of(stage)
    result = schedule(tasks, max(0, budget - resident_bytes(stage)))
    total = math.fsum(task.seconds for task in tasks)
    if not math.isclose(total, stage.seconds, rel_tol=1e-6, abs_tol=1e-12):
        raise VerificationError(f"The plan costs {stage.seconds} s, but its tasks on two streams {total} s.")
    return Overlapped(result, tasks, communications, places)
