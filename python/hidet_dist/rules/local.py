"""The local operator: an operator rebuilt on shards, with adjusted attributes where these contain shapes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.arithmetic import UnaryElementwiseTask
from hidet.graph.ops.utils import input_like
from hidet.ir.expr import Constant
from hidet.ir.type import DataType

from hidet_dist.rules.lookup import row_axes, sharded_lookup
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.extents import extent_text, extents_of, same_shape
from hidet_dist.traits import Shape, traits_of


def _clone(op: Operator, inputs: Sequence[Tensor], task: Any) -> list[Tensor]:
    """Copy an operator with other inputs and another task; state outside its attributes is kept."""
    clone = copy.copy(op)
    clone.inputs = list(inputs)
    if task is not op.task:
        clone.task = task
        clone._compiled_task = None
    clone.outputs = clone.symbolic_run()
    return list(clone.outputs)


def _elementwise(op: Operator, x: Tensor) -> Any:
    """Make the task of an elementwise operator on ``x``; several have bounds and slopes only in their function."""
    task = op.task
    return UnaryElementwiseTask(task.name, input_like(x, "x"), op.op, attrs=task.attrs, share_map=task.share_map)


# The local operators of an operator, without inputs and outputs, by shapes. Building one is slow, and a choice is
# rebuilt when it is proven and when it is partitioned, in every layer. Equal operators have the same local operators.
_Locals: TypeAlias = dict[str, Operator]
_rebuilt: weakref.WeakKeyDictionary[Operator, _Locals] = weakref.WeakKeyDictionary()
_rebuilt_by_definition: dict[Any, _Locals] = {}
_MOST_DEFINITIONS = 4096  # after which the operators by definition are forgotten, to bound the memory that they take


@functools.cache
def _parameters(constructor: Any) -> tuple[frozenset[str], bool] | None:
    """The names of a constructor's parameters, and whether it takes any number of tensors; None if of other things."""
    names, variadic = [], False
    for parameter in list(inspect.signature(constructor).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = True
        else:
            names.append(parameter.name)
    return frozenset(names), variadic


def plain_value(value: Any) -> Any:
    """Convert an attribute to a value that is equal only for equal attributes. Raises TypeError if there is none."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(plain_value, value))
    if isinstance(value, Constant) and isinstance(value.type, DataType):
        return ("Constant", value.type.name, plain_value(value.value))
    if isinstance(value, DataType):
        return ("DataType", value.name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (one.name for one in dataclasses.fields(value) if one.compare)
        return (type(value).__name__, *(plain_value(getattr(value, name)) for name in compared))
    if value is None or isinstance(value, bool | int | float | str):
        return (type(value).__name__, repr(value))
    raise TypeError


def plain_attributes(op: Operator) -> tuple[tuple[str, Any], ...] | None:
    """Return an operator's attributes by name, with values of :func:`plain_value`; None if one of them has none."""
    try:
        return tuple([(name, plain_value(op.attrs[name])) for name in sorted(op.attrs)])
    except TypeError:
        return None


def _definition(op: Operator) -> Any:
    """Make a key that is equal for operators with equal inputs' types and attributes; None if attributes are not all.

    An operator's class and attributes define it if its constructor has no other parameters than they and the inputs.
    """
    known = _parameters(type(op).__init__)
    if known is None:
        return None
    names, variadic = known
    attributes = set(op.attrs)
    if not attributes <= names or (names - attributes if variadic else len(names) - len(attributes) != len(op.inputs)):
        return None
    values = plain_attributes(op)
    if values is None:
        return None
    return type(op), values, tuple((x.dtype.name, str(x.device), tuple(map(extent_text, x.shape))) for x in op.inputs)


def _locals_of(op: Operator) -> _Locals:
    definition = _definition(op)
    if definition is None:
        return _rebuilt.setdefault(op, {})
    if len(_rebuilt_by_definition) >= _MOST_DEFINITIONS:
        _rebuilt_by_definition.clear()
    return _rebuilt_by_definition.setdefault(definition, {})


def rebuild(op: Operator, inputs: Sequence[Tensor], out_shapes: Sequence[Shape]) -> list[Tensor]:
    """Rebuild ``op`` on local ``inputs`` so that its outputs have ``out_shapes`` (elements).

    Raises
    ------
    ValueError
        When the operator cannot be built on these inputs, or its outputs come out in other shapes.
    """
    traits = traits_of(op)
    update = traits.local_attributes
    in_shapes = [extents_of(tensor) for tensor in inputs]
    known = _locals_of(op)
    shapes = (tuple(map(extent_text, shape)) for shape in (*in_shapes, *out_shapes))
    key = str([str(inputs[0].device) if inputs else "", *shapes])
    if key in known:
        return _clone(known[key], inputs, known[key].task)
    try:
        if all(
            same_shape(shape, extents_of(whole))
            for shape, whole in zip((*in_shapes, *out_shapes), (*op.inputs, *op.outputs), strict=True)
        ):
            outputs = _clone(op, inputs, op.task)
        elif traits.by_function:
            outputs = _clone(op, inputs, _elementwise(op, inputs[0]))
        else:
            with hidet.option.context():
                hidet.option.execution_mode("symbolic")  # an operator without inputs would run at once
                outputs = op.reforward(list(inputs), update(op, in_shapes, out_shapes) if update else None)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{op.name} cannot be built on {in_shapes}: {error}") from error
    got = [extents_of(tensor) for tensor in outputs]
    if len(got) != len(out_shapes) or not all(map(same_shape, got, out_shapes)):
        raise ValueError(f"{op.name} built on {in_shapes} has outputs {got}, not {list(out_shapes)}")
    known[key] = copy.copy(outputs[0].op)
    known[key].inputs, known[key].outputs = [], []
    return outputs


def localize(
    op: Operator,
    inputs: Sequence[Tensor],
    in_specs: Sequence[TensorShardSpec],
    out_shapes: Sequence[Shape],
    mesh: DeviceMesh,
    coordinate: Callable[[], Tensor],
) -> list[Tensor]:
    """Build the local outputs of ``op`` on shards in the specs ``in_specs``, before any reduce function.

    ``coordinate`` returns the tensor of the device's coordinate, for operators that depend on it.

    Raises
    ------
    ValueError
        When the operator cannot be built on these inputs, or its outputs come out in other shapes.
    """
    axes = row_axes(op, in_specs)
    if not axes:
        return rebuild(op, inputs, out_shapes)
    outputs = sharded_lookup(op, inputs, coordinate(), axes, mesh, in_specs[0].parts)
    if not same_shape(extents_of(outputs[0]), out_shapes[0]):
        raise ValueError(f"{op.name} has the output {extents_of(outputs[0])}, not {out_shapes[0]}")
    return outputs
