"""The partition pass: slice weights, rebuild operators on shards, and insert the communication that the plan lists."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.create import FullOp

from hidet_dist.artifacts.manifest import COORDINATE
from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import PartitionError, SpecError
from hidet_dist.normalize import NormalGraph
from hidet_dist.operators.expert_layers import ExpertLayerOp
from hidet_dist.operators.reductions import amax, amin
from hidet_dist.partitioning.collective_op import CollectiveOp
from hidet_dist.partitioning.expert_layers import separated
from hidet_dist.partitioning.once import reshape
from hidet_dist.partitioning.operators import (
    CommunicationOp,
    CopyOp,
    GroupParts,
    JoinShardsOp,
    ShardSliceOp,
    SplitOrder,
    StackShardsOp,
)
from hidet_dist.partitioning.parts import CutPartOp, JoinPartsOp, packed_parts
from hidet_dist.partitioning.proof import ProvenStage, prove
from hidet_dist.partitioning.row_exchange import RowExchangeOp, wanted_rows
from hidet_dist.partitioning.text import graph_lines
from hidet_dist.reshard import PlannedSteps, Step, walk
from hidet_dist.rules.local import localize
from hidet_dist.rules.padding import mask_padding
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh, OperatorPlan, OpShardSpec, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.collectives import EXTREMES
from hidet_dist.spec.extents import Extent, evaluate, extents_of, part_shape, same_shape
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.partial import split_of
from hidet_dist.spec.parts import part_sizes
from hidet_dist.spec.symbols import LocalSymbol, SymbolPlan, bind, local_symbols, multiples_of
from hidet_dist.symbolic.planning import TwinView
from hidet_dist.symbolic.twin import at_sizes
from hidet_dist.targets import Target, target_of_memory
from hidet_dist.traits import routed_of
from hidet_dist.weights import SafetensorsFiles, Source, read_shard, source_of
from hidet_dist.weights.states import initial_of, is_state, state_like, updates_of

_TRIAL_FACTOR = 1009  # a prime, so that trial sizes have no special divisors


@dataclass
class Program:
    """The sharded graph of one stage, the same for every rank (SPMD).

    Attributes
    ----------
    graph: FlowGraph
        The local graph. Its inputs are the local graph inputs, a placeholder per weight shard and per shard of a
        state's old value, and the coordinate. Its outputs are the local graph outputs, then the states' ``new_values``.
    inputs, outputs: the specs of the graph's inputs and outputs.
    weights: the spec of each weight; ``sources`` are the data of the whole weights, by name.
    coordinate: int32[mesh.ndim], the placeholder of the device's coordinate; None if no operator depends on it.
    symbols: the symbolic dims. ``local_symbols`` are those of local shapes.
    interface: names and nesting of the arguments and results of the traced model, if the graph was made of one.
    states: the spec of each state, of its old value and of its new one.
    new_values: the names of the states that the program updates.
    initial: the values of whole states before the first call, by name; zeros of those that it lacks.
    parts: the symbols of unequal parts in local shapes, by name, with the largest value of each
        (:mod:`hidet_dist.spec.parts`).
    """

    mesh: DeviceMesh
    graph: FlowGraph
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    weights: tuple[TensorPlan, ...]
    sources: dict[str, Source]
    weight_placeholders: dict[str, Tensor]
    coordinate: Tensor | None
    symbols: tuple[SymbolPlan, ...] = ()
    interface: Interface | None = None
    states: tuple[TensorPlan, ...] = ()
    state_placeholders: dict[str, Tensor] = field(default_factory=dict)
    new_values: tuple[str, ...] = ()
    initial: dict[str, Source] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    def initial_name(self, state: str) -> str:
        """Return the name, among the data of ranks, of a state's values before the first call, by its plan's name."""
        return f"state:{next(one.label or one.name for one in self.states if one.name == state)}"

    @property
    def local_symbols(self) -> tuple[LocalSymbol, ...]:
        """The symbols of local shapes, each with the symbol of the whole dim."""
        return local_symbols(self.symbols, self.mesh)

    def part_sizes(self, rank: int) -> dict[str, int]:
        """Return a rank's parts, by the names of their symbols."""
        return part_sizes(self.parts, self.mesh, self.mesh.coordinate(rank))

    def planned_sizes(self) -> dict[str, int]:
        """Return the sizes of the symbolic dims that the program is planned for, and the largest of unequal parts."""
        sizes = {symbol.name: symbol.size for symbol in self.symbols}
        local = {each.name: sizes[each.symbol] // each.shards for each in self.local_symbols}
        return {**sizes, **local, **self.parts}

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Compute the size of each local symbol from the whole inputs' shapes. Raises InputError if they do not fit."""
        written = [tensor.written or tensor.shape for tensor in self.inputs]
        return bind(self.symbols, self.local_symbols, zip(written, shapes, strict=True))

    def communications(self) -> list[str]:
        """Describe each communication operator in execution order, one line each."""
        return [op.description for op in communication_operators(self.graph)]

    def text(self) -> str:
        """Write the program as text: its inputs and weights with their specs, then one line per operator.

        Shapes are local; the shape of a whole tensor follows the word ``of``. Equal programs have equal text. Before
        the last line, the updated states have their new values.
        """
        lines = [f"program on {self.mesh}"]
        for plan, local in self._placeholders():
            whole = ", ".join(map(str, plan.written or plan.shape))
            shape = ", ".join(map(str, local.shape))
            lines.append(f"{plan.name}: {local.dtype.name}[{shape}] = {plan.spec} of [{whole}]")
        if self.coordinate is not None:
            lines.append(f"{COORDINATE}: int32[{self.mesh.ndim}]")
        *operators, returned = graph_lines(self.graph, self.input_names(), self.new_values)
        return "\n".join([*lines, *operators, f"{returned} as {', '.join(str(y.spec) for y in self.outputs)}"]) + "\n"

    def input_names(self) -> dict[Tensor, str]:
        """Name the placeholders of the program's graph: its inputs, weights and states, and the rank's coordinate."""
        names = {local: plan.name for plan, local in self._placeholders()}
        return names if self.coordinate is None else {**names, self.coordinate: COORDINATE}

    def _placeholders(self) -> Iterator[tuple[TensorPlan, Tensor]]:
        yield from zip(self.inputs, self.graph.inputs, strict=False)
        for weight in self.weights:
            yield weight, self.weight_placeholders[weight.name]
        for state in self.states:
            yield state, self.state_placeholders[state.name]

    def data_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Read the data of a rank: its shard of each weight by name, and its coordinate.

        All data is read into memory; :func:`hidet_dist.weights.shard_blocks` reads a shard block by block.
        """
        coordinate = self.mesh.coordinate(rank)
        data = {}
        for weight in self.weights:
            data[weight.name] = read_shard(self.sources[weight.name], weight, self.mesh, coordinate)
        if self.coordinate is not None:
            data[COORDINATE] = torch.tensor(coordinate, dtype=torch.int32)
        return data


def communication_operators(graph: FlowGraph) -> list[CollectiveOp]:
    """List the communication operators of a graph, in execution order."""
    return [node for node in graph.nodes if isinstance(node, CollectiveOp)]


class ProgramTarget(Protocol):
    """The target of a program, as far as partitioning depends on it."""

    @property
    def device(self) -> str:
        """hidet's name of the device that the program's tensors are on."""

    @property
    def record(self) -> Target:
        """Whether operators without inputs are computed at once, and whether collectives keep NaN."""


@quick_hidet()
def partition_graph(
    graph: NormalGraph,
    stage: StagePlan,
    files: SafetensorsFiles | None = None,
    target: ProgramTarget | None = None,
    rules: RuleTable | None = None,
) -> Program:
    """Turn a stage's graph into the program that its plan describes; ``files`` have the weights known by name only.

    The program is for ``target``; by default for the device on which the graph was traced, which must be present.
    No data is put there: a program's inputs and weights are placeholders. The rules by which the plan is proven are
    shared with the table ``rules``, for any mesh and graph.

    Raises
    ------
    PlanError
        When the stage was planned for another graph, or is not proven to compute it
        (:mod:`hidet_dist.partitioning.proof`).
    PartitionError
        When an operator cannot be rebuilt on the shards that the plan gives it.
    WeightsError
        When ``files`` lack a weight, or have it in another shape or dtype.
    """
    return partition_proven(prove(stage, graph, rules), files, target)


@quick_hidet()
def partition_proven(
    proven: ProvenStage, files: SafetensorsFiles | None = None, target: ProgramTarget | None = None
) -> Program:
    """Turn the graph of a stage that is proven into its program, as :func:`partition_graph` does.

    Raises
    ------
    PartitionError, WeightsError
        As :func:`partition_graph`.
    """
    return _Partitioner(proven, files, target).run()


class _Partitioner:
    def __init__(self, proven: ProvenStage, files: SafetensorsFiles | None, target: ProgramTarget | None):
        view, stage = proven.view, proven.stage
        self.view = view.symbolic if isinstance(view, TwinView) else view
        self.stage = stage
        self.rules = proven.rules
        self.files = files
        self.mesh = stage.mesh
        self.multiples = multiples_of(stage.symbols)
        # Sizes of local symbols for evaluating conditions on shapes: they must hold for all sizes above 1.
        self.trial_sizes = {
            local.name: _TRIAL_FACTOR * self.mesh.size * self.multiples[local.symbol] // local.shards
            for local in local_symbols(stage.symbols, self.mesh)
        }
        self.parts: dict[str, int] = {}
        self.conversions = PlannedSteps(stage)
        self.local: dict[tuple[str, TensorShardSpec], Tensor] = {}
        self.produced: dict[str, TensorShardSpec] = {}
        # Local tensors whose padding is known to be zero.
        self.zero_padded: set[Tensor] = set()
        self.device = str(view.graph.outputs[0].device) if target is None else target.device
        self.computes_constants = target is None or target.record.computes_constants
        record = target_of_memory(view.graph.outputs[0].device.kind) if target is None else target.record
        self.keeps_nan = record.keeps_nan
        self.coordinate: Tensor = hidet.symbol([self.mesh.ndim], "int32", self.device)
        self.coordinate_used = False

    def run(self) -> Program:
        with hidet.option.context():
            if not self.computes_constants:
                hidet.option.execution_mode("symbolic")
            return self.program()

    def program(self) -> Program:
        placeholders = {tensor.name: self.placeholder(tensor) for tensor in self.stage.stored}
        for plan in self.stage.operators:
            self.operator(self.view.operators[plan.index], plan)
        outputs = [self.converted(tensor.name, tensor.spec) for tensor in self.stage.outputs]
        inputs = [placeholders[tensor.name] for tensor in self.stage.inputs]
        weights = {tensor.name: placeholders[tensor.name] for tensor in self.stage.weights}
        states = {tensor.name: placeholders[tensor.name] for tensor in self.stage.states}
        spec_of = {tensor.name: tensor.spec for tensor in self.stage.states}
        new_values = {old: self.local[new, spec_of[old]] for old, new in self.view.new_values.items()}
        updated = {y for new in new_values.values() for op in updates_of(new) for y in op.outputs}
        extra = [self.coordinate] if self.coordinate_used else []
        returned = [*unaliased(outputs, updated), *new_values.values()]
        program = FlowGraph(returned, [*inputs, *weights.values(), *states.values(), *extra])
        program.update_nodes()
        return Program(
            self.mesh,
            program,
            self.stage.inputs,
            self.stage.outputs,
            self.stage.weights,
            {name: source_of(self.view.tensors[name], self.files) for name in weights},
            weights,
            self.coordinate if self.coordinate_used else None,
            self.stage.symbols,
            states=self.stage.states,
            state_placeholders=states,
            new_values=tuple(new_values),
            initial={name: source for name in states if (source := initial_of(self.view.tensors[name])) is not None},
            parts=dict(sorted(self.parts.items())),
        )

    def use_coordinate(self) -> Tensor:
        self.coordinate_used = True
        return self.coordinate

    def placeholder(self, tensor: TensorPlan) -> Tensor:
        whole = self.view.tensors[tensor.name]
        shape = self.local_shape(tensor.name, tensor.spec)
        local = hidet.symbol(list(shape), whole.dtype, self.device)
        if is_state(whole):
            state_like(local, whole)
        self.produced[tensor.name] = tensor.spec
        self.local[tensor.name, tensor.spec] = local
        self.zero_padded.add(local)
        return local

    def operator(self, op: Operator, plan: OperatorPlan) -> None:
        spec, local = plan.spec, plan.spec.local
        inputs = [self.converted(self.view.names[x], s) for x, s in zip(op.inputs, spec.in_specs, strict=True)]
        names = [self.view.names[y] for y in op.outputs]
        try:
            wanted = None if spec.dispatch is None else self.dispatch(op, spec, inputs)
            self.mask(op, local, inputs)
            shapes = [self.local_shape(name, spec.partial_spec(o)) for o, name in enumerate(names)]
            partial = localize(op, inputs, local.in_specs, shapes, self.mesh, self.use_coordinate)
            if isinstance(op, ExpertLayerOp):
                partial = [separated(partial[0].op)]
            partial = [_moved_to(self.device, y) for y in partial]
        except (SpecError, ValueError) as error:
            raise PartitionError(
                f"Operator {plan.index}, {op.name}, cannot run on shards as {spec}: {error}"
            ) from error
        for o, name in enumerate(names):
            reduced, y = spec.partial_spec(o), partial[o]
            for n, fn in enumerate(spec.reduce_fns[o]):
                reduced = fn.after(reduced)
                shape = self.local_shape(name, reduced)
                if wanted is not None and o == n == 0:
                    y = self.row_exchange(y, wanted, "reduce_scatter_rows", fn.mesh_axes, shape[0])
                else:
                    y = self.step(y, Step.of(fn), shape)
            self.produced[name] = reduced
            self.local[name, reduced] = y

    def dispatch(self, op: Operator, spec: OpShardSpec, inputs: list[Tensor]) -> Tensor:
        """Gather the tokens of an operator's local inputs; return the mask of the tokens that each rank wants."""
        dispatch, routed = spec.dispatch, routed_of(op)
        assert dispatch is not None and routed is not None
        axes = dispatch.mesh_axes
        shape = {
            number: self.local_shape(self.view.names[op.inputs[number]], spec.local.in_specs[number])
            for number in dispatch.inputs
        }
        for number in dispatch.inputs:
            if number not in routed.rows:
                inputs[number] = self.step(inputs[number], Step("all_gather", axes, 0), shape[number])
        (experts,) = extents_of(inputs[routed.labels])
        wanted = wanted_rows(inputs[routed.chosen], int(experts), self.split_order(axes))
        for number in dispatch.inputs:
            if number in routed.rows:
                inputs[number] = self.row_exchange(inputs[number], wanted, "gather_rows", axes, shape[number][0])
        return wanted

    def row_exchange(self, x: Tensor, wanted: Tensor, kind: str, axes: Sequence[int], rows: Extent) -> Tensor:
        """Exchange the wanted rows of a local tensor, after which it has ``rows``."""
        return RowExchangeOp(x, wanted, kind, axes, self.mesh.group_size(axes), rows).outputs[0]

    def mask(self, op: Operator, spec: OpShardSpec, inputs: list[Tensor]) -> None:
        """Zero the padding of the inputs whose padding would affect the operator."""
        shapes = (self.view.shape_of(x) for x in (*op.inputs, *op.outputs))
        specs = (*spec.in_specs, *spec.out_specs)
        if not any(tensor_spec.is_padded(shape, self.mesh) for shape, tensor_spec in zip(shapes, specs, strict=True)):
            return
        for i, dim in self.rules.rule(at_sizes(op, self.view.symbols)).masks(spec, self.mesh):
            if inputs[i] not in self.zero_padded:
                size, axes = int(op.inputs[i].shape[dim]), spec.in_specs[i].mesh_axes_per_dim[dim]
                inputs[i] = mask_padding(inputs[i], dim, size, axes, self.mesh, self.use_coordinate)

    def converted(self, name: str, spec: TensorShardSpec) -> Tensor:
        """Return the local tensor in ``spec``; the first call converts it."""
        if (name, spec) not in self.local:
            source, (shape, _) = self.produced[name], self.view.pieces(name)
            x = self.local[name, source]
            # A slice zeroes the padding that it makes, and no step moves padding elsewhere.
            clean = x in self.zero_padded or not source.is_padded(shape, self.mesh)
            steps = self.conversions.take(name, shape, source, spec)
            if isinstance(x.op, FullOp) and not any(step.collective.communicates for step in steps):
                x, steps, clean = self.filled(x.op, self.local_shape(name, spec)), (), False
            for step, layout in zip(steps, walk(steps, source, shape, self.mesh), strict=True):
                after = split_of(layout)
                x = self.step(x, step, self.local_shape(name, after))
                clean = clean or not after.is_padded(shape, self.mesh)
            if clean:
                self.zero_padded.add(x)
            self.local[name, spec] = x
        return self.local[name, spec]

    def filled(self, op: Operator, shape: Sequence[Extent]) -> Tensor:
        """Fill a tensor of another shape with an operator's value: a shard of a filled tensor needs no slice."""
        return _moved_to(self.device, localize(op, [], (), [tuple(shape)], self.mesh, self.use_coordinate)[0])

    def local_shape(self, name: str, spec: TensorShardSpec) -> tuple[Extent, ...]:
        """Return the shape of a shard, symbolic dims included. Raises SpecError when the spec does not fit."""
        self.parts.update(spec.symbols(self.mesh))
        return part_shape(self.view.extents(name), spec, self.mesh, self.multiples)

    def step(self, x: Tensor, step: Step, result: Sequence[Extent]) -> Tensor:
        """Apply a step of a conversion, or a reduce function, to a local tensor; ``result`` is the local shape after.

        Symbolic dims keep their canonical names: gathering ``batch_over_2`` makes ``batch``.
        """
        if step.is_uneven(self.mesh):
            return self.step_of_parts(x, step, result)
        sizes = [self.mesh.shape[axis] for axis in step.mesh_axes]
        if not step.collective.communicates:
            assert step.dim is not None
            extent = result[step.dim]
            return ShardSliceOp(x, self.use_coordinate(), step.dim, step.mesh_axes, sizes, extent).outputs[0]
        count = self.mesh.group_size(step.mesh_axes)
        shape = list(extents_of(x))
        before, after = self.at_trial_sizes(shape), self.at_trial_sizes(result)
        packs, unpacks = step.packs(before, self.mesh), step.unpacks(before, after, self.mesh)
        if step.collective.sends_blocks:
            dim, axes = step.split
            shape[dim] = result[dim]
            if packs:
                x = StackShardsOp(x, dim, self.split_order(axes)).outputs[0]
            x = _reshaped(x, [count, *shape])
        x = self.collective(x, step, count)
        if step.collective.receives_blocks:
            assert step.dim is not None
            if unpacks:
                x = JoinShardsOp(x, step.dim, self.split_order(step.mesh_axes), result[step.dim]).outputs[0]
            x = _reshaped(x, result)
        return _averaged(x, step, count)

    def step_of_parts(self, x: Tensor, step: Step, result: Sequence[Extent]) -> Tensor:
        """Apply a step that splits a dim into unequal parts, or joins them, to a local tensor."""
        kind, joined, divided = step.collective, step.joined(self.mesh), step.divided(self.mesh)
        if not kind.communicates:
            assert step.dim is not None and divided is not None
            return CutPartOp(x, self.use_coordinate(), step.dim, divided, result[step.dim]).outputs[0]
        own = extents_of(x)
        before, after = self.at_trial_sizes(own), self.at_trial_sizes(result)
        packs, unpacks = step.packs(before, self.mesh), step.unpacks(before, after, self.mesh)
        unit: Extent = hidet.utils.prod([1, *(extent for dim, extent in enumerate(own) if dim not in step.dims)])
        # A part of an equal split, which may be symbolic, is a unit itself.
        if joined is not None and step.dim is not None:
            unit = unit * (own[step.dim] if joined.is_even else result[step.dim] // joined.units)
        if divided is not None:
            dim = step.split[0]
            unit = unit * (result[dim] if divided.is_even else own[dim] // divided.units)
            if packs:
                x = packed_parts(x, dim, divided)
        sizes, joined_sizes = (() if split is None else split.of_group_ranks for split in (divided, joined))
        parts = GroupParts(sizes, joined_sizes, unit, hidet.utils.prod([1, *result]))
        x = self.collective(x, step, self.mesh.group_size(step.mesh_axes), parts)
        if joined is not None and step.dim is not None and unpacks:
            return JoinPartsOp(x, step.dim, joined, result).outputs[0]
        return _averaged(_reshaped(x, result), step, self.mesh.group_size(step.mesh_axes))

    def at_trial_sizes(self, extents: Sequence[Extent]) -> list[int]:
        """Return extents at sizes for which conditions hold as for all sizes."""
        sizes = {**self.trial_sizes, **dict.fromkeys(self.parts, _TRIAL_FACTOR)}
        return [evaluate(extent, sizes) for extent in extents]

    def collective(self, x: Tensor, step: Step, count: int, parts: GroupParts | None = None) -> Tensor:
        """Apply the collective of a step over ``count`` ranks to a local tensor, so that NaN is kept.

        ``parts`` are those of the ranks, where they are unequal.

        Partial averages are added: :func:`_averaged` divides the sum.
        """
        op = "sum" if step.op == "average" else step.op
        if op not in EXTREMES or self.keeps_nan:
            return CommunicationOp(x, step.kind, step.mesh_axes, count, op, parts=parts).outputs[0]
        exchanged = parts and replace(parts, joined=(1,) * count, count=count * parts.count)
        partial = CommunicationOp(x, step.collective.exchange.name, step.mesh_axes, count, parts=exchanged).outputs[0]
        if parts is not None:
            partial = _reshaped(partial, [count, parts.count])
        return amax(partial, 0) if op == "max" else amin(partial, 0)

    def split_order(self, mesh_axes: Sequence[int]) -> SplitOrder:
        return SplitOrder(tuple(mesh_axes), tuple(self.mesh.shape[axis] for axis in mesh_axes))


def _moved_to(device: str, y: Tensor) -> Tensor:
    """Move the output of an operator without inputs to ``device``; return any other output unchanged."""
    if str(y.device) == device or y.op is None or y.op.inputs:
        return y
    op = copy.copy(y.op)
    op.attrs = {**op.attrs, "device": device}
    op.outputs = op.symbolic_run()
    moved: Tensor = op.outputs[y.trace[1]]
    return moved


def _averaged(x: Tensor, step: Step, count: int) -> Tensor:
    """Divide the sum of the averages of ``count`` ranks by their number, if the step averages.

    Each is the average of as many elements: an axis that splits what is averaged does so in equal parts, whatever the
    parts are into which the result is scattered.
    """
    return x / float(count) if step.op == "average" else x


def _reshaped(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    return x if same_shape(extents_of(x), shape) else reshape(x, list(shape))


def unaliased(outputs: Sequence[Tensor], updated: Set[Tensor] = frozenset()) -> list[Tensor]:
    """Copy outputs that share memory with a placeholder, a constant or another output, so that none share memory.

    ``updated`` are results of updates, which share the memory of a state.
    """
    seen: set[Tensor] = set(updated)
    result = []
    for y in outputs:
        root = y
        while root.op is not None and root.op.share_map:
            root = root.op.inputs[root.op.share_map[root.trace[1]]]
        shared = root.op is None or root in seen
        seen.add(root)
        result.append(CopyOp(y).outputs[0] if shared else y)
    return result
