"""Operators that cut, stack and join unequal parts of a dim.

Collectives move blocks of equal size. So the part of each device is padded to the largest part of the group: before an
all-gather, which is followed by a join of the parts without padding; and in the blocks of a reduce-scatter, after which
each device cuts its part off. The begin and the size of a part follow from the parts of the axes
(:func:`hidet_dist.spec.extents.part_interval`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.expr import if_then_else

from hidet_dist.partitioning.once import MadeOnce
from hidet_dist.spec.extents import Extent, choose, part_interval
from hidet_dist.spec.parts import Split
from hidet_dist.traits import Moves, has_traits


def _coordinates(split: Split, rank: Any) -> list[Any]:
    """Return the coordinates along the axes of a group rank, which is row-major over ascending axes."""
    of_axis = {}
    for axis, parts in sorted(zip(split.mesh_axes, split.parts, strict=True), reverse=True):
        of_axis[axis] = rank % len(parts)
        rank = rank // len(parts)
    return [of_axis[axis] for axis in split.mesh_axes]


def _locate(split: Split, extent: Extent, index: Any) -> tuple[Any, Any]:
    """Return the group rank that has an element of a dim of ``extent``, and the element's index in its part."""
    of_axis = {}
    for axis, parts in zip(split.mesh_axes, split.parts, strict=True):
        unit = extent // sum(parts)
        begins = [sum(parts[:number]) for number in range(len(parts))]
        coordinate: Any = len(parts) - 1
        for number in reversed(range(len(parts) - 1)):
            coordinate = if_then_else(index // unit < begins[number + 1], number, coordinate)
        index = index - unit * choose(begins, coordinate)
        extent = unit * choose(parts, coordinate)
        of_axis[axis] = (coordinate, len(parts))
    rank: Any = 0
    for _, (coordinate, size) in sorted(of_axis.items()):
        rank = rank * size + coordinate
    return rank, index


def largest_part(split: Split, extent: Extent) -> Extent:
    """Return the size of the largest part of a dim of ``extent``."""
    for of_axis in split.parts:
        extent = extent // sum(of_axis) * max(of_axis)
    return extent


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


class StackPartsTask(Task, metaclass=MadeOnce):
    """``y[r, ...]`` is the part along ``dim`` of ``x`` for group rank r, with zeros up to the largest part."""

    def __init__(self, x, dim: int, split: Split):  # type: ignore[no-untyped-def]
        shape = [split.count, *x.shape]
        shape[dim + 1] = largest_part(split, x.shape[dim])

        def element(r, *indices):  # type: ignore[no-untyped-def]
            begin, size = part_interval(x.shape[dim], split.parts, _coordinates(split, r))
            return if_then_else(indices[dim] < size, x[_shifted(indices, dim, begin)], x.type.dtype.zero)

        y = compute("y", shape, element)
        super().__init__("stack_parts", [x], [y], attributes={"dim": dim, **_attributes(split)})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class StackPartsOp(Operator):
    """Stack the parts of ``x`` along ``dim`` in a new first dim, as a reduce-scatter sends them."""

    def __init__(self, x: Tensor, dim: int, split: Split):
        super().__init__(
            [x], attributes={"dim": dim, "split": split}, task=StackPartsTask(input_like(x, "x"), dim, split)
        )


class ResizeTask(Task, metaclass=MadeOnce):
    """``y`` begins as ``x`` along ``dim`` and has ``extent``: the end of ``x`` is cut off, or zeros follow it."""

    def __init__(self, x, dim: int, extent: Extent, grows: bool):  # type: ignore[no-untyped-def]
        shape = list(x.shape)
        shape[dim] = extent

        def element(*indices):  # type: ignore[no-untyped-def]
            if not grows:
                return x[list(indices)]
            return if_then_else(indices[dim] < x.shape[dim], x[list(indices)], x.type.dtype.zero)

        y = compute("y", shape, element)
        super().__init__("resize", [x], [y], attributes={"dim": dim, "extent": extent, "grows": grows})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class ResizeOp(Operator):
    """Resize the end of dim ``dim`` of ``x`` to ``extent``: with zeros if it ``grows``."""

    def __init__(self, x: Tensor, dim: int, extent: Extent, grows: bool):
        task = ResizeTask(input_like(x, "x"), dim, extent, grows)
        super().__init__([x], attributes={"dim": dim, "extent": extent, "grows": grows}, task=task)


class JoinPartsTask(Task, metaclass=MadeOnce):
    """``y`` joins the parts ``x[0], x[1], ...``, one per group rank, along ``dim``, without their padding."""

    def __init__(self, x, dim: int, split: Split, extent: Extent):  # type: ignore[no-untyped-def]
        shape = list(x.shape[1:])
        shape[dim] = extent

        def element(*indices):  # type: ignore[no-untyped-def]
            rank, place = _locate(split, extent, indices[dim])
            return x[[rank, *indices[:dim], place, *indices[dim + 1 :]]]

        y = compute("y", shape, element)
        super().__init__("join_parts", [x], [y], attributes={"dim": dim, "extent": extent, **_attributes(split)})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class JoinPartsOp(Operator):
    """Join the stacked parts that an all-gather receives along ``dim``, to the whole dim of ``extent``."""

    def __init__(self, x: Tensor, dim: int, split: Split, extent: Extent):
        task = JoinPartsTask(input_like(x, "x"), dim, split, extent)
        super().__init__([x], attributes={"dim": dim, "split": split, "extent": extent}, task=task)


def _shifted(indices: Sequence[Any], dim: int, begin: Any) -> list[Any]:
    return [*indices[:dim], indices[dim] + begin, *indices[dim + 1 :]]
