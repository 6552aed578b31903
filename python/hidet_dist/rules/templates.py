"""Operators whose definitions are templates: a proof holds for all operators and shards with its pattern of extents.

The constructors of these operators ask of the extent of a dim only whether it is 1 and whether it equals another one.
Nothing else in their definitions depends on it, with exceptions that their traits list by dim: the axis of a
concatenation or of a look-up, the dims that a slice cuts, and those that windows slide along. A proof compares a whole
operator, with the extents that its dims have on shards, with one that is rebuilt on shards. Two proofs have the same
*pattern* if of the extents of either operator the same are 1, the same are equal, and the excepted ones are the same
numbers. Then the definitions of the one become those of the other by replacing extents one for one.

Where devices have unequal parts, the rebuilt operator has symbols in its extents, and the proof is for their sizes on a
device. An extent with symbols is not 1, and equals another one if both are the same expression. So two proofs have the
same pattern if, besides, the same extents have symbols, and of these the same are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeAlias

from hidet.graph import Operator

from hidet_dist.rules.access import Digit
from hidet_dist.rules.local import plain_attributes
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.parts import Split
from hidet_dist.traits import Dims, Shape
from hidet_dist.weights.storage import storage_of

_MOST_TEMPLATES = 4096  # after which all proofs are forgotten, to bound the memory that they take

FormalExtent: TypeAlias = int | tuple[int, tuple[str, ...]]
"""A number, or one and the names of the symbols that it is multiplied by."""
FormalShape: TypeAlias = tuple[FormalExtent, ...]

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
    formal: tuple[Sequence[FormalShape], Sequence[FormalShape]] = ((), ()),
) -> Hashable:
    """Make a key that is equal for proofs with the same pattern of extents.

    ``whole`` and ``local`` are the shapes (elements) of the inputs and of the outputs of the whole operator and of the
    local one. ``digits`` are those that index the dims of the whole one, ``extents`` their extents on a device where
    sharded. Where the local operator has symbols, ``formal`` are its shapes, and ``local`` those on a device.
    """
    return (
        _numbered(*whole, [(d.variable, d.stride, d.extent) for d in digits], counted),
        _numbered(*local, [(d.variable, d.stride, extents.get(d, d.extent)) for d in digits], counted),
        _numbered_symbols(*formal, counted),
    )


def formal_shape(shape: Shape, spec: TensorShardSpec, mesh: DeviceMesh) -> FormalShape:
    """Return the shape of a shard with symbols for unequal parts, comparable. Raises SpecError for a misfit."""
    return tuple(
        [
            local if spec.is_even(dim, mesh) else _formal(extent, spec.split(dim, mesh), mesh)
            for dim, (extent, local) in enumerate(zip(shape, spec.local_shape(shape, mesh), strict=True))
        ]
    )


def _formal(extent: int, split: Split, mesh: DeviceMesh) -> FormalExtent:
    return extent // split.units, tuple(split.symbols(mesh))


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


def _numbered_symbols(ins: Sequence[FormalShape], outs: Sequence[FormalShape], counted: Dims) -> Hashable:
    """Number the extents with symbols of an operator, equal ones alike, but for counted ones; 0 for all others."""
    numbers: dict[FormalExtent, int] = {}

    def number(extent: FormalExtent) -> Hashable:
        if isinstance(extent, int):
            return 0
        factor, symbols = extent  # a symbol alone is another expression than a product
        return numbers.setdefault(extent, len(numbers) + 1), factor == 1, len(symbols)

    return (
        tuple(
            tuple([extent if (tensor, dim) in counted else number(extent) for dim, extent in enumerate(shape)])
            for tensor, shape in enumerate(ins)
        ),
        tuple(tuple(map(number, shape)) for shape in outs),
    )
