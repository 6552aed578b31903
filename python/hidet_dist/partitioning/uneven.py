"""Operators that cut, stack and join the parts of a dim that uneven mesh axes split.

Collectives move blocks of equal size. So the part of each device is padded to the largest part of the group: before an
all-gather, which is followed by a join of the parts without padding; and in the blocks of a reduce-scatter, after which
each device cuts its part off. The begin and the size of a part follow from the shares of the axes
(:func:`hidet_dist.spec.extents.part_interval`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.expr import if_then_else

from hidet_dist.partitioning.once import MadeOnce
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import Extent, choose, part_interval
from hidet_dist.traits import Moves, has_traits


@dataclass(frozen=True)
class UnevenSplit:
    """The mesh axes that split a dim, major to minor, and the share of each coordinate along them."""

    mesh_axes: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, mesh_axes: Sequence[int]) -> UnevenSplit:
        """Make the split by these axes of a mesh."""
        return cls(tuple(mesh_axes), tuple(map(mesh.shares_of, mesh_axes)))

    @property
    def count(self) -> int:
        """The number of parts."""
        count = 1
        for of_axis in self.shares:
            count *= len(of_axis)
        return count

    def largest(self, extent: Extent) -> Extent:
        """Return the size of the largest part of a dim of ``extent``."""
        for of_axis in self.shares:
            extent = extent // sum(of_axis) * max(of_axis)
        return extent

    def interval(self, extent: Extent, coordinates: Sequence[Any]) -> tuple[Extent, Extent]:
        """Return the begin and the size of the part at ``coordinates`` along the axes."""
        return part_interval(extent, self.shares, coordinates)

    def coordinates(self, rank: Any) -> list[Any]:
        """Return the coordinates along the axes of a group rank, which is row-major over ascending axes."""
        of_axis = {}
        for axis, shares in sorted(zip(self.mesh_axes, self.shares, strict=True), reverse=True):
            of_axis[axis] = rank % len(shares)
            rank = rank // len(shares)
        return [of_axis[axis] for axis in self.mesh_axes]

    def locate(self, extent: Extent, index: Any) -> tuple[Any, Any]:
        """Return the group rank that has an element of a dim of ``extent``, and the element's index in its part."""
        of_axis = {}
        for axis, shares in zip(self.mesh_axes, self.shares, strict=True):
            part = extent // sum(shares)
            begins = [sum(shares[:number]) for number in range(len(shares))]
            coordinate: Any = len(shares) - 1
            for number in reversed(range(len(shares) - 1)):
                coordinate = if_then_else(index // part < begins[number + 1], number, coordinate)
            index = index - part * choose(begins, coordinate)
            extent = part * choose(shares, coordinate)
            of_axis[axis] = (coordinate, len(shares))
        rank: Any = 0
        for _, (coordinate, size) in sorted(of_axis.items()):
            rank = rank * size + coordinate
        return rank, index

    def attributes(self) -> dict[str, Any]:
        """Convert to attributes of a hidet task."""
        return {"mesh_axes": list(self.mesh_axes), "shares": list(map(list, self.shares))}


class CutPartTask(Task, metaclass=MadeOnce):
    """``y`` is the device's part of ``x`` along ``dim``, of ``extent``; the device's coordinate is an input."""

    def __init__(self, x, coordinate, dim: int, split: UnevenSplit, extent: Extent):  # type: ignore[no-untyped-def]
        shape = list(x.shape)
        shape[dim] = extent
        begin, _ = split.interval(x.shape[dim], [coordinate[axis] for axis in split.mesh_axes])
        y = compute("y", shape, lambda *indices: x[_shifted(indices, dim, begin)])
        attributes = {"dim": dim, "extent": extent, **split.attributes()}
        super().__init__("cut_part", [x, coordinate], [y], attributes=attributes)


@has_traits(kernel="copy", moves=Moves.SPREAD)
class CutPartOp(Operator):
    """Cut the device's part, of ``extent``, out of dim ``dim`` of ``x``."""

    def __init__(self, x: Tensor, coordinate: Tensor, dim: int, split: UnevenSplit, extent: Extent):
        task = CutPartTask(input_like(x, "x"), input_like(coordinate, "coordinate"), dim, split, extent)
        super().__init__([x, coordinate], attributes={"dim": dim, "split": split, "extent": extent}, task=task)


class StackPartsTask(Task, metaclass=MadeOnce):
    """``y[r, ...]`` is the part along ``dim`` of ``x`` for group rank r, with zeros up to the largest part."""

    def __init__(self, x, dim: int, split: UnevenSplit):  # type: ignore[no-untyped-def]
        shape = [split.count, *x.shape]
        shape[dim + 1] = split.largest(x.shape[dim])

        def element(r, *indices):  # type: ignore[no-untyped-def]
            begin, size = split.interval(x.shape[dim], split.coordinates(r))
            return if_then_else(indices[dim] < size, x[_shifted(indices, dim, begin)], x.type.dtype.zero)

        y = compute("y", shape, element)
        super().__init__("stack_parts", [x], [y], attributes={"dim": dim, **split.attributes()})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class StackPartsOp(Operator):
    """Stack the parts of ``x`` along ``dim`` in a new first dim, as a reduce-scatter sends them."""

    def __init__(self, x: Tensor, dim: int, split: UnevenSplit):
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

    def __init__(self, x, dim: int, split: UnevenSplit, extent: Extent):  # type: ignore[no-untyped-def]
        shape = list(x.shape[1:])
        shape[dim] = extent

        def element(*indices):  # type: ignore[no-untyped-def]
            rank, place = split.locate(extent, indices[dim])
            return x[[rank, *indices[:dim], place, *indices[dim + 1 :]]]

        y = compute("y", shape, element)
        super().__init__("join_parts", [x], [y], attributes={"dim": dim, "extent": extent, **split.attributes()})


@has_traits(kernel="copy", moves=Moves.SPREAD)
class JoinPartsOp(Operator):
    """Join the stacked parts that an all-gather receives along ``dim``, to the whole dim of ``extent``."""

    def __init__(self, x: Tensor, dim: int, split: UnevenSplit, extent: Extent):
        task = JoinPartsTask(input_like(x, "x"), dim, split, extent)
        super().__init__([x], attributes={"dim": dim, "split": split, "extent": extent}, task=task)


def _shifted(indices: Sequence[Any], dim: int, begin: Any) -> list[Any]:
    return [*indices[:dim], indices[dim] + begin, *indices[dim + 1 :]]
