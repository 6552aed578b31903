"""The lowering of an optimized graph to kernels, except matrix products, convolutions and communication."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.fusion.fused_operator import FusedTask
from hidet.graph.ops.normalize.norm import NormalizeTask
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.softmax import SoftmaxTask
from hidet.ir.compute import GridCompute, TensorInput, TensorNode
from hidet.ir.expr import Constant, Expr
from hidet.ir.functors import IRRewriter
from hidet.ir.task import Task

from hidet_dist.compat.definitions import bound_in, renamed
from hidet_dist.compat.passes import takes_memory
from hidet_dist.compile.cpu.kernels.emit import kernel_text
from hidet_dist.compile.cpu.kernels.lowering import Types, UnsupportedComputationError, shape_of
from hidet_dist.compile.cpu.kernels.operators import Kernel, KernelOp, function_name
from hidet_dist.compile.cpu.kernels.schedule import KEPT_BYTES, USUAL_SIZE, LoopSchedule, schedule, work
from hidet_dist.rewriting import copy_operator
from hidet_dist.spec.extents import extents_of

_MOST_MERGED = 8  # operators in one kernel: the time of scheduling them grows with the square of their number
_MOST_OPERATORS = 64  # operators of the graph before fusion, for the same reason
_LONGEST_NAME = 60
_WRITTEN_BY_HIDET = (SoftmaxTask, NormalizeTask)  # tasks whose handwritten kernels in hidet are slower


class _Computation:
    """The computation of one kernel: its inputs, its output and their schedule; operators in equal layers share it."""

    def __init__(self, parameters: Sequence[TensorInput], output: TensorNode, arranged: LoopSchedule):
        self.parameters = tuple(parameters)
        self.output = output
        self.schedule = arranged

    @functools.cached_property
    def bound(self) -> frozenset[Expr]:
        """The axes and the parameters of the computation's definitions."""
        return bound_in([*self.parameters, self.output])


class _Schedules:
    """The schedules of tasks, and of their merges, each made once."""

    def __init__(self) -> None:
        self.types = Types()
        self.of_task: dict[Task, _Computation | None] = {}
        self.of_merge: dict[Any, tuple[_Computation, list[int]] | None] = {}
        self.kernels: dict[Any, KernelOp] = {}

    def task(self, task: Task) -> _Computation | None:
        """Schedule a task; None if the kernels do not support it."""
        if task not in self.of_task:
            self.of_task[task] = self._scheduled(task.inputs, task.outputs[0])
        return self.of_task[task]

    def merge(
        self, reader: _Computation, reads: Sequence[int], producer: Task, same: Sequence[int]
    ) -> tuple[_Computation, list[int]] | None:
        """Merge a task into the computation that reads its output, if that is feasible and faster.

        Parameters
        ----------
        reads: sequence of int
            The positions of the task's output among the reader's inputs.
        same: sequence of int
            For each of the reader's other inputs and then the task's inputs, the place of the first among them that is
            the same tensor.

        Returns
        -------
        The merged computation, and the places of its inputs among those.
        """
        key = reader, tuple(reads), producer, tuple(same)
        if key not in self.of_merge:
            self.of_merge[key] = self._merged(reader, reads, producer, same)
        return self.of_merge[key]

    def _merged(
        self, reader: _Computation, reads: Sequence[int], producer: Task, same: Sequence[int]
    ) -> tuple[_Computation, list[int]] | None:
        alone = self.task(producer)
        if alone is None:
            return None
        computed, own = producer.outputs[0], list(producer.inputs)
        kept = [parameter for place, parameter in enumerate(reader.parameters) if place not in reads]
        if not reader.bound.isdisjoint(alone.bound):  # the reader has an equal task, on other tensors
            own, (computed,) = renamed(own, [computed])
        output = _replaced(reader.output, {reader.parameters[place]: computed for place in reads})
        parameters = [*kept, *own]
        doubled = {
            x: parameters[first] for x, first in zip(parameters, same, strict=True) if x is not parameters[first]
        }
        if doubled:
            output = _replaced(output, doubled)
        places = sorted(set(same))
        merged = self._scheduled([parameters[place] for place in places], output)
        if merged is None or not _worthwhile(reader.schedule, alone.schedule, merged.schedule, _elements(computed)):
            return None
        return merged, places

    def _scheduled(self, parameters: Sequence[TensorInput], output: TensorNode) -> _Computation | None:
        try:
            return _Computation(parameters, output, schedule(list(parameters), output, self.types))
        except UnsupportedComputationError:
            return None

    def operator(self, computation: _Computation, name: str, inputs: Sequence[Tensor], like: Tensor) -> Tensor:
        """Make the operator of a computation on ``inputs``, with an output like ``like``."""
        key = computation, name
        if key not in self.kernels:
            text = kernel_text(computation.schedule, function_name())
            kernel = Kernel(name, text, tuple(computation.schedule.symbols.values()))
            shape, dtype = list(extents_of(like)), like.dtype.name
            self.kernels[key] = KernelOp(*inputs, kernel=kernel, shape=shape, dtype=dtype)
            return self.kernels[key].outputs[0]
        return copy_operator(self.kernels[key], inputs)[0]


