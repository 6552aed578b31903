"""Operators whose definitions are templates: a proof holds for all operators and shards with its pattern of extents.

The constructors of these operators ask of the extent of a dim only whether it is 1 and whether it equals another one.
Nothing else in their definitions depends on it, with exceptions that their traits list by dim: the axis of a
concatenation or of a look-up, the dims that a slice cuts, and those that windows slide along. A proof compares a whole
operator, with the extents that its dims have on shards, with one that is rebuilt on shards. Two proofs have the same
*pattern* if of the extents of either operator the same are 1, the same are equal, and the excepted ones are the same
numbers. Then the definitions of the one become those of the other by replacing extents one for one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from hidet.graph import Operator

from hidet_dist.rules.access import Digit
from hidet_dist.rules.local import plain_attributes
from hidet_dist.traits import Dims, Shape
from hidet_dist.weights.storage import storage_of

_MOST_TEMPLATES = 4096  # after which all proofs are forgotten, to bound the memory that they take

_proofs: dict[Hashable, dict[Hashable, bool]] = {}


def proofs_of(op: Operator) -> dict[Hashable, bool]:
    """Return the proofs, by patterns, of all operators whose definitions are the template of ``op``.

    They have its class, and its attributes and dtypes. The proofs of an operator with other attributes than plain ones
    are its own.
    """
    attributes = plain_attributes(op)
    if attributes is None:
        return {}
    tensors = tuple((x.dtype.name, str(x.device), storage_of(x)) for x in op.inputs)
    if len(_proofs) >= _MOST_TEMPLATES:
        _proofs.clear()
    return _proofs.setdefault((type(op), attributes, tensors), {})


def pattern(
    whole: tuple[Sequence[Shape], Sequence[Shape]],
    local: tuple[Sequence[Shape], Sequence[Shape]],
    extents: Mapping[Digit, int],
    digits: Collection[Digit],
    counted: Dims,
) -> Hashable:
    """Make a key that is equal for proofs with the same pattern of extents.

    ``whole`` and ``local`` are the shapes (elements) of the inputs and of the outputs of the whole operator and of the
    local one. ``digits`` are those that index the dims of the whole one, ``extents`` their extents on a device where
    sharded.
    """
    return (
        _numbered(*whole, [(d.variable, d.stride, d.extent) for d in digits], counted),
        _numbered(*local, [(d.variable, d.stride, extents.get(d, d.extent)) for d in digits], counted),
    )


def _numbered(
    ins: Sequence[Shape], outs: Sequence[Shape], digits: Sequence[tuple[int, int, int]], counted: Dims
) -> Hashable:
    """Number the extents of an operator, equal ones alike, but for counted ones."""
    numbers = {1: 1}

    def number(extent: int) -> int:
        return numbers.setdefault(extent, len(numbers) + 1)

    return (
        tuple(
            tuple([-extent if (tensor, dim) in counted else number(extent) for dim, extent in enumerate(shape)])
            for tensor, shape in enumerate(ins)
        ),
        tuple(tuple(map(number, shape)) for shape in outs),
        tuple([(variable, stride, number(extent)) for variable, stride, extent in digits]),
    )
