"""The formulation of planning as a problem of entities, edges and memory, from a graph, its rules and a cost model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from hidet.graph import Operator, Tensor

from hidet_dist.cost.fusion import Fused, Fusions, Member, tensors_between
from hidet_dist.cost.model import CostModel, compute_seconds, reduction_seconds, split_seconds
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.reshard import conversion_buffers, conversion_collectives
from hidet_dist.reshard.buffers import reduction_nbytes, smaller_nbytes
from hidet_dist.reshard.cost import itemsize
from hidet_dist.rules.rule import NO_PARTS, Choice, OfferedParts, RuleTable
from hidet_dist.rules.scratch import scratch_nbytes
from hidet_dist.search.choice_sets import ChoiceSet
from hidet_dist.search.formulation.devices import DeviceBudget, limiting_devices
from hidet_dist.search.formulation.memory import POINTS, REDUCE, RUN, Lifetimes
from hidet_dist.search.formulation.parts import offered_parts
from hidet_dist.search.formulation.pins import Pin, Pins
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem
from hidet_dist.search.problem.devices import DeviceMemory, on_devices
from hidet_dist.spec import DeviceMesh, OpShardSpec, SpecPattern, TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.symbolic.planning import rule_table
from hidet_dist.traits import routed_of
from hidet_dist.view import GraphView
from hidet_dist.weights.named import is_weight
from hidet_dist.weights.storage import shard_nbytes, storage_of

Allow = Callable[[Operator, OpShardSpec], bool]
Specs = list[TensorShardSpec]
_Layout = tuple[TensorShardSpec, bool]  # a spec, and whether a reduction makes the tensor in it
_Table = tuple[tuple[float, ...], ...]


@dataclass
class Formulation:
    """A problem, and the meaning of its numbers.

    Attributes
    ----------
    problem: its entities are the operators, then weights, graph inputs, graph outputs and states. A state is one
        entity, which makes its old value and requires its new one, both in the same spec.
    fused: how operators share kernels, by number.
    choices: the choices of each operator.
    notes: for each operator the reason why it is only replicated; else empty.
    weights: the entity numbers of the weights.
    weight_specs, inputs, outputs: the specs of each weight, input and output, one per choice.
    pins: the pins that the choices satisfy.
    edges: the edges of the problem, without those that are copies for further devices.
    limiting: the devices whose budgets limit plans. The problem counts the memory of each.
    devices: their memory.
    layouts: the specs of each tensor, by the numbers that edges use for specs; tensors in the order of their numbers.
    states: the specs of each state, one per choice.
    choice_set: which of all choices there are.
    """

    problem: Problem
    edges: list[Edge]
    limiting: tuple[DeviceBudget, ...]
    devices: list[DeviceMemory]
    fused: Fusions
    choices: list[tuple[Choice, ...]]
    notes: list[str]
    weights: range
    weight_specs: list[Specs]
    inputs: list[Specs]
    outputs: list[Specs]
    pins: Pins
    layouts: dict[str, Specs]
    states: list[Specs]
    choice_set: ChoiceSet

    @cached_property
    def of_first_device(self) -> Problem:
        """The problem of plans that fit the budget of the first of the limiting devices, whatever others hold."""
        if len(self.devices) == 1:
            return self.problem
        return on_devices(self.problem.cost, self.edges, self.problem.collectives, self.devices[:1])

    def is_proven(self, view: GraphView, picks: Sequence[int], table: RuleTable) -> bool:
        """Tell whether the choices of a plan are proven; those of few choices are proven now, with the table's rules.

        Parameters
        ----------
        picks: for each entity, the number of its choice.
        """
        if self.choice_set is not ChoiceSet.FEW:
            return True
        chosen = (offered[pick] for offered, pick in zip(self.choices, picks, strict=False))
        return all(table.choice(op, choice.spec) is not None for op, choice in zip(view.operators, chosen, strict=True))

    @property
    def state_entities(self) -> range:
        """The entity numbers of the states."""
        first = self.weights.stop + len(self.inputs) + len(self.outputs)
        return range(first, first + len(self.states))


def formulate(
    view: GraphView,
    cluster: Cluster,
    model: CostModel,
    options: SearchOptions,
    pins: Pins,
    allow: Allow | None = None,
    limits: Limits | None = None,
    rules: RuleTable | None = None,
    choice_set: ChoiceSet = ChoiceSet.ALL,
    offered: OfferedParts | None = None,
) -> Formulation:
    """Formulate the planning of a graph: the choices of operators and weights, their costs, and the edges between them.

    Parameters
    ----------
    options: SearchOptions
        The memory budget, and the specs of graph inputs and outputs.
    pins: Pins
        The pins of the graph.
    allow: callable, optional
        Whether a spec may be chosen for an operator. An operator for which nothing is allowed keeps all its choices.
    rules: RuleTable, optional
        Rules for any mesh, where they are shared with other graphs.
    choice_set: ChoiceSet
        Which choices there are of operators, weights and states without pins.
    offered: OfferedParts, optional
        The parts in which axes may split, besides the mesh's shares; those of :func:`offered_parts` for the graph when
        not given.

    Raises
    ------
    ConfigError
        When specs or pins do not fit the graph or the mesh, or contradict each other.
    OutOfTimeError
        When the time limit is reached.
    """
    limits = Limits() if limits is None else limits
    mesh = cluster.mesh
    if offered is None:
        offered = offered_parts([pins], rules, options.unequal_parts, options.mode == "search")
    weights = _weight_specs(view, pins, choice_set is not ChoiceSet.ALL, offered)
    input_pins = [pins.tensors.get(name, []) for name in view.inputs]
    inputs = _boundary_specs(pins, view.inputs, input_pins, options.input_specs, "input")
    output_pins = [pins.outputs.get(i, []) for i in range(len(view.outputs))]
    outputs = _boundary_specs(pins, view.outputs, output_pins, options.output_specs, "output")
    choices, notes = _operator_choices(view, rule_table(view, mesh, rules, offered), pins, allow, limits, choice_set)
    _in_place(view, choices)
    states = [_state_specs(view, pins, name, choices, offered) for name in view.states]
    fused = model.fused(view)

    cost = _operator_costs(view, model, mesh, choices, fused, limits)
    held = (*weights, *inputs, *outputs, *states)
    numbers = range(len(cost), len(cost) + len(weights))
    tensors = _Tensors(view, fused, choices, (*weights, *inputs), outputs, states)
    edges = tensors.edges(_Conversions(view, cluster, model, fused, limits))
    limiting = limiting_devices(cluster, options.mem_budget, offered.parts)
    most = max(device.nbytes for device in limiting)
    devices: list[DeviceMemory] = []
    for device in limiting:
        memory = _memory_in_run(view, mesh, cost, held, device.coordinate)
        sizes = _Sizes(view, cluster, outputs, device.coordinate)
        activations = _activations(sizes, choices, tensors, most, sum(map(max, memory)), bars=not devices)
        devices.append(DeviceMemory(device.nbytes, memory, activations))
    cost += [[0.0] * len(specs) for specs in held]
    problem = on_devices(cost, edges, _collectives(choices, cost), devices)
    # Tensors that share the numbers of their layouts share the list of specs.
    unlike = {id(of_layouts): of_layouts for of_layouts in tensors.numbers.values()}
    specs_of = {number: [spec for spec, _ in of_layouts] for number, of_layouts in unlike.items()}
    layouts = {name: specs_of[id(of_layouts)] for name, of_layouts in tensors.numbers.items()}
    boundary = weights, inputs, outputs
    counted = problem, edges, limiting, devices
    return Formulation(*counted, fused, choices, notes, numbers, *boundary, pins, layouts, states, choice_set)


def _memory_in_run(
    view: GraphView,
    mesh: DeviceMesh,
    operators: Sequence[Sequence[float]],
    held: Sequence[Specs],
    coordinate: Sequence[int] | None,
) -> list[list[int]]:
    """Compute the bytes that each choice of each entity takes on a device during the whole run: none of operators'.

    ``held`` are the specs of weights, graph inputs, outputs and states.
    """
    nothing: dict[int, list[int]] = {}  # equal operators share their list, which lets the search recognise them
    memory = [nothing.setdefault(len(costs), [0] * len(costs)) for costs in operators]
    sizes: dict[Hashable, list[int]] = {}  # equal weights share theirs, too
    for name, specs in zip((*view.weights, *view.inputs, *view.outputs, *view.states), held, strict=True):
        tensor, shape = view.tensors[name], view.shape(name)
        sized = name if storage_of(tensor) is not None else (shape, view.itemsize(name), id(specs))
        if sized not in sizes:
            sizes[sized] = [shard_nbytes(tensor, shape, spec, mesh, coordinate) for spec in specs]
        memory.append(sizes[sized])
    return memory


def _in_place(view: GraphView, choices: list[tuple[Choice, ...]]) -> None:
    """Leave the operators that update states the choices of equal specs at both ends, without partial results."""
    known: dict[int, tuple[Choice, ...]] = {}  # equal operators share their choices
    for number in view.updates:
        offered = choices[number]
        if id(offered) not in known:
            known[id(offered)] = tuple(
                c for c in offered if c.spec.in_specs[0] == c.spec.out_specs[0] and not c.spec.reduce_fns[0]
            )
        choices[number] = known[id(offered)]


def _state_specs(
    view: GraphView, pins: Pins, name: str, choices: Sequence[tuple[Choice, ...]], offered: OfferedParts
) -> Specs:
    """List the specs of a state that its pins and all of its updates allow.

    Raises
    ------
    ConfigError
        When there is none, or a pin does not fit.
    """
    pinned = pins.tensors.get(name, [])
    specs = _layouts(pins, pinned, name, f"the state {name}", offered=offered)
    for number, state in view.updates.items():
        if state == name:
            possible = {choice.spec.in_specs[0]: None for choice in choices[number]}
            left = [spec for spec in specs if spec in possible]
            if not left:
                wanted = "; ".join(map(str, [*pinned, *(pin for pin, _ in pins.operators.get(number, []))]))
                raise ConfigError(
                    f"With the pins {wanted}, operator {number}, {view.operators[number].name}, cannot update the "
                    f"state {name} in place. It can if the state is {'; '.join(map(str, possible))}."
                )
            specs = left
    return specs


def _operator_choices(
    view: GraphView, table: RuleTable, pins: Pins, allow: Allow | None, limits: Limits, choice_set: ChoiceSet
) -> tuple[list[tuple[Choice, ...]], list[str]]:
    """List the allowed choices of each operator that satisfy its pins, and a note for each that is only replicated.

    An operator without pins, and that updates no state with pins, has those of the ``choice_set``.
    """
    choices: list[tuple[Choice, ...]] = []
    notes = []
    pinned = {*pins.operators, *(number for number, state in view.updates.items() if pins.tensors.get(state))}
    for number, op in enumerate(view.operators):
        limits.check()
        if choice_set is not ChoiceSet.ALL and number not in pinned:
            if choice_set is ChoiceSet.REPLICATED:
                choices.append(table.replicated(op))
            else:
                choices.append(table.joint(op, choice_set is ChoiceSet.FEW_PROVEN))
            notes.append("")
            continue
        limits.check_pace(functools.partial(_fraction_of_kinds, view, number))
        _, proven = table(op)
        if allow is not None:
            proven = tuple(choice for choice in proven if allow(op, choice.spec)) or proven
        if number in pins.operators:
            proven = tuple(proven[k] for k in pins.choices(number, [choice.spec for choice in proven]))
        choices.append(proven)
        notes.append(table.note(op))
    return choices, notes


def _fraction_of_kinds(view: GraphView, number: int) -> float:
    """Compute the fraction of all kinds of operators among the first ones: the rules of a kind are derived once."""
    return len({view.signature(one) for one in range(number)}) / view.kinds


def _operator_costs(
    view: GraphView,
    model: CostModel,
    mesh: DeviceMesh,
    choices: Sequence[tuple[Choice, ...]],
    fused: Fusions,
    limits: Limits,
) -> list[list[float]]:
    """Predict the seconds of each operator's choices, reduce functions included."""
    # Equal operators share their tuple of choices.
    known: dict[Hashable, list[float]] = {}
    costs = []
    for number, op in enumerate(view.operators):
        limits.check()
        key = id(choices[number]), place_in_kernel(view, number, fused.get(number))
        if key not in known:
            known[key] = [
                compute_seconds(model, view, number, choice, fused.get(number), mesh)
                + reduction_seconds(model, op, choice)
                for choice in choices[number]
            ]
        costs.append(known[key])
    return costs


