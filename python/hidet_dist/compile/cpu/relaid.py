"""Operators on tensors with channels last, made from the definitions of operators on tensors with channels second."""

from __future__ import annotations

from collections.abc import Sequence

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, input_like, tensor_input
from hidet.ir.compute import GridCompute, TensorInput, TensorNode
from hidet.ir.dtypes import int32
from hidet.ir.expr import Expr, TensorElement
from hidet.ir.functors import IRRewriter
from hidet.ir.task import InverseMap

from hidet_dist.traits import has_traits, traits_of


def channels_last_axes(rank: int) -> list[int]:
    """List the dims of a tensor ``[images, channels, ...]`` in the order in which its channels are the last."""
    return [0, *range(2, rank), 1]


def channels_second_axes(rank: int) -> list[int]:
    """List the dims of a tensor ``[images, ..., channels]`` in the order in which its channels are the second."""
    return [0, rank - 1, *range(1, rank - 1)]


class RelaidOp(Operator):
    """An operator whose tensors of some rank have their channels last.

    Parameters
    ----------
    inputs: Tensor
        The operator's inputs. Those in ``moved`` have ``rank`` dims, with the channels last. An input that had fewer
        dims has leading dims of one entry.
    original: Operator
        The operator, with one output that its definition computes.
    moved: sequence of int
        The numbers of these inputs.
    rank: int
        The dims of tensors with channels. An output with as many has its channels last, too.
    """

    def __init__(self, *inputs: Tensor, original: Operator, moved: Sequence[int], rank: int):
        attributes = {"original": original, "moved": list(moved), "rank": rank}
        super().__init__(list(inputs), attributes, _relaid_task(original, inputs, moved, rank))
        self.name = original.name


@has_traits(elementwise=True)
class RelaidElementwiseOp(RelaidOp):
    """An element-wise operator whose tensors have their channels last."""


def is_defined(op: Operator) -> bool:
    """Whether an operator has one output, which is computed as its definition says."""
    task = op.task
    if len(task.outputs) != 1 or task.share_map or task.assertions or task.attrs.get("is_opaque"):
        return False
    return isinstance(task.outputs[0], GridCompute)


def relaid(op: Operator, inputs: Sequence[Tensor], moved: Sequence[int], rank: int) -> Operator:
    """Make an operator like ``op`` for inputs of which some have their channels last; see :class:`RelaidOp`."""
    kind = RelaidElementwiseOp if traits_of(op).elementwise else RelaidOp
    return kind(*inputs, original=op, moved=moved, rank=rank)


class _Permuted(IRRewriter):
    """Rewrites the elements of inputs to those of inputs with channels last."""

    def __init__(self, inputs: dict[TensorInput, TensorInput], rank: int):
        super().__init__()
        self.inputs = inputs
        self.axes = channels_last_axes(rank)

    def visit_TensorElement(self, e: TensorElement) -> Expr:
        if e.base not in self.inputs:
            return super().visit_TensorElement(e)
        indices = [self.visit(index) for index in e.indices]
        indices = [*[int32.zero] * (len(self.axes) - len(indices)), *indices]
        return TensorElement(self.inputs[e.base], tuple(indices[axis] for axis in self.axes))

    def visit_GridCompute(self, node: GridCompute) -> GridCompute:
        value = self.visit(node.value)
        return node if value is node.value else GridCompute(node.name, node._shape, node.axes, value, node.layout)


def _relaid_task(op: Operator, inputs: Sequence[Tensor], moved: Sequence[int], rank: int) -> Task:
    task = op.task
    parameters = list(task.inputs)
    for number in moved:
        known = parameters[number]
        parameters[number] = tensor_input(known.name, known.type.dtype, input_like(inputs[number], known.name).shape)
    replaced = {old: new for old, new in zip(task.inputs, parameters, strict=True) if new is not old}
    (y,) = task.outputs
    assert isinstance(y, GridCompute)
    value = _Permuted(replaced, rank).visit(y.value)
    axes = channels_last_axes(rank) if len(y.axes) == rank else list(range(len(y.axes)))
    shape = [y._shape[axis] for axis in axes]
    output: TensorNode = GridCompute(y.name, shape, [y.axes[axis] for axis in axes], value)
    inverse = {}
    if traits_of(op).elementwise:
        same = [new for old, new in zip(task.inputs, parameters, strict=True) if old in task.inverse_map]
        inverse = {x: InverseMap.identity(rank) for x in same if x in replaced.values()}
    return Task(f"{task.name}_channels_last", parameters, [output], inverse_map=inverse, attributes=dict(task.attrs))
