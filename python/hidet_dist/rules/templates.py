"""Operators whose definitions are templates: one proof on shards holds for all shards with the same pattern of extents.

The constructors of these operators ask of the extent of a dim only whether it is 1 and whether it equals another one.
Nothing else in their definitions depends on it, with exceptions that their traits list by dim: the axis of a
concatenation or of a look-up, and the dims that a slice cuts. Two lists of local shapes have the same *pattern* if the
same extents are 1, the same are equal, and the excepted ones are the same numbers. Then one definition becomes the
other by replacing extents one for one, and so do the forms of the whole operator with which they are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from hidet_dist.rules.access import Digit
from hidet_dist.traits import Dims


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