def place_in_kernel(view: GraphView, number: int, entry: Fused | Member | None) -> Hashable:
    """Describe what the cost of an operator's choice depends on in its kernel, alike for those of equal layers.

    Kernels that read weights or constants have costs of their own.
    """
    held = tuple(x.storage is not None or is_weight(x) for x in view.operators[number].inputs)
    return _position(view, number, entry), held


def _position(view: GraphView, number: int, entry: Fused | Member | None) -> Hashable:
    """Describe how an operator shares a kernel by the positions of tensors, not by their names."""
    if isinstance(entry, Member):
        # What an operator costs does not depend on which one is the last of its launch.
        return replace(entry, otherwise=None, beside=None), _position(view, number, entry.otherwise)
    if entry is None:
        return None
    op = view.operators[number]
    names = [view.names[x] for x in (op.outputs if entry.prologue else op.inputs)]
    return entry.prologue, names.index(entry.tensor)


def _collectives(choices: Sequence[tuple[Choice, ...]], cost: Sequence[Sequence[float]]) -> list[list[int]]:
    """Count the collectives of each entity's choices: those that reduce the outputs of operators."""
    known: dict[int, list[int]] = {}
    for offered in choices:
        if id(offered) not in known:
            known[id(offered)] = [sum(map(len, choice.spec.reduce_fns)) for choice in offered]
    return [known[id(offered)] for offered in choices] + [[0] * len(costs) for costs in cost[len(choices) :]]


