"""Updates of states: functional operators, which a program carries out in the state's memory.

Each defines the whole new value from the old one, so that its sharding rule is derived and proven as that of any other
operator. What it moves is what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.dtypes import int32
from hidet.ir.expr import Expr, if_then_else, logical_and

from hidet_dist.errors import ConfigError
from hidet_dist.spec.extents import extents_of, same_shape
from hidet_dist.traits import Updates, has_traits


@has_traits(kernel="lookup", updates=Updates.PART)
class WriteRowsOp(Operator):
    """The state with rows at given slots replaced by others; a slot out of range has no effect.

    Parameters
    ----------
    state: Tensor
        The state, of any shape.
    values: Tensor
        [count, ...]: for each row, the extents of the state's dims that are not in ``dims``, in their order.
    slots: Tensor
        For each of ``dims`` an integer[count]: the index along that dim of each row. Of rows with equal slots, the last
        one is written.
    dims: sequence of int
        The dims of the state that slots index.
    """

    def __init__(self, state: Tensor, values: Tensor, *slots: Tensor, dims: Sequence[int]):
        old, new = input_like(state, "state"), input_like(values, "values")
        at = [input_like(slot, f"slots{number}") for number, slot in enumerate(slots)]
        rest = [d for d in range(len(old.shape)) if d not in dims]

        def element(*position: Expr) -> Expr:
            def matches(row: Expr) -> Expr:
                return logical_and(*[slot[row] == position[d] for slot, d in zip(at, dims, strict=True)])

            last = reduce(
                [new.shape[0]], lambda row: if_then_else(matches(row), row, int32(-1)), "max", accumulate_dtype="int32"
            )
            return if_then_else(last >= 0, new[[last, *(position[d] for d in rest)]], old[list(position)])

        attributes = {"dims": list(dims)}
        y = compute("y", old.shape, element)
        task = Task("write_rows", [old, new, *at], [y], attributes=attributes)
        super().__init__([state, values, *slots], attributes, task)


@has_traits(kernel="copy", updates=Updates.WHOLE)
class ReplaceStateOp(Operator):
    """The state with all elements replaced by ``values``, of the same shape and dtype."""

    def __init__(self, state: Tensor, values: Tensor):
        old, new = input_like(state, "state"), input_like(values, "values")

        def element(*position: Expr) -> Expr:
            # Either way it is the new element. That both tensors are read at one index says that they are split alike.
            index = list(position)
            return if_then_else(old[index] == old[index], new[index], new[index])

        super().__init__([state, values], {}, Task("replace_state", [old, new], [compute("y", old.shape, element)]))


@has_traits(kernel="copy", updates=Updates.SHIFT)
class ShiftStateOp(Operator):
    """The window that ends with ``values``: the state moved along ``dim`` by their number, and they behind it.

    Parameters
    ----------
    state: Tensor
        The window.
    values: Tensor
        Of the state's shape except along ``dim``, where it may have any extent.
    dim: int
        The dim.
    """

    def __init__(self, state: Tensor, values: Tensor, dim: int):
        old, new = input_like(state, "state"), input_like(values, "values")
        size, count = old.shape[dim], new.shape[dim]

        def element(*position: Expr) -> Expr:
            moved = position[dim] + count
            kept = old[[*position[:dim], moved, *position[dim + 1 :]]]
            added = new[[*position[:dim], moved - size, *position[dim + 1 :]]]
            return if_then_else(moved < size, kept, added)

        attributes = {"dim": dim}
        y = compute("y", old.shape, element)
        super().__init__([state, values], attributes, Task("shift_state", [old, new], [y], attributes=attributes))


@has_traits(kernel="elementwise", elementwise=True)
class ReadStateOp(Operator):
    """A copy of a state's value, for a result of a call, which must not change with the next call."""

    def __init__(self, x: Tensor):
        value = input_like(x, "x")
        y = compute("y", value.shape, lambda *position: value[list(position)])
        super().__init__([x], {}, Task("read_state", [value], [y]))


def read_state(x: Tensor) -> Tensor:
    """Copy a state's old or new value, to return it from a call."""
    y: Tensor = ReadStateOp(x).outputs[0]
    return y