class _FusedGroup:
    """Operators in one kernel: it computes the output of the last one from inputs that none of them computes."""

    def __init__(self, node: Operator, computation: _Computation):
        self.nodes = [node]  # the last one first, each before those that it reads
        self.inputs = list(node.inputs)
        self.computation = computation

    @property
    def tensor(self) -> Tensor:
        return self.nodes[0].outputs[0]

    def with_producer(self, producer: Operator, schedules: _Schedules) -> bool:
        """Add a producer to the group if that is feasible and faster; return whether it was added."""
        if len(self.nodes) == _MOST_MERGED or sum(map(_operators, (*self.nodes, producer))) > _MOST_OPERATORS:
            return False
        (result,) = producer.outputs
        reads = [place for place, x in enumerate(self.inputs) if x is result]
        inputs = [*(x for x in self.inputs if x is not result), *producer.inputs]
        first: dict[Tensor, int] = {}
        same = [first.setdefault(x, place) for place, x in enumerate(inputs)]
        merged = schedules.merge(self.computation, reads, producer.task, same)
        if merged is None:
            return False
        self.computation, places = merged
        self.nodes.append(producer)
        self.inputs = [inputs[place] for place in places]
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


def lower_to_kernels(graph: FlowGraph, frugal: bool = False) -> FlowGraph:
    """Replace operators of an optimized graph on the CPU by kernels, each of which computes one or several operators.

    Operators that the kernels do not support stay as they are: opaque operators (so matrix products by a library, and
    communication), those with a handwritten implementation in hidet, and unsupported computations. A reshape computes
    nothing and stays, too, unless it is between operators of one kernel.

    If ``frugal``, operators stay apart whose kernel would hold more memory than they do one after the other.
    """
    nodes = graph.nodes
    readers: dict[Tensor, list[Operator]] = {}
    for node in nodes:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    groups: dict[Operator, _FusedGroup] = {}
    schedules = _Schedules()
    for node in reversed(nodes):
        if not _can_lower(node):
            continue
        (result,) = node.outputs
        users = {groups.get(reader) for reader in readers.get(result, ())}
        if len(users) == 1 and not any(result is y for y in graph.outputs):
            (group,) = users
            apart = group is None or (frugal and takes_memory(node, group.inputs, [group.tensor]))
            if group is not None and not apart and group.with_producer(node, schedules):
                groups[node] = group
                continue
        if node.task.share_map:
            continue
        computation = schedules.task(node.task)
        if computation is not None:
            groups[node] = _FusedGroup(node, computation)
    return _rebuilt(graph, groups, schedules)


def _can_lower(node: Operator) -> bool:
    task = node.task
    if node.build_target != "cpu" or isinstance(node, OpaqueOperator) or len(task.outputs) != 1:
        return False
    if task.attrs.get("is_opaque") or task.assertions or not task.inputs:
        return False
    anchor = task.fused_graph.nodes[task.anchor].task if isinstance(task, FusedTask) else task
    return type(anchor).implement_cpu is Task.implement_cpu or isinstance(anchor, _WRITTEN_BY_HIDET)


def _rebuilt(graph: FlowGraph, groups: dict[Operator, _FusedGroup], schedules: _Schedules) -> FlowGraph:
    replaced: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        group = groups.get(node)
        if group is None:
            inputs = [replaced.get(x, x) for x in node.inputs]
            if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
                replaced.update(zip(node.outputs, node.reforward(inputs), strict=True))
        elif group.nodes[0] is node:
            inputs = [replaced.get(x, x) for x in group.inputs]
            made = schedules.operator(group.computation, _name(group.nodes), inputs, group.tensor)
            replaced[group.tensor] = made
    outputs = [replaced.get(y, y) for y in graph.outputs]
    result = FlowGraph(outputs, inputs=graph.inputs)
    result.update_nodes()
    return result


def _name(nodes: Sequence[Operator]) -> str:
    if len(nodes) == 1:
        return str(nodes[0].name)
    parts = dict.fromkeys(re.sub("^Fused", "", node.name) for node in reversed(nodes))
    return "Fused" + "".join(part for part in parts if part != "Reshape" or len(parts) == 1)[:_LONGEST_NAME]


def _worthwhile(before: LoopSchedule, producer: LoopSchedule, merged: LoopSchedule, size: int) -> bool:
    """Whether one kernel for two operators pays: not if it computes much twice, or keeps more than fits the cache."""
    kept = merged.kept_bytes()
    if len(merged.nests) > 1 and (kept is None or kept > KEPT_BYTES) and not merged.outer:
        return False
    if kept is not None and kept > KEPT_BYTES:
        return False
    return work(merged) <= work(before) + work(producer) + 2 * size