@dataclass(frozen=True)
class _Use:
    """A tensor that an entity reads, with the layout that each of its choices requires, and the live interval.

    ``tensor`` is ``name``, or ``name`` and ``_IN_PLACE`` where a state is updated or kept: it is not converted there.
    """

    tensor: str
    entity: int
    layouts: list[_Layout]
    begin: int
    end: int

    @property
    def name(self) -> str:
        """The name of the tensor in the graph."""
        return self.tensor.removesuffix(_IN_PLACE)


_IN_PLACE = " in place"


class _Tensors:
    """The producer and the uses of each tensor, and the numbers of its layouts.

    Attributes
    ----------
    producers: for each tensor, the entity that makes it, and the layout that each of the entity's choices makes. The
        flag of a layout, whether a reduction makes it, is set only for tensors between fused operators.
    uses: the uses of all tensors, in the order of the operators.
    numbers: for each tensor, the number of each layout.
    lifetimes: the live intervals of the tensors.
    """

    def __init__(
        self,
        view: GraphView,
        fused: Fusions,
        choices: Sequence[tuple[Choice, ...]],
        stored: Sequence[Specs],
        outputs: Sequence[Specs],
        states: Sequence[Specs],
    ):
        between = tensors_between(view, fused)
        known: dict[Hashable, list[_Layout]] = {}  # equal operators share their lists of layouts
        self.producers: dict[str, tuple[int, list[_Layout]]] = {}
        for number, op in enumerate(view.operators):
            offered = choices[number]
            for o, y in enumerate(op.outputs):
                name = view.names[y]
                key: Hashable = ("produced", id(offered), o, name in between)
                if key not in known:
                    known[key] = [
                        (c.spec.out_specs[o], name in between and bool(c.spec.reduce_fns[o])) for c in offered
                    ]
                self.producers[name] = number, known[key]
        entity = len(view.operators)
        for name, specs in zip((*view.weights, *view.inputs), stored, strict=True):
            self.producers[name] = entity, known.setdefault(tuple(specs), [(spec, False) for spec in specs])
            entity += 1
        of_state: dict[str, tuple[int, list[_Layout]]] = {}
        for number, (name, specs) in enumerate(zip(view.states, states, strict=True)):
            layouts = known.setdefault(tuple(specs), [(spec, False) for spec in specs])
            self.producers[name] = of_state[name] = entity + len(outputs) + number, layouts
        self.lifetimes = Lifetimes(view)
        self.uses: list[_Use] = []
        for name, use in view.uses():
            if use.operator is None:
                specs = outputs[use.position]
                span = self.lifetimes.required(name, None, False)
                self.uses.append(_Use(name, entity + use.position, [(spec, False) for spec in specs], *span))
            else:
                offered = choices[use.operator]
                key = "required", id(offered), use.position
                if key not in known:
                    known[key] = [(choice.spec.in_specs[use.position], False) for choice in offered]
                aliases = use.position in view.operators[use.operator].task.share_map.values()
                span = self.lifetimes.required(name, use.operator, aliases)
                updates = use.position == 0 and use.operator in view.updates
                self.uses.append(_Use(name + _IN_PLACE * updates, use.operator, known[key], *span))
        for old, new in view.new_values.items():
            last = self.lifetimes.count - 1
            self.uses.append(_Use(new + _IN_PLACE, *of_state[old], last, last))
        self.producers.update({use.tensor: self.producers[use.name] for use in self.uses})
        self.numbers = self._numbered()

    def _numbered(self) -> dict[str, dict[_Layout, int]]:
        """Number the layouts of each tensor; tensors with the same layouts at both ends share the numbers."""
        lists = {name: [layouts] for name, (_, layouts) in self.producers.items()}
        for use in self.uses:
            lists[use.tensor].append(use.layouts)
        known: dict[tuple[int, ...], dict[_Layout, int]] = {}
        numbers = {}
        for name, of_tensor in lists.items():
            key = tuple(map(id, of_tensor))
            if key not in known:
                every = dict.fromkeys(layout for layouts in of_tensor for layout in layouts)
                known[key] = {layout: n for n, layout in enumerate(every)}
            numbers[name] = known[key]
        return numbers

    def edges(self, conversions: _Conversions) -> list[Edge]:
        """Make an edge for each use of a tensor."""
        number = {name: n for n, name in enumerate(self.numbers)}
        known: dict[tuple[int, int], tuple[int, ...]] = {}

        def numbered(layouts: list[_Layout], numbers: dict[_Layout, int]) -> tuple[int, ...]:
            key = id(layouts), id(numbers)
            if key not in known:
                known[key] = tuple(map(numbers.__getitem__, layouts))
            return known[key]

        edges = []
        made: dict[str, tuple[_Table, tuple[tuple[int, ...], ...]]] = {}
        for use in self.uses:
            producer, produced = self.producers[use.tensor]
            numbers = self.numbers[use.tensor]
            if use.tensor not in made:
                made[use.tensor] = conversions.seconds(use.name, numbers), conversions.collectives(use.name, numbers)
            seconds, collectives = made[use.tensor]
            edges.append(
                Edge(
                    number[use.tensor],
                    producer,
                    use.entity,
                    numbered(produced, numbers),
                    numbered(use.layouts, numbers),
                    seconds,
                    use.begin,
                    use.end,
                    collectives,
                )
            )
        return edges


