"""Operators that cut, pack and join unequal parts of a dim.

Collectives send and receive parts one after the other, in the order of group ranks. So a copy precedes a
reduce-scatter or all-to-all where the dim that it splits is not the first one, and follows an all-gather or all-to-all
where the dim that it joins is not. The begin and the size of a part follow from the parts of the axes
(:func:`hidet_dist.spec.extents.part_interval`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.expr import if_then_else

from hidet_dist.partitioning.once import MadeOnce, reshape
from hidet_dist.spec.extents import Extent, choose, extents_of, part_interval
from hidet_dist.spec.parts import Split
from hidet_dist.traits import Moves, has_traits


def _locate(split: Split, extent: Extent, index: Any) -> tuple[Any, Any]:
    """Return the group rank that has an element of a dim of ``extent``, and the element's index in its part."""
    of_axis = {}
    for axis, parts in zip(split.mesh_axes, split.parts, strict=True):
        unit = extent // sum(parts)
        begins = [sum(parts[:number]) for number in range(len(parts))]
        coordinate = _number(index // unit, begins[1:])
        index = index - unit * choose(begins, coordinate)
        extent = unit * choose(parts, coordinate)
        of_axis[axis] = (coordinate, len(parts))
    rank: Any = 0
    for _, (coordinate, size) in sorted(of_axis.items()):
        rank = rank * size + coordinate
    return rank, index


def _attributes(split: Split) -> dict[str, Any]:
    """Convert a split to attributes of a hidet task."""
    return {"mesh_axes": list(split.mesh_axes), "parts": list(map(list, split.parts))}


class CutPartTask(Task, metaclass=MadeOnce):
    """``y`` is the device's part of ``x`` along ``dim``, of ``extent``; the device's coordinate is an input."""

    def __init__(self, x, coordinate, dim: int, split: Split, extent: Extent):  # type: ignore[no-untyped-def]
        shape = list(x.shape)
        shape[dim] = extent
        begin, _ = part_interval(x.shape[dim], split.parts, [coordinate[axis] for axis in split.mesh_axes])
        y = compute("y", shape, lambda *indices: x[_shifted(indices, dim, begin)])
        attributes = {"dim": dim, "extent": extent, **_attributes(split)}
        super().__init__("cut_part", [x, coordinate], [y], attributes=attributes)


@has_traits(kernel="copy", moves=Moves.SPREAD)
class CutPartOp(Operator):
    """Cut the device's part, of ``extent``, out of dim ``dim`` of ``x``."""

    def __init__(self, x: Tensor, coordinate: Tensor, dim: int, split: Split, extent: Extent):
        task = CutPartTask(input_like(x, "x"), input_like(coordinate, "coordinate"), dim, split, extent)
        super().__init__([x, coordinate], attributes={"dim": dim, "split": split, "extent": extent}, task=task)


class PackPartsTask(Task, metaclass=MadeOnce):
    """``y`` has the parts of ``x`` along its second dim of three, one after the other, by group rank."""

    def __init__(self, x, split: Split):  # type: ignore[no-untyped-def]
        outer, extent, inner = x.shape
        unit, sizes, begins = extent // split.units, split.of_group_ranks, _begins(split)
        packed = list(itertools.accumulate(sizes, initial=0))

        def element(index):  # type: ignore[no-untyped-def]
            found: Any = None
            # Each part has a branch of its own, in which its size is a number by which it is quick to divide.
            for rank in reversed(range(len(sizes))):
                size = unit * sizes[rank]
                within = index - packed[rank] * (unit * outer * inner)
                row = within // inner
                own = x[row // size, unit * begins[rank] + row % size, within % inner]
                end = packed[rank + 1] * (unit * outer * inner)
                found = own if found is None else if_then_else(index < end, own, found)
            return found

        y = compute("y", [outer * extent * inner], element)
        super().__init__("pack_parts", [x], [y], attributes=_attributes(split))


@has_traits(kernel="copy", moves=Moves.SPREAD)
class PackPartsOp(Operator):
    """Put the parts of ``x`` along its second dim of three one after the other, by group rank."""

    def __init__(self, x: Tensor, split: Split):
        super().__init__([x], attributes={"split": split}, task=PackPartsTask(input_like(x, "x"), split))


def packed_parts(x: Tensor, dim: int, split: Split) -> Tensor:
    """Put the parts of a tensor along ``dim`` one after the other, by group rank."""
    shape = extents_of(x)
    outer, inner = (hidet.utils.prod([1, *extents]) for extents in (shape[:dim], shape[dim + 1 :]))
    return PackPartsOp(reshape(x, [outer, shape[dim], inner]), split).outputs[0]


class JoinPartsTask(Task, metaclass=MadeOnce):
    """``y`` joins parts along ``dim``, which ``x`` has one after the other."""

    def __init__(self, x, dim: int, split: Split, shape: Sequence[Extent]):  # type: ignore[no-untyped-def]
        extent = shape[dim]
        unit = extent // split.units
        row = hidet.utils.prod([1, *shape[:dim], *shape[dim + 1 :]])
        sizes = split.of_group_ranks
        packed = list(itertools.accumulate(sizes, initial=0))[:-1]

        def element(*indices):  # type: ignore[no-untyped-def]
            rank, place = _locate(split, extent, indices[dim])
            within: Any = 0
            for other, index in enumerate(indices):
                if other == dim:
                    within = within * (unit * choose(sizes, rank)) + place
                else:
                    within = within * shape[other] + index
            return x[unit * choose(packed, rank) * row + within]

        y = compute("y", shape, element)
        attributes = {"dim": dim, "shape": list(shape), **_attributes(split)}
        super().__init__("join_parts", [x], [y], attributes=attributes)


@has_traits(kernel="copy", moves=Moves.SPREAD)
class JoinPartsOp(Operator):
    """Join the parts along ``dim`` that ``x``, of one dim, has by group rank, to a tensor of ``shape``."""

    def __init__(self, x: Tensor, dim: int, split: Split, shape: Sequence[Extent]):
        task = JoinPartsTask(input_like(x, "x"), dim, split, list(shape))
        super().__init__([x], attributes={"dim": dim, "split": split, "shape": list(shape)}, task=task)


def _begins(split: Split) -> list[int]:
    """Return the begin of each group rank's part of a dim, in units."""
    coordinates = [range(len(parts)) for _, parts in sorted(zip(split.mesh_axes, split.parts, strict=True))]
    axes = sorted(split.mesh_axes)
    begins = []
    for coordinate in itertools.product(*coordinates):
        at = dict(zip(axes, coordinate, strict=True))
        begins.append(split.interval(split.units, [at.get(axis, 0) for axis in range(max(axes) + 1)])[0])
    return begins


def _number(index: Any, begins: Sequence[int]) -> Any:
    """Return the number of the interval that has an index; ``begins`` are those of all but the first."""
    number: Any = len(begins)
    for before in reversed(range(len(begins))):
        number = if_then_else(index < begins[before], before, number)
    return number


def _shifted(indices: Sequence[Any], dim: int, begin: Any) -> list[Any]:
    return [*indices[:dim], indices[dim] + begin, *indices[dim + 1 :]]
