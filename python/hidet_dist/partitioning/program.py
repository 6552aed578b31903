"""The partition pass: slices weights, rebuilds operators on shards, injects the communication that the plan names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.artifacts.manifest import COORDINATE
from hidet_dist.errors import PartitionError, SpecError
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning.once import reshape
from hidet_dist.partitioning.operators import (
    CommunicationOp,
    CopyOp,
    JoinShardsOp,
    ShardSliceOp,
    SplitOrder,
    StackShardsOp,
)
from hidet_dist.partitioning.proof import prove
from hidet_dist.partitioning.text import graph_lines
from hidet_dist.reshard import PlannedSteps, Step, walk
from hidet_dist.rules.local import localize
from hidet_dist.rules.padding import mask_padding
from hidet_dist.rules.rule import derive
from hidet_dist.spec import DeviceMesh, OperatorPlan, OpShardSpec, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.extents import Extent, evaluate, extents_of, local_extent, same_shape
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.partial import split_of
from hidet_dist.spec.symbols import LocalSymbol, SymbolPlan, bind, local_symbols
from hidet_dist.symbolic.planning import TwinView
from hidet_dist.symbolic.twin import at_sizes
from hidet_dist.view import GraphView
from hidet_dist.weights import SafetensorsFiles, Source, read_shard, source_of

_TRIAL = 1009  # a prime


@dataclass
class Program:
    """The sharded graph of one stage, the same for every rank (SPMD).

    Attributes
    ----------
    graph: FlowGraph
        Its inputs are the local graph inputs, then one placeholder a weight shard, then the coordinate.
    inputs, outputs: how the graph's inputs and outputs lie on the mesh.
    weights: how each weight lies; ``sources`` are the data of the whole weights, by name.
    coordinate: int32[mesh.ndim], the placeholder of the device's coordinate; None when nothing depends on it.
    symbols: the symbolic dims. ``local_symbols`` are those that local shapes are written in.
    interface: names and nesting of the arguments and results of the model that the graph was traced from, if any.
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

    @property
    def local_symbols(self) -> tuple[LocalSymbol, ...]:
        """The symbols of the local program, and what they are shards of."""
        return local_symbols(self.symbols, self.mesh)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of each local symbol, from the whole inputs' shapes. Raises InputError when they do not fit."""
        written = [tensor.written or tensor.shape for tensor in self.inputs]
        return bind(self.symbols, self.local_symbols, zip(written, shapes, strict=True))

    def communications(self) -> list[str]:
        """Each communication operator in execution order, as one line of text."""
        return [op.description for op in communication_operators(self.graph)]

    def text(self) -> str:
        """The program as text: its inputs and weights with their specs, then one line an operator, with local shapes.

        The text is the same for the same program. ``of`` stands before the shape of the whole tensor.
        """
        names: dict[Tensor, str] = {}
        lines = [f"program on {self.mesh}"]
        placeholders = [*zip(self.inputs, self.graph.inputs, strict=False)]
        placeholders += [(weight, self.weight_placeholders[weight.name]) for weight in self.weights]
        for plan, local in placeholders:
            names[local] = plan.name
            whole = ", ".join(map(str, plan.written or plan.shape))
            shape = ", ".join(map(str, local.shape))
            lines.append(f"{plan.name}: {local.dtype.name}[{shape}] = {plan.spec} of [{whole}]")
        if self.coordinate is not None:
            names[self.coordinate] = COORDINATE
            lines.append(f"{COORDINATE}: int32[{self.mesh.ndim}]")
        *operators, returned = graph_lines(self.graph, names)
        return "\n".join([*lines, *operators, f"{returned} as {', '.join(str(y.spec) for y in self.outputs)}"]) + "\n"

    def data_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Read a rank's own data: its shard of each weight by name, and its coordinate.

        All in memory; :func:`hidet_dist.weights.shard_blocks` goes through a shard block by block.
        """
        coordinate = self.mesh.coordinate(rank)
        data = {}
        for weight in self.weights:
            data[weight.name] = read_shard(self.sources[weight.name], weight, self.mesh, coordinate)
        if self.coordinate is not None:
            data[COORDINATE] = torch.tensor(coordinate, dtype=torch.int32)
        return data


def communication_operators(graph: FlowGraph) -> list[CommunicationOp]:
    """The communication operators of a graph, in execution order."""
    return [node for node in graph.nodes if isinstance(node, CommunicationOp)]


def partition_graph(
    graph: NormalGraph, stage: StagePlan, files: SafetensorsFiles | None = None, device: str | None = None
) -> Program:
    """Turn a stage's graph into the program that its plan describes; ``files`` have the weights known by name only.

    The program is for ``device`` (``cpu`` or ``cuda:0``); for the one that the graph was traced on by default. Nothing
    is put there: a program's inputs and weights are placeholders.

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
    proven = prove(stage, graph)
    view = proven.view.symbolic if isinstance(proven.view, TwinView) else proven.view
    return _Partitioner(view, proven.stage, files, device or str(view.graph.outputs[0].device)).run()