class _Conversions:
    """The costs of conversions between the layouts of tensors; equal tensors share a table."""

    def __init__(self, view: GraphView, cluster: Cluster, model: CostModel, fused: Fusions, limits: Limits):
        self.view, self.cluster, self.model, self.mesh, self.limits = view, cluster, model, cluster.mesh, limits
        self.split = {name: between for name, (_, between) in tensors_between(view, fused).items()}
        self.tables: dict[Hashable, _Table] = {}
        self.counts: dict[Hashable, tuple[tuple[int, ...], ...]] = {}

    def seconds(self, name: str, numbers: dict[_Layout, int]) -> _Table:
        """Predict the time from each layout to each other, including that of splitting a fused kernel."""
        view = self.view
        (shape, dtype), between = view.pieces(name), self.split.get(name)
        # Equal tensors mostly share their numbers of layouts: their identity saves comparing layouts.
        same = shape, dtype, id(numbers), between
        if same in self.tables:
            return self.tables[same]
        layouts = tuple(numbers)
        key = shape, dtype, layouts, between
        if key not in self.tables:
            self.limits.check()
            seconds = self.model.conversions(shape, dtype, [spec for spec, _ in layouts])
            if between is not None:
                nbytes = view.shape(name), view.itemsize(name), self.mesh
                split = split_seconds(
                    between,
                    layouts,
                    [spec for spec, _ in layouts],
                    lambda spec: self.model.split(spec.local_nbytes(*nbytes)),
                )
                seconds = tuple(map(tuple, (np.array(seconds) + split).tolist()))
            self.tables[key] = seconds
        self.tables[same] = self.tables[key]
        return self.tables[key]

    def collectives(self, name: str, numbers: dict[_Layout, int]) -> tuple[tuple[int, ...], ...]:
        """Count the collectives of the conversion from each layout to each other."""
        shape, dtype = self.view.pieces(name)
        same = shape, dtype, id(numbers)
        if same in self.counts:
            return self.counts[same]
        specs = tuple(spec for spec, _ in numbers)
        key = shape, itemsize(dtype), specs
        if key not in self.counts:
            self.limits.check()
            self.counts[key] = conversion_collectives(shape, dtype, specs, specs, self.cluster)
        self.counts[same] = self.counts[key]
        return self.counts[key]


