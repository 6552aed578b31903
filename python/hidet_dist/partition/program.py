"""The partition pass: slices weights, rebuilds operators on shards, injects the communication that the plan names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.connect import Step, connect
from hidet_dist.errors import ConfigError, PartitionError, PlanError, SpecError
from hidet_dist.machine import builtin
from hidet_dist.partition.operators import (
    CommunicationOp,
    CopyOp,
    JoinShardsOp,
    ShardSliceOp,
    StackShardsOp,
)
from hidet_dist.rules.local import localize
from hidet_dist.spec import DeviceMesh, OperatorPlan, Plan, ReduceFn, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.symbols import LocalSymbol, SymbolPlan, bind, local_symbols
from hidet_dist.symbolic.extents import Extent, extents_of, local_extent, same_shape
from hidet_dist.view import GraphView

COORDINATE = "coordinate"


@dataclass
class Program:
    """The sharded graph of one stage, the same for every rank (SPMD).

    Attributes
    ----------
    graph: FlowGraph
        Its inputs are the local graph inputs, then one placeholder a weight shard, then the coordinate.
    inputs, outputs: how the graph's inputs and outputs lie on the mesh.
    weights: how each weight lies; ``sources`` are the whole weights, by name.
    coordinate: int32[mesh.ndim], the placeholder of the device's coordinate; None when nothing depends on it.
    symbols: the symbolic dims. ``local_symbols`` are those that local shapes are written in.
    """

    mesh: DeviceMesh
    graph: FlowGraph
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    weights: tuple[TensorPlan, ...]
    sources: dict[str, Tensor]
    weight_placeholders: dict[str, Tensor]
    coordinate: Tensor | None
    symbols: tuple[SymbolPlan, ...] = ()

    @property
    def local_symbols(self) -> tuple[LocalSymbol, ...]:
        """The symbols of the local program, and what they are shards of."""
        return local_symbols(self.symbols, self.mesh)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of each local symbol, from the shapes of the whole inputs. Raises InputError."""
        written = [tensor.written or tensor.shape for tensor in self.inputs]
        return bind(self.symbols, self.local_symbols, zip(written, shapes, strict=True))

    def communications(self) -> list[str]:
        """Each communication operator in execution order, as one line of text."""
        return [
            f"{op.kind}({op.reduce_op + ', ' if op.reduce_op else ''}axes={''.join(map(str, op.mesh_axes))}) "
            f"{op.inputs[0].dtype.name}{_text(op.inputs[0])} -> {_text(op.outputs[0])}"
            for op in communication_operators(self.graph)
        ]

    def data_of(self, rank: int) -> dict[str, torch.Tensor]:
        """What differs between ranks: the rank's shard of each weight by name, and its coordinate."""
        coordinate = self.mesh.coordinate(rank)
        data = {}
        for weight in self.weights:
            whole = self.sources[weight.name].torch()
            data[weight.name] = whole[weight.spec.slices(weight.shape, self.mesh, coordinate)].contiguous()
        if self.coordinate is not None:
            data[COORDINATE] = torch.tensor(coordinate, dtype=torch.int32)
        return data


