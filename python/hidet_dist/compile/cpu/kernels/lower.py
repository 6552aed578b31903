"""The lowering of an optimized graph to kernels, except matrix products, convolutions and communication."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.fusion.fused_operator import FusedTask
from hidet.graph.ops.normalize.norm import NormalizeTask
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.softmax import SoftmaxTask
from hidet.ir.compute import GridCompute, TensorInput, TensorNode, tensor_input
from hidet.ir.expr import Constant
from hidet.ir.functors import IRRewriter
from hidet.ir.task import Task

from hidet_dist.compile.cpu.kernels.emit import kernel_text
from hidet_dist.compile.cpu.kernels.lowering import Types, UnsupportedComputationError, shape_of
from hidet_dist.compile.cpu.kernels.operators import Kernel, KernelOp, function_name
from hidet_dist.compile.cpu.kernels.schedule import KEPT_BYTES, USUAL_SIZE, Schedule, schedule, work
from hidet_dist.spec.extents import extents_of

_MOST_MERGED = 8  # operators in one kernel: the time of scheduling them grows with the square of their number
_MOST_OPERATORS = 64  # operators of the graph before fusion, for the same reason
_LONGEST_NAME = 60
_WRITTEN_BY_HIDET = (SoftmaxTask, NormalizeTask)  # tasks whose handwritten kernels in hidet are slower


class _Group:
    """Operators in one kernel: it computes the output of the last one from inputs that none of them computes."""

    def __init__(self, node: Operator, types: Types):
        self.types = types
        self.nodes = [node]  # the last one first, each before those that it reads
        self.inputs: list[tuple[Tensor, TensorInput]] = list(zip(node.inputs, node.task.inputs, strict=True))
        self.output: TensorNode = node.task.outputs[0]
        self.schedule: Schedule = schedule([parameter for _, parameter in self.inputs], self.output, types)

    @property
    def tensor(self) -> Tensor:
        return self.nodes[0].outputs[0]

    def with_producer(self, producer: Operator) -> bool:
        """Add a producer to the group if that is feasible and faster; return whether it was added."""
        if len(self.nodes) == _MOST_MERGED or sum(map(_operators, (*self.nodes, producer))) > _MOST_OPERATORS:
            return False
        task = producer.task
        (result,) = producer.outputs
        computed = task.outputs[0]
        replaced = {parameter: computed for tensor, parameter in self.inputs if tensor is result}
        kept = [(tensor, parameter) for tensor, parameter in self.inputs if tensor is not result]
        # Operators may share a task, and so its parameters, for different tensors.
        taken = {parameter for _, parameter in kept}
        renamed = {x: tensor_input(x.name, x.type.dtype, x.shape, x.type.layout) for x in task.inputs if x in taken}
        if renamed:
            replaced = dict.fromkeys(replaced, _replaced(computed, renamed))
        own_inputs = [(x, renamed.get(own, own)) for x, own in zip(producer.inputs, task.inputs, strict=True)]
        output = _replaced(self.output, replaced)
        inputs, output = _distinct([*kept, *own_inputs], output)
        try:
            arranged = schedule([parameter for _, parameter in inputs], output, self.types)
            alone = schedule(list(task.inputs), computed, self.types)
        except UnsupportedComputationError:
            return False
        if not _worthwhile(self.schedule, alone, arranged, _elements(computed)):
            return False
        self.nodes.append(producer)
        self.inputs, self.output, self.schedule = inputs, output, arranged
        return True


def _operators(node: Operator) -> int:
    """Count the operators that hidet has fused into one."""
    return len(node.task.fused_graph.nodes) if isinstance(node.task, FusedTask) else 1


class _Replaced(IRRewriter):
    """Replaces tensors in a definition; unlike hidet's rewriter, without inferring the type of each definition."""

    def __init__(self, tensors: Mapping[TensorInput, TensorNode]):
        super().__init__()
        self.memo.update(tensors)

    def visit_GridCompute(self, node: GridCompute) -> GridCompute:
        value = self(node.value)
        return node if value is node.value else GridCompute(node.name, node._shape, node.axes, value, node.layout)


def _replaced(output: TensorNode, tensors: Mapping[TensorInput, TensorNode]) -> TensorNode:
    result: TensorNode = _Replaced(tensors)(output)
    return result