class _Sizes:
    """The bytes of the buffers of a device's shards; those in the buffer of a graph output count as 0.

    Where the spec of an output is open, it is unknown whether the operator writes into the output's buffer: another
    buffer is counted.
    """

    def __init__(
        self, view: GraphView, cluster: Cluster, outputs: Sequence[Specs], coordinate: Sequence[int] | None = None
    ):
        self.view, self.cluster, self.mesh, self.coordinate = view, cluster, cluster.mesh, coordinate
        self.places_shards = cluster.device.places_shards
        self.outputs = set(view.outputs)
        self.resident = {(name, specs[0]) for name, specs in zip(view.outputs, outputs, strict=True) if len(specs) == 1}
        self.known: dict[Hashable, int] = {}

    def shard(self, name: str, spec: TensorShardSpec) -> int:
        """Compute the bytes of a shard's buffer."""
        shape, itemsize = self.view.shape(name), self.view.itemsize(name)
        key = shape, itemsize, spec
        if key not in self.known:
            self.known[key] = buffer_nbytes(spec.local_nbytes(shape, itemsize, self.mesh, self.coordinate))
        return self.known[key]

    def held(self, name: str, spec: TensorShardSpec) -> int:
        """Compute the bytes that a shard takes besides the graph outputs."""
        return 0 if (name, spec) in self.resident else self.shard(name, spec)