def write_rows(
    state: Tensor, slots: Tensor | Sequence[Tensor], values: Tensor, dims: int | Sequence[int] = 0
) -> Tensor:
    """Write rows of a state, in place: ``state[slots] = values`` for dim 0.

    Parameters
    ----------
    state: Tensor
        The state, or what an earlier update made of it.
    slots: Tensor, or a sequence of one for each of ``dims``
        integer[count]: the index of each row along the dim. Rows with an index out of range (from 0 on) are left out.
        Of rows with equal indices, the last one is written.
    values: Tensor
        [count, ...], of the state's dtype: for each row, the extents of the state's other dims.
    dims: int, or a sequence of int
        The dims of the state that slots index.

    Returns
    -------
    The new value, of the state's shape.

    Raises
    ------
    ConfigError
        When shapes, dtypes or dims do not fit the state.
    """
    rank = len(state.shape)
    indexed = [dims] if isinstance(dims, int) else list(dims)
    tensors = [slots] if isinstance(slots, Tensor) else list(slots)
    if not indexed or len({d % rank for d in indexed}) != len(indexed) or len(tensors) != len(indexed):
        raise ConfigError(f"write_rows takes one tensor of slots for each of some dims; got {len(tensors)}, {indexed}.")
    if not all(-rank <= d < rank for d in indexed):
        raise ConfigError(f"write_rows got the dims {indexed} of a state of {rank} dims.")
    indexed = [d % rank for d in indexed]
    shape = extents_of(values)
    rest = [extent for d, extent in enumerate(extents_of(state)) if d not in indexed]
    if not shape or not same_shape(shape[1:], rest) or values.dtype != state.dtype:
        raise ConfigError(
            f"The rows of a state of {state.dtype.name}{list(map(str, state.shape))} along the dims {indexed} must be "
            f"{state.dtype.name}{['count', *map(str, rest)]}; got {values.dtype.name}{list(map(str, shape))}."
        )
    for slot in tensors:
        if not slot.dtype.is_integer() or not same_shape(extents_of(slot), shape[:1]):
            raise ConfigError(
                f"The slots of {shape[0]} rows must be integers of that number; got "
                f"{slot.dtype.name}{list(map(str, slot.shape))}."
            )
    y: Tensor = WriteRowsOp(state, values, *tensors, dims=indexed).outputs[0]
    return y


def replace_state(state: Tensor, values: Tensor) -> Tensor:
    """Replace all elements of a state by ``values``, of its shape and dtype; return the new value.

    Raises
    ------
    ConfigError
        When the shape or the dtype is another.
    """
    if not same_shape(extents_of(values), extents_of(state)) or values.dtype != state.dtype:
        raise ConfigError(
            f"A state of {state.dtype.name}{list(map(str, state.shape))} can only be replaced by the same; got "
            f"{values.dtype.name}{list(map(str, values.shape))}."
        )
    y: Tensor = ReplaceStateOp(state, values).outputs[0]
    return y


def shift_state(state: Tensor, values: Tensor, dim: int = -1) -> Tensor:
    """Shift a window along ``dim``, so that it ends with ``values``, and return its new value.

    Parameters
    ----------
    state: Tensor
        The window, such as the last inputs of a causal convolution.
    values: Tensor
        Of the state's dtype and shape except along ``dim``. There may be more of them than the window takes.
    dim: int
        The dim.

    Raises
    ------
    ConfigError
        When the shape, the dtype or the dim does not fit the state.
    """
    rank = len(state.shape)
    if not -rank <= dim < rank:
        raise ConfigError(f"shift_state got the dim {dim} of a state of {rank} dims.")
    at = dim % rank
    before, after = list(extents_of(state)), list(extents_of(values))
    fits = len(before) == len(after) and same_shape(before[:at] + before[at + 1 :], after[:at] + after[at + 1 :])
    if not fits or values.dtype != state.dtype:
        raise ConfigError(
            f"A window of {state.dtype.name}{list(map(str, before))} along dim {at} cannot be shifted by "
            f"{values.dtype.name}{list(map(str, after))}: only that dim may differ."
        )
    y: Tensor = ShiftStateOp(state, values, at).outputs[0]
    return y