class _Partitioner:
    def __init__(self, view: GraphView, stage: StagePlan, files: SafetensorsFiles | None, device: str):
        self.view = view
        self.stage = stage
        self.files = files
        self.mesh = stage.mesh
        self.multiples = {symbol.name: symbol.multiple_of for symbol in stage.symbols}
        # Sizes to try conditions on shapes with: like any other, and none of them 1.
        self.trial_sizes = {
            own.name: _TRIAL * self.mesh.size * self.multiples[own.symbol] // own.shards
            for own in local_symbols(stage.symbols, self.mesh)
        }
        self.conversions = PlannedSteps(stage)
        self.local: dict[tuple[str, TensorShardSpec], Tensor] = {}
        self.lies: dict[str, TensorShardSpec] = {}
        # Tensors whose padding, if there is any, is known to be zero.
        self.zero_padded: set[Tensor] = set()
        self.device = device
        self.coordinate: Tensor = hidet.symbol([self.mesh.ndim], "int32", device)
        self.coordinate_used = False

    def run(self) -> Program:
        with hidet.option.context():
            if not hidet.runtime.device.instantiate_device(self.device).is_cpu():
                # An operator without inputs, such as a scalar, would run right away, on a device that may not be here.
                hidet.option.execution_mode("symbolic")
            return self.program()

    def program(self) -> Program:
        placeholders = {tensor.name: self.placeholder(tensor) for tensor in (*self.stage.inputs, *self.stage.weights)}
        for plan in self.stage.operators:
            self.operator(self.view.operators[plan.index], plan)
        outputs = [self.wanted(tensor.name, tensor.spec) for tensor in self.stage.outputs]
        inputs = [placeholders[tensor.name] for tensor in self.stage.inputs]
        weights = {tensor.name: placeholders[tensor.name] for tensor in self.stage.weights}
        extra = [self.coordinate] if self.coordinate_used else []
        program = FlowGraph(_own_memory(outputs), [*inputs, *weights.values(), *extra])
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
        )

    def own_coordinate(self) -> Tensor:
        self.coordinate_used = True
        return self.coordinate

    def placeholder(self, tensor: TensorPlan) -> Tensor:
        whole = self.view.tensors[tensor.name]
        shape = self.local_shape(tensor.name, tensor.spec)
        local = hidet.symbol(list(shape), whole.dtype, self.device)
        self.lies[tensor.name] = tensor.spec
        self.local[tensor.name, tensor.spec] = local
        self.zero_padded.add(local)
        return local

    def operator(self, op: Operator, plan: OperatorPlan) -> None:
        spec = plan.spec
        inputs = [self.wanted(self.view.names[x], s) for x, s in zip(op.inputs, spec.in_specs, strict=True)]
        names = [self.view.names[y] for y in op.outputs]
        try:
            self.mask(op, spec, inputs)
            shapes = [self.local_shape(name, spec.partial_spec(o)) for o, name in enumerate(names)]
            partial = localize(op, inputs, spec.in_specs, shapes, self.mesh, self.own_coordinate)
            partial = [_made_on(self.device, y) for y in partial]
        except (SpecError, ValueError) as error:
            raise PartitionError(
                f"Operator {plan.index}, {op.name}, cannot run on shards as {spec}: {error}"
            ) from error
        for o, name in enumerate(names):
            lies, y = spec.partial_spec(o), partial[o]
            for fn in spec.reduce_fns[o]:
                lies = fn.after(lies)
                y = self.step(y, Step.of(fn), self.local_shape(name, lies))
            self.lies[name] = lies
            self.local[name, lies] = y

    def mask(self, op: Operator, spec: OpShardSpec, inputs: list[Tensor]) -> None:
        """Put zeros into the padding of those inputs whose padding the operator would see."""
        shapes = (self.view.shape(self.view.names[x]) for x in (*op.inputs, *op.outputs))
        specs = (*spec.in_specs, *spec.out_specs)
        if not any(own.is_padded(shape, self.mesh) for shape, own in zip(shapes, specs, strict=True)):
            return
        for i, dim in derive(at_sizes(op, self.view.symbols)).masks(spec, self.mesh):
            if inputs[i] not in self.zero_padded:
                size, axes = int(op.inputs[i].shape[dim]), spec.in_specs[i].mesh_axes_per_dim[dim]
                inputs[i] = mask_padding(inputs[i], dim, size, axes, self.mesh, self.own_coordinate)

    def wanted(self, name: str, spec: TensorShardSpec) -> Tensor:
        """The tensor in ``spec``, converted once however often it is wanted so."""
        if (name, spec) not in self.local:
            source, (shape, _) = self.lies[name], self.view.pieces(name)
            x = self.local[name, source]
            # A slice puts zeros beyond the end of a dim, and no step moves padding elsewhere.
            clean = x in self.zero_padded or not source.is_padded(shape, self.mesh)
            steps = self.conversions.take(name, shape, source, spec)
            for step, layout in zip(steps, walk(steps, source, shape, self.mesh), strict=True):
                lies = split_of(layout)
                x = self.step(x, step, self.local_shape(name, lies))
                clean = clean or not lies.is_padded(shape, self.mesh)
            if clean:
                self.zero_padded.add(x)
            self.local[name, spec] = x
        return self.local[name, spec]

    def local_shape(self, name: str, spec: TensorShardSpec) -> tuple[Extent, ...]:
        """The shape of a shard as it is written everywhere. Raises SpecError when the spec does not fit."""
        sizes = spec.local_shape(self.view.shape(name), self.mesh)
        shape: list[Extent] = []
        for extent, size, axes in zip(self.view.extents(name), sizes, spec.mesh_axes_per_dim, strict=True):
            shards = self.mesh.group_size(axes)
            local = size if isinstance(extent, int) else local_extent(extent, shards, self.multiples)
            if local is None:
                raise SpecError(f"{spec} splits {extent} into {shards}, which it is not declared to be a multiple of")
            shape.append(local)
        return tuple(shape)

    def step(self, x: Tensor, step: Step, result: Sequence[Extent]) -> Tensor:
        """One step of a conversion, or one reduce function, on a local tensor; ``result`` is the local shape after.

        Symbolic dims are named as everywhere else on the way: what is gathered from ``batch_over_2`` is ``batch``.
        """
        sizes = [self.mesh.shape[axis] for axis in step.mesh_axes]
        if not step.collective.communicates:
            assert step.dim is not None
            extent = result[step.dim]
            return ShardSliceOp(x, self.own_coordinate(), step.dim, step.mesh_axes, sizes, extent).outputs[0]
        count = self.mesh.group_size(step.mesh_axes)
        shape = list(extents_of(x))
        before, after = ([evaluate(extent, self.trial_sizes) for extent in own] for own in (shape, result))
        packs, unpacks = step.packs(before), step.unpacks(before, after, self.mesh)
        if step.collective.sends_blocks:
            dim, axes = step.split
            shape[dim] = result[dim]
            if packs:
                x = StackShardsOp(x, dim, self.split_order(axes)).outputs[0]
            x = _shaped(x, [count, *shape])
        # The shards are equal, so the average of the whole is the average of the shards' averages.
        op = "sum" if step.op == "average" else step.op
        x = CommunicationOp(x, step.kind, step.mesh_axes, count, op).outputs[0]
        if step.collective.receives_blocks:
            assert step.dim is not None
            if unpacks:
                x = JoinShardsOp(x, step.dim, self.split_order(step.mesh_axes), result[step.dim]).outputs[0]
            x = _shaped(x, result)
        return x / float(count) if step.op == "average" else x

    def split_order(self, mesh_axes: Sequence[int]) -> SplitOrder:
        return SplitOrder(tuple(mesh_axes), tuple(self.mesh.shape[axis] for axis in mesh_axes))


def _made_on(device: str, y: Tensor) -> Tensor:
    """The output of an operator that makes a tensor out of nothing, made on ``device``; any other as it is."""
    if str(y.device) == device or y.op is None or y.op.inputs:
        return y
    op = copy.copy(y.op)
    op.attrs = {**op.attrs, "device": device}
    op.outputs = op.symbolic_run()
    made: Tensor = op.outputs[y.trace[1]]
    return made


def _shaped(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    return x if same_shape(extents_of(x), shape) else reshape(x, list(shape))


def _own_memory(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that are views of a placeholder or of another output become copies: each has memory of its own."""
    seen: set[Tensor] = set()
    result = []
    for y in outputs:
        root = y
        while root.op is not None and root.op.share_map:
            root = root.op.inputs[root.op.share_map[root.trace[1]]]
        shared = root.op is None or root in seen
        seen.add(root)
        result.append(CopyOp(y).outputs[0] if shared else y)
    return result