def _activations(
    sizes: _Sizes,
    choices: Sequence[tuple[Choice, ...]],
    tensors: _Tensors,
    budget: int,
    held_in_run: int,
    bars: bool,
) -> Activations:
    """Formulate the bytes of :func:`hidet_dist.search.formulation.memory.point_bytes` for all plans at once.

    A state that is updated in place must not be converted on its way, and a weight in a lower precision cannot be. So
    such a conversion takes more than the budget, and more than all values and a converted copy of each: the least
    memory is that of a plan, however small the budget. It does where ``bars``; one device of several suffices for it.
    """
    view = sizes.view
    intervals = _result_intervals(sizes, choices, tensors.lifetimes)
    most = held_in_run + sum(max(interval.nbytes) for interval in intervals)
    known: dict[Hashable, ConvertedTensor] = {}  # equal tensors share their entry
    converted: dict[int, ConvertedTensor] = {}
    fixed = {}
    for number, (tensor, layouts) in enumerate(tensors.numbers.items()):
        name = tensor.removesuffix(_IN_PLACE)
        if name != tensor or storage_of(view.tensors[name]) is not None:
            fixed[number] = [spec for spec, _ in layouts]
            continue
        most += view.nbytes(name)
        own = name if name in sizes.outputs else ""
        sized = view.shape(name), view.itemsize(name), view.pieces(name)
        same: Hashable = sized, id(layouts), own
        if same not in known:
            key: Hashable = sized, tuple(layouts), own
            if key not in known:
                known[key] = _converted(sizes, name, [spec for spec, _ in layouts])
            known[same] = known[key]
        converted[number] = known[same]
    if bars:
        converted |= {number: _never_converted(specs, max(budget, most) + 1) for number, specs in fixed.items()}
    return Activations(tensors.lifetimes.count, tuple(intervals), dict(sorted(converted.items())))


