"""The parts into which mesh axes split a dim, in whole units for each coordinate, and their written form."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import MOST_SHARE, DeviceMesh

Parts: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Mesh axes, ascending, each with the part of each of its coordinates: whole units, in lowest terms."""

AXES = r"(?:\d(?:\[[\d, ]*\])?)+"
"""The pattern of the written form of axes: ``01``, or ``0[5,4]1`` with the parts of axis 0."""
_AXIS = re.compile(r"(\d)(?:\[([\d, ]*)\])?")
_SYMBOL = re.compile(r"part_of_(\w+)__(\d+(?:x\d+)?(?:_\d+(?:x\d+)?)*)")


@dataclass(frozen=True)
class Split:
    """The mesh axes that split a dim, major to minor, and the parts of the coordinates along each, in whole units.

    A dim of ``extent`` elements is a multiple of :attr:`units`. The axes split it one after the other: at coordinate c
    of an axis with the parts p, an extent E becomes E / sum(p) * p[c]. Equal parts are an even split.
    """

    mesh_axes: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, mesh_axes: Sequence[int], parts: Parts = ()) -> Split:
        """Make the split by axes of a mesh with these parts; other axes have the mesh's shares."""
        return _split(mesh, tuple(mesh_axes), parts)

    @cached_property
    def is_even(self) -> bool:
        """Whether all parts are equal."""
        return all(len(set(of_axis)) == 1 for of_axis in self.parts)

    @cached_property
    def count(self) -> int:
        """The number of parts."""
        return math.prod(map(len, self.parts))

    @cached_property
    def units(self) -> int:
        """The number of units into which a dim is split."""
        return math.prod(map(sum, self.parts))

    @cached_property
    def of_group_ranks(self) -> tuple[int, ...]:
        """The units of each group rank's part; group ranks are row-major over ascending axes."""
        parts = [of_axis for _, of_axis in sorted(zip(self.mesh_axes, self.parts, strict=True))]
        return tuple(map(math.prod, itertools.product(*parts)))

    def largest(self, extent: int) -> int:
        """Return the size of the largest part of a dim of ``extent``."""
        for of_axis in self.parts:
            extent = extent // sum(of_axis) * max(of_axis)
        return extent

    def interval(self, extent: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return the begin and the size of the part of the device at ``coordinate`` of the mesh."""
        begin = 0
        for axis, of_axis in zip(self.mesh_axes, self.parts, strict=True):
            unit = extent // sum(of_axis)
            begin += unit * sum(of_axis[: coordinate[axis]])
            extent = unit * of_axis[coordinate[axis]]
        return begin, extent

    def symbols(self, mesh: DeviceMesh) -> dict[str, int]:
        """Map the name of the symbol of each unequal part to the largest value that it has."""
        return {
            symbol_of(mesh.axis_names[axis], of_axis): max(of_axis)
            for axis, of_axis in zip(self.mesh_axes, self.parts, strict=True)
            if len(set(of_axis)) > 1
        }


@functools.lru_cache(maxsize=2**14)  # a search asks for the same few splits many times
def _split(mesh: DeviceMesh, mesh_axes: tuple[int, ...], parts: Parts) -> Split:
    given = dict(parts)
    return Split(mesh_axes, tuple(given.get(axis) or mesh.shares_of(axis) for axis in mesh_axes))


def symbol_of(axis_name: str, parts: Sequence[int]) -> str:
    """Name the symbol whose value on a device is its part: ``part_of_gpu__5x4_4x3`` of ``5, 5, 5, 5, 4, 4, 4``."""
    runs = [(part, len(list(equal))) for part, equal in itertools.groupby(parts)]
    return f"part_of_{axis_name}__" + "_".join(f"{part}x{count}" if count > 1 else str(part) for part, count in runs)


def part_sizes(names: Iterable[str], mesh: DeviceMesh, coordinate: Sequence[int]) -> dict[str, int]:
    """Return the parts of the device at ``coordinate``, by the names of their symbols.

    Raises
    ------
    SpecError
        When a name is not that of parts of an axis of the mesh.
    """
    return {name: parts[coordinate[axis]] for name, (axis, parts) in parts_of_symbols(names, mesh).items()}


def parts_of_symbols(names: Iterable[str], mesh: DeviceMesh) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the axis and the parts that each symbol's name says. Raises SpecError for any other name."""
    result = {}
    for name in names:
        match = _SYMBOL.fullmatch(name)
        if match is None or match[1] not in mesh.axis_names:
            raise SpecError(f"{shown(name)} is not the name of parts of an axis of the mesh {mesh}.")
        runs = [run.partition("x") for run in match[2].split("_")]
        axis = mesh.axis_names.index(match[1])
        size = mesh.shape[axis]
        counts = [int(count or 1) for *_, count in runs]
        if sum(counts) != size:
            raise SpecError(f"{shown(name)} has {sum(counts)} parts; the mesh {mesh} has {size} coordinates there.")
        result[name] = axis, tuple(int(part) for (part, *_), n in zip(runs, counts, strict=True) for _ in range(n))
    return result


def values_of_symbol(name: str) -> tuple[int, ...]:
    """List the different parts that the name of a symbol says, in the order of the coordinates; none of other names."""
    match = _SYMBOL.fullmatch(name)
    runs = () if match is None else match[2].split("_")
    return tuple(dict.fromkeys(int(run.partition("x")[0]) for run in runs))


def in_lowest_terms(parts: Sequence[int]) -> tuple[int, ...]:
    """Return parts, each divided by their greatest common divisor."""
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


def normal_parts(parts: Mapping[int, Sequence[int]] | Parts, mesh_axes: Iterable[int]) -> Parts:
    """Bring the parts of those of ``mesh_axes`` that have some into their normal form.

    Raises
    ------
    SpecError
        For parts that are not whole numbers from 1.
    """
    of_axis = dict(parts)
    used = sorted(set(mesh_axes) & of_axis.keys())
    for axis in used:
        if not of_axis[axis] or not all(is_whole(part, 1, MOST_SHARE) for part in of_axis[axis]):
            raise SpecError(f"Parts are whole numbers from 1 to {MOST_SHARE}; axis {axis} has {shown(of_axis[axis])}.")
    return tuple((axis, in_lowest_terms(of_axis[axis])) for axis in used)


def near_even(units: int, coordinates: int) -> tuple[int, ...]:
    """Split whole units over coordinates, so that parts differ by one at most; the first ones are the larger ones."""
    least, more = divmod(units, coordinates)
    return tuple(least + (number < more) for number in range(coordinates))


def axes_text(mesh_axes: Iterable[int], parts: Parts) -> str:
    """Write mesh axes, major to minor, with their parts: ``0[5,4]1``."""
    of_axis = dict(parts)
    return "".join(
        f"{axis}[{','.join(map(str, of_axis[axis]))}]" if axis in of_axis else str(axis) for axis in mesh_axes
    )


def parse_axes(text: str) -> tuple[tuple[int, ...], Parts]:
    """Parse the text that :func:`axes_text` returns. Raises SpecError for parts that are not whole numbers from 1."""
    axes, parts = [], {}
    for match in _AXIS.finditer(text):
        axes.append(int(match[1]))
        if match[2] is not None:
            numbers = [number.strip() for number in match[2].split(",")]
            if not all(number.isdecimal() and len(number) < 10 for number in numbers):
                raise SpecError(f"The parts of an axis are whole numbers, as 0[5,4]; got {shown(text)}.")
            parts[axes[-1]] = tuple(map(int, numbers))
    return tuple(axes), normal_parts(parts, axes)


def check_parts(parts: Parts, mesh: DeviceMesh, what: object) -> None:
    """Raise SpecError unless parts of ``what`` are for the coordinates of the mesh, and others than its shares."""
    for axis, of_axis in parts:
        if axis >= mesh.ndim or len(of_axis) != mesh.shape[axis]:
            raise SpecError(f"{what} has {len(of_axis)} parts along axis {axis} of the mesh {mesh}, which has others.")
        if of_axis == mesh.shares_of(axis):
            raise SpecError(f"{what} has the parts along axis {axis} that {mesh} has without them: leave them out.")
