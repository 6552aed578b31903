"""Copies of hidet's definitions of computations, with axes and parameters of their own.

hidet tells tensors and axes in a definition by identity. Where operators share a task, two of them can only become part
of one definition if one is copied first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput, TensorNode, tensor_input
from hidet.ir.expr import Expr, Var
from hidet.ir.task import Task
from hidet.ir.tools import collect, rewrite


def bound_in(outputs: Sequence[TensorNode]) -> frozenset[Expr]:
    """Collect the axes and the parameters of definitions."""
    nodes = collect(list(outputs), (GridCompute, ReduceCompute, ArgReduceCompute, TensorInput), stop_when_found=False)
    bound: set[Expr] = set()
    for node in nodes:
        if isinstance(node, TensorInput):
            bound.add(node)
        else:
            bound.update([node.axis] if isinstance(node, ArgReduceCompute) else node.axes)
    return frozenset(bound)


def renamed(inputs: Sequence[TensorInput], outputs: Sequence[TensorNode]) -> tuple[list[TensorInput], list[TensorNode]]:
    """Copy the parameters and definitions of a task, with new parameters and axes."""
    parameters = [tensor_input(x.name, x.type.dtype, x.type.shape, x.type.layout) for x in inputs]
    new: dict[Expr, Expr] = dict(zip(inputs, parameters, strict=True))
    for axis in bound_in(outputs):
        if isinstance(axis, Var):
            new[axis] = Var(axis.hint, axis.type, axis.name)
    return parameters, [rewrite(y, new) for y in outputs]


def renamed_task(task: Task) -> Task:
    """Copy a task, with new parameters and axes."""
    clone = copy.copy(task)
    clone.inputs, clone.outputs = renamed(task.inputs, task.outputs)
    new = dict(zip(task.inputs, clone.inputs, strict=True))
    clone.inverse_map = {new[x]: inverse for x, inverse in task.inverse_map.items()}
    return clone