def _result_intervals(sizes: _Sizes, choices: Sequence[tuple[Choice, ...]], lifetimes: Lifetimes) -> list[LiveInterval]:
    """List the live intervals of operators' results: during the operator, during its reduction, and after both."""
    view, mesh = sizes.view, sizes.mesh
    intervals: list[LiveInterval] = []
    known: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {}
    scratch: dict[int, tuple[int, ...]] = {}
    for number, op in enumerate(view.operators):
        at = POINTS * number
        if routed_of(op) is not None:
            key_of_choices = id(choices[number])
            if key_of_choices not in scratch:
                scratch[key_of_choices] = tuple(
                    buffer_nbytes(scratch_nbytes(op, choice.spec, view.shape_of, mesh, sizes.coordinate))
                    for choice in choices[number]
                )
            if any(scratch[key_of_choices]):
                intervals.append(LiveInterval(number, at + RUN, at + RUN, scratch[key_of_choices]))
        for o, y in enumerate(op.outputs):
            name = view.names[y]
            computed = name in lifetimes.computed
            key = id(choices[number]), o, name if name in sizes.outputs else "", computed
            if key not in known:
                kept, run, reduce = [], [], []
                for choice in choices[number]:
                    spec, fns = choice.spec.out_specs[o], choice.spec.reduce_fns[o]
                    kept.append(sizes.held(name, spec))
                    if fns:
                        partial = choice.spec.partial_spec(o)
                        run.append(sizes.shard(name, partial))
                        whole = view.shape(name), view.itemsize(name)
                        taken = reduction_nbytes(*whole, partial, fns, mesh, sizes.places_shards, sizes.coordinate)
                        reduce.append(taken)
                    else:
                        run.append(0 if computed else kept[-1])
                        reduce.append(run[-1])
                plain = not any(run + reduce) if computed else run == kept == reduce
                known[key] = tuple(kept), tuple(run), tuple(reduce), plain
            kept_, run_, reduce_, plain = known[key]
            begin, end = lifetimes.after(number, name)
            if name in lifetimes.viewed or (computed and plain):
                if begin <= end:
                    intervals.append(LiveInterval(number, begin, end, kept_))
            elif plain:
                intervals.append(LiveInterval(number, at + RUN, max(at + REDUCE, end), kept_))
            else:
                intervals.append(LiveInterval(number, at + RUN, at + RUN, run_))
                intervals.append(LiveInterval(number, at + REDUCE, at + REDUCE, reduce_))
                if begin <= end:
                    intervals.append(LiveInterval(number, begin, end, kept_))
    return intervals


def _converted(sizes: _Sizes, name: str, specs: Specs) -> ConvertedTensor:
    """Formulate the memory of a tensor's conversions.

    The buffers of a device whose shards are not the largest ones are bounded by those of the largest.
    """
    shape, dtype = sizes.view.pieces(name)
    elements = tuple(sizes.view.shape(name)), sizes.view.itemsize(name)

    @functools.cache
    def buffers() -> tuple[tuple[int, ...], ...]:
        largest = conversion_buffers(shape, dtype, specs, specs, sizes.cluster, elements)
        if sizes.coordinate is None:
            return largest
        less = [smaller_nbytes(*elements, [spec], sizes.mesh, sizes.coordinate) for spec in specs]
        return tuple(
            tuple(nbytes + of_source + of_target for nbytes, of_target in zip(line, less, strict=True))
            for line, of_source in zip(largest, less, strict=True)
        )

    layout = tuple(specs.index(spec) for spec in specs)
    return ConvertedTensor(layout, tuple(sizes.held(name, spec) for spec in specs), buffers)


def _never_converted(specs: Specs, nbytes: int) -> ConvertedTensor:
    """Formulate the memory of conversions that no plan may have, as that many bytes."""
    count = len(specs)
    layout = tuple(specs.index(spec) for spec in specs)
    return ConvertedTensor(layout, (0,) * count, lambda: ((nbytes,) * count,) * count)


def stored_specs(shape: tuple[int, ...], mesh: DeviceMesh, padded: bool, offered: OfferedParts = NO_PARTS) -> Specs:
    """List the specs to store a tensor in: each mesh axis splits one dim that it divides, or none; replicated first.

    With ``padded`` also dims that do not divide are split, with padding. Axes split in the mesh's shares, or in parts
    that are ``offered``.
    """
    specs: dict[TensorShardSpec, None] = {}
    ways = [
        [(None, ()), *((dim, parts) for dim, size in enumerate(shape) for parts in offered.of(axis, size))]
        for axis in range(mesh.ndim)
    ]
    for chosen in itertools.product(*ways):
        per_dim: list[list[int]] = [[] for _ in shape]
        for axis, (dim, _) in enumerate(chosen):
            if dim is not None and mesh.shape[axis] > 1:
                per_dim[dim].append(axis)
        parts = tuple(pair for _, pairs in chosen for pair in pairs)
        spec = TensorShardSpec(tuple(tuple(axes) for axes in per_dim), parts)
        if spec.fits(shape, mesh, padded):
            specs.setdefault(spec)
    return list(specs)


def _layouts(
    pins: Pins,
    tensor_pins: Sequence[Pin],
    name: str,
    what: str,
    padded: bool = False,
    simple: bool = False,
    offered: OfferedParts = NO_PARTS,
) -> Specs:
    """List the specs of a stored tensor that its pins allow; without pins, only ``simple`` ones if so."""
    shape, _ = pins.view.pieces(name)
    specs = stored_specs(shape, pins.mesh, padded, NO_PARTS if simple and not tensor_pins else offered)
    if simple and not tensor_pins:
        of_one_dim = [spec for spec in specs if sum(map(bool, spec.mesh_axes_per_dim)) == 1]
        most = max((len(spec.mesh_axes) for spec in of_one_dim), default=0)
        specs = [specs[0], *(spec for spec in of_one_dim if len(spec.mesh_axes) == most)]
    return pins.layouts(tensor_pins, what, shape, specs, padded)


