"""Operators whose definitions are templates: one proof on shards holds for all shards with the same pattern of extents.

The constructors of these operators ask of the extent of a dim only whether it is 1 and whether it equals another one.
Nothing else in their definitions depends on it, with exceptions that are listed by dim: the axis of a concatenation or
of a look-up, and the dims that a slice cuts. Two lists of local shapes have the same *pattern* if the same extents are
1, the same are equal, and the excepted ones are the same numbers. Then one definition becomes the other by replacing
extents one for one, and so do the forms of the whole operator with which they are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

from hidet.graph import Operator
from hidet.graph.ops.arithmetic import BinaryElementwiseOp, UnaryElementwiseOp
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.reduce.reduce import ReduceBaseOp
from hidet.graph.ops.transform import BroadcastOp, ConcatOp, PermuteDimsOp, StridedSliceOp, TakeOp

from hidet_dist.rules.access import Digit
from hidet_dist.spec.extents import same_extent

_FAMILIES = (BinaryElementwiseOp, UnaryElementwiseOp, ReduceBaseOp)
_KINDS = (BroadcastOp, ConcatOp, MatmulOp, PermuteDimsOp, StridedSliceOp, TakeOp)

Dims: TypeAlias = frozenset[tuple[int, int]]
"""Dims of inputs: (input, dim)."""


def counted_dims(op: Operator) -> Dims | None:
    """Return the dims whose extents are numbers in the definition of an operator; None if it is not a template."""
    if type(op) not in _KINDS:
        # A class that is not hidet's may do anything in its constructor.
        hidets = isinstance(op, _FAMILIES) and type(op).__module__.startswith("hidet.")
        return frozenset() if hidets else None
    if isinstance(op, ConcatOp):
        axis = int(op.attrs["axis"]) % len(op.inputs[0].shape)
        return frozenset((number, axis) for number in range(len(op.inputs)))
    if isinstance(op, TakeOp):
        return frozenset({(0, int(op.attrs["axis"]) % len(op.inputs[0].shape))})
    if isinstance(op, StridedSliceOp):
        bounds = zip(*(op.attrs[name] for name in ("axes", "starts", "ends", "strides")), strict=True)
        shape = op.inputs[0].shape
        return frozenset(
            (0, int(axis))
            for axis, start, end, stride in bounds
            if not (start == 0 and stride == 1 and same_extent(end, shape[axis]))
        )
    return frozenset()


def pattern(
    in_shapes: Sequence[Sequence[int]],
    out_shapes: Sequence[Sequence[int]],
    extents: Mapping[Digit, int],
    digits: Collection[Digit],
    counted: Dims,
) -> Hashable:
    """Make a key that is equal for local shapes (elements) and extents of digits with the same pattern.

    ``digits`` are those that index the dims of the whole operator, ``extents`` their extents on a device where sharded.
    """
    numbers = {1: 1}

    def numbered(extent: int) -> int:
        return numbers.setdefault(extent, len(numbers) + 1)

    ins = tuple(
        tuple([-extent if (number, dim) in counted else numbered(extent) for dim, extent in enumerate(shape)])
        for number, shape in enumerate(in_shapes)
    )
    outs = tuple(tuple(map(numbered, shape)) for shape in out_shapes)
    return ins, outs, tuple([(digit, numbered(extents.get(digit, digit.extent))) for digit in digits])