def _text(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


def communication_operators(graph: FlowGraph) -> list[CommunicationOp]:
    """The communication operators of a graph, in execution order."""
    return [node for node in graph.nodes if isinstance(node, CommunicationOp)]


def partition_graph(graph: FlowGraph, plan: Plan) -> Program:
    """Turn a graph into the program that its plan describes.

    Raises
    ------
    PlanError
        When the plan was made for another graph, or its specs do not fit the graph.
    PartitionError
        When an operator cannot be rebuilt on the shards that the plan gives it.
    """
    stage = plan.stage
    try:
        view = GraphView(graph, stage.symbols)
    except ConfigError as error:
        raise PlanError(f"The plan does not fit the graph: {error}") from error
    if stage.fingerprint != view.fingerprint():
        raise PlanError(
            f"The plan was made for the graph {stage.fingerprint}, not this one ({view.fingerprint()}). Plan it anew."
        )
    return _Partitioner(view, stage).run()


class _Partitioner:
    def __init__(self, view: GraphView, stage: StagePlan):
        self.view = view
        self.stage = stage
        self.mesh = stage.mesh
        self.multiples = {symbol.name: symbol.multiple_of for symbol in stage.symbols}
        # Which steps convert a tensor does not depend on what they cost, so any machine serves.
        self.cluster = builtin("cpu", self.mesh)
        self.local: dict[tuple[str, TensorShardSpec], Tensor] = {}
        self.lies: dict[str, TensorShardSpec] = {}
        device = view.graph.outputs[0].device
        self.coordinate: Tensor = hidet.symbol([self.mesh.ndim], "int32", device)
        self.coordinate_used = False

    def run(self) -> Program:
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
            {name: self.view.tensors[name] for name in weights},
            weights,
            self.coordinate if self.coordinate_used else None,
            self.stage.symbols,
        )

    def own_coordinate(self) -> Tensor:
        self.coordinate_used = True
        return self.coordinate

    def placeholder(self, tensor: TensorPlan) -> Tensor:
        whole = self.view.tensors[tensor.name]
        try:
            shape = self.local_shape(tensor.name, tensor.spec)
        except SpecError as error:
            raise PlanError(f"The plan's spec of {tensor.name} does not fit: {error}") from error
        local = hidet.symbol(list(shape), whole.dtype, whole.device)
        self.lies[tensor.name] = tensor.spec
        self.local[tensor.name, tensor.spec] = local
        return local

    def operator(self, op: Operator, plan: OperatorPlan) -> None:
        spec = plan.spec
        if (len(spec.in_specs), len(spec.out_specs)) != (len(op.inputs), len(op.outputs)):
            raise PlanError(f"The plan's spec {spec} does not fit operator {plan.index}, {op.name}.")
        inputs = [self.wanted(self.view.names[x], s) for x, s in zip(op.inputs, spec.in_specs, strict=True)]
        names = [self.view.names[y] for y in op.outputs]
        try:
            shapes = [self.local_shape(name, spec.partial_spec(o)) for o, name in enumerate(names)]
            partial = localize(op, inputs, spec.in_specs, shapes, self.mesh, self.own_coordinate)
        except (SpecError, ValueError) as error:
            raise PartitionError(
                f"Operator {plan.index}, {op.name}, cannot run on shards as {spec}: {error}"
            ) from error
        for name, result, own, fns in zip(names, partial, spec.out_specs, spec.reduce_fns, strict=True):
            self.lies[name] = own
            self.local[name, own] = self.named(functools.reduce(self.reduce, fns, result), name, own)

    def local_shape(self, name: str, spec: TensorShardSpec) -> tuple[Extent, ...]:
        """The shape of a shard, written as everywhere else. Raises SpecError when the spec does not fit."""
        sizes = spec.local_shape(self.view.shape(name), self.mesh)
        shape: list[Extent] = []
        for extent, size, axes in zip(self.view.extents(name), sizes, spec.mesh_axes_per_dim, strict=True):
            local = (
                size if isinstance(extent, int) else local_extent(extent, self.mesh.group_size(axes), self.multiples)
            )
            if local is None:
                raise SpecError(f"{spec} splits {extent} into what it is not declared to be a multiple of")
            shape.append(local)
        return tuple(shape)

    def named(self, x: Tensor, name: str, spec: TensorShardSpec) -> Tensor:
        """``x`` with symbolic dims written as everywhere else: a gathered ``2 * batch_over_2`` is called ``batch``."""
        shape = self.local_shape(name, spec)
        return x if same_shape(extents_of(x), shape) else hidet.ops.reshape(x, list(shape))

    def wanted(self, name: str, spec: TensorShardSpec) -> Tensor:
        """The tensor in ``spec``, converted once however often it is wanted so."""
        if (name, spec) not in self.local:
            try:
                source = self.lies[name]
                steps = connect(self.view.shape(name), self.view.itemsize(name), source, spec, self.cluster).steps
            except SpecError as error:
                raise PlanError(f"The plan's spec of {name} does not fit: {error}") from error
            x = self.local[name, source]
            for step in steps:
                x = self.named(self.step(x, step), name, step.result)
            self.local[name, spec] = x
        return self.local[name, spec]

    def step(self, x: Tensor, step: Step) -> Tensor:
        sizes = [self.mesh.shape[axis] for axis in step.mesh_axes]
        if step.kind == "slice":
            return ShardSliceOp(x, self.own_coordinate(), step.dim, step.mesh_axes, sizes).outputs[0]
        gathered = CommunicationOp(x, "all_gather", step.mesh_axes, self.mesh.group_size(step.mesh_axes)).outputs[0]
        if step.dim == 0:
            return hidet.ops.reshape(gathered, [gathered.shape[0] * gathered.shape[1], *gathered.shape[2:]])
        return JoinShardsOp(gathered, step.dim).outputs[0]

    def reduce(self, y: Tensor, fn: ReduceFn) -> Tensor:
        size = self.mesh.group_size(fn.mesh_axes)
        op = "sum" if fn.op == "average" else fn.op
        if fn.dim is not None:
            if fn.dim == 0:
                y = hidet.ops.reshape(y, [size, y.shape[0] // size, *y.shape[1:]])
            else:
                y = StackShardsOp(y, fn.dim, size).outputs[0]
        y = CommunicationOp(y, fn.kind, fn.mesh_axes, size, op).outputs[0]
        # The shards are equal, so the average of the whole is the average of the shards' averages.
        return y / float(size) if fn.op == "average" else y


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