def _weight_specs(view: GraphView, pins: Pins, simple: bool, offered: OfferedParts) -> list[Specs]:
    """List the specs of each weight that its pins allow; equal weights without pins share their list."""
    known: dict[Hashable, Specs] = {}
    result = []
    for name in view.weights:
        weight, shape, tensor_pins = view.tensors[name], view.shape(name), pins.tensors.get(name, [])
        storage = storage_of(weight)
        grouped = None if storage is None else (storage.group, storage.depth_dim, storage.exact)
        key = name if tensor_pins else (shape, view.pieces(name)[0], grouped)
        if key not in known:
            specs = _layouts(pins, tensor_pins, name, f"the weight {name}", True, simple, offered)
            known[key] = _whole_groups(weight, shape, specs, pins.mesh)
        result.append(known[key])
    return result


def _whole_groups(weight: Tensor, shape: tuple[int, ...], specs: Specs, mesh: DeviceMesh) -> Specs:
    """List those specs of a weight whose shards may be held: of whole groups, if its file has them.

    Where near-even parts of groups are offered, rows are not split with padding instead: shards of whole groups have
    the elements and scales of the whole weight.

    Raises
    ------
    ConfigError
        When there is none, because of pins.
    """
    storage = storage_of(weight)
    if storage is None or not storage.group:
        return specs
    dim = len(shape) + storage.depth_dim
    if not storage.exact:
        near_even = any(not spec.is_even(dim, mesh) for spec in specs) and not mesh.shares
        return [spec for spec in specs if shape[dim] % spec.units(dim, mesh) == 0] if near_even else specs
    whole = [spec for spec in specs if _unit(spec, dim, shape, mesh) % storage.group == 0]
    if not whole:
        raise ConfigError(
            f"The pins of a weight of the shape {list(shape)} split its groups of {storage.group} elements, in which "
            "its file has it: leave them out, or the precision 'stored' of optimization_config['weights']."
        )
    return whole


def _unit(spec: TensorShardSpec, dim: int, shape: tuple[int, ...], mesh: DeviceMesh) -> int:
    """Return the elements of a dim of which all shards have a multiple."""
    return spec.local_shape(shape, mesh)[dim] if spec.is_even(dim, mesh) else shape[dim] // spec.units(dim, mesh)


def _refuse_parts_of_symbolic_dims(pins: Pins, name: str, specs: Specs, what: str) -> None:
    for dim, extent in enumerate(pins.view.written(name)):
        for spec in specs:
            if isinstance(extent, str) and not spec.is_even(dim, pins.mesh):
                raise ConfigError(
                    f"The spec {spec} of {what} splits the symbolic dim {extent} into unequal parts, and symbolic dims "
                    "are split equally only: leave the parts, or an axis with shares, out of that dim."
                )


def _boundary_specs(
    pins: Pins,
    tensors: Sequence[str],
    pins_of: Sequence[list[Pin]],
    specs: Sequence[TensorShardSpec | None] | None,
    what: str,
) -> list[Specs]:
    """List the specs of graph inputs or outputs: replicated, unless a spec is given or pinned."""
    if specs is not None and len(specs) != len(tensors):
        raise ConfigError(f"The graph has {len(tensors)} {what}s but {len(specs)} {what} specs are given.")
    result = []
    for number, (name, tensor_pins) in enumerate(zip(tensors, pins_of, strict=True)):
        spec = specs[number] if specs else None
        required = tensor_pins
        if spec is not None:
            try:
                spec.validate(pins.view.pieces(name)[0], pins.mesh)
            except SpecError as error:
                raise ConfigError(f"The spec of {what} {number} does not fit: {error}") from error
            required = [Pin(f"{what}_specs[{number}]", SpecPattern.of(spec)), *tensor_pins]
        if required:
            result.append(_layouts(pins, required, name, f"{what} {number}"))
            _refuse_parts_of_symbolic_dims(pins, name, result[-1], f"{what} {number}")
        else:
            result.append([TensorShardSpec.replicated(len(pins.view.shape(name)))])
    return result