def _elements(tensor: TensorNode) -> int:
    return math.prod(int(n) if isinstance(n, int | Constant) else USUAL_SIZE for n in shape_of(tensor))


def _distinct(
    inputs: Sequence[tuple[Tensor, TensorInput]], output: TensorNode
) -> tuple[list[tuple[Tensor, TensorInput]], TensorNode]:
    """Merge inputs that are the same tensor."""
    first: dict[Tensor, TensorInput] = {}
    replaced: dict[TensorInput, TensorInput] = {}
    for tensor, parameter in inputs:
        if tensor in first and first[tensor] is not parameter:
            replaced[parameter] = first[tensor]
        first.setdefault(tensor, parameter)
    return list(first.items()), _replaced(output, replaced) if replaced else output


def lower_to_kernels(graph: FlowGraph) -> FlowGraph:
    """Replace operators of an optimized graph on the CPU by kernels, each of which computes one or several operators.

    Operators that the kernels do not support stay as they are: opaque operators (so matrix products by a library, and
    communication), those with a handwritten implementation in hidet, and unsupported computations. A reshape computes
    nothing and stays, too, unless it is between operators of one kernel.
    """
    nodes = graph.nodes
    readers: dict[Tensor, list[Operator]] = {}
    for node in nodes:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    groups: dict[Operator, _Group] = {}
    types = Types()
    for node in reversed(nodes):
        if not _can_lower(node):
            continue
        (result,) = node.outputs
        users = {groups.get(reader) for reader in readers.get(result, ())}
        if len(users) == 1 and not any(result is y for y in graph.outputs):
            (group,) = users
            if group is not None and group.with_producer(node):
                groups[node] = group
                continue
        if node.task.share_map:
            continue
        try:
            groups[node] = _Group(node, types)
        except UnsupportedComputationError:
            continue
    return _rebuilt(graph, groups)


def _can_lower(node: Operator) -> bool:
    task = node.task
    if node.build_target != "cpu" or isinstance(node, OpaqueOperator) or len(task.outputs) != 1:
        return False
    if task.attrs.get("is_opaque") or task.assertions or not task.inputs:
        return False
    anchor = task.fused_graph.nodes[task.anchor].task if isinstance(task, FusedTask) else task
    return type(anchor).implement_cpu is Task.implement_cpu or isinstance(anchor, _WRITTEN_BY_HIDET)


def _rebuilt(graph: FlowGraph, groups: dict[Operator, _Group]) -> FlowGraph:
    replaced: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        group = groups.get(node)
        if group is None:
            inputs = [replaced.get(x, x) for x in node.inputs]
            if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
                replaced.update(zip(node.outputs, node.reforward(inputs), strict=True))
        elif group.nodes[0] is node:
            replaced[group.tensor] = _operator(group, replaced)
    outputs = [replaced.get(y, y) for y in graph.outputs]
    result = FlowGraph(outputs, inputs=graph.inputs)
    result.update_nodes()
    return result


def _operator(group: _Group, replaced: dict[Tensor, Tensor]) -> Tensor:
    result = group.tensor
    text = kernel_text(group.schedule, function_name())
    kernel = Kernel(_name(group.nodes), text, tuple(group.schedule.symbols.values()))
    inputs = [replaced.get(tensor, tensor) for tensor, _ in group.inputs]
    return KernelOp(*inputs, kernel=kernel, shape=list(extents_of(result)), dtype=result.dtype.name).outputs[0]


def _name(nodes: Sequence[Operator]) -> str:
    if len(nodes) == 1:
        return str(nodes[0].name)
    parts = dict.fromkeys(re.sub("^Fused", "", node.name) for node in reversed(nodes))
    return "Fused" + "".join(part for part in parts if part != "Reshape" or len(parts) == 1)[:_LONGEST_NAME]


def _worthwhile(before: Schedule, producer: Schedule, merged: Schedule, size: int) -> bool:
    """Whether one kernel for two operators pays: not if it computes much twice, or keeps more than fits the cache."""
    kept = merged.kept_bytes()
    if len(merged.nests) > 1 and (kept is None or kept > KEPT_BYTES) and not merged.outer:
        return False
    if kept is not None and kept > KEPT_BYTES:
        return False
    return work(merged) <= work(before) + work(producer) + 2 * size
