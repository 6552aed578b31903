"""The device mesh: a row-major grid of ranks with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import SpecError
from hidet_dist.limits import MOST_DEVICES

MAX_AXES = 10  # so that a mesh axis is one digit in the text of a spec


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of ranks with any number of axes; a rank is the row-major index of its coordinate.

    Parameters
    ----------
    shape: tuple[int, ...]
        Devices along each axis, at least one axis, each at least 1; at most ``MOST_DEVICES`` in all.
    axis_names: tuple[str, ...]
        One name per axis; ``axis0, axis1, ...`` by default.

    Raises
    ------
    SpecError
        For an empty shape, a size below 1, too many devices, repeated names, or names that do not match the shape.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        names = tuple(self.axis_names) or tuple(f"axis{i}" for i in range(len(self.shape)))
        object.__setattr__(self, "axis_names", names)
        if not self.shape:
            raise SpecError("A device mesh needs at least one axis; got the shape ().")
        if len(self.shape) > MAX_AXES:
            raise SpecError(f"A device mesh has at most {MAX_AXES} axes; got the shape {shown(self.shape)}.")
        for size in self.shape:
            if not is_whole(size, 1):
                raise SpecError(
                    f"A mesh axis needs a whole number of devices, 1 or more; got {shown(size)} in {shown(self.shape)}."
                )
        if self.size > MOST_DEVICES:
            raise SpecError(
                f"A device mesh has at most {MOST_DEVICES} devices, as a build writes a file for each; got the shape "
                f"{shown(self.shape)}."
            )
        if len(names) != len(self.shape):
            raise SpecError(f"The mesh {self.shape} has {len(self.shape)} axes but {len(names)} names: {shown(names)}.")
        if not all(isinstance(name, str) and name.isidentifier() for name in names) or len(set(names)) != len(names):
            raise SpecError(f"Mesh axis names must be distinct identifiers; got {shown(names)}.")

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def group_size(self, axes: Iterable[int]) -> int:
        """Return the number of devices that differ only in the coordinates of ``axes``."""
        return math.prod(self.shape[axis] for axis in axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank. Raises SpecError when the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise SpecError(f"The mesh {self} has the ranks 0 to {self.size - 1}; there is no rank {rank}.")
        coordinate = []
        for size in reversed(self.shape):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate. Raises SpecError when it is outside the mesh."""
        if len(coordinate) != self.ndim or not all(0 <= c < n for c, n in zip(coordinate, self.shape, strict=True)):
            raise SpecError(f"The coordinate {tuple(coordinate)} is outside the mesh {self}.")
        rank = 0
        for c, n in zip(coordinate, self.shape, strict=True):
            rank = rank * n + c
        return rank

    def peers(self, rank: int, axes: Iterable[int]) -> tuple[int, ...]:
        """List the group of ``rank`` over ``axes``: itself and all ranks that differ only along them, by group rank.

        Group ranks are row-major over ascending axes.
        """
        axes = set(axes)
        coordinate_of_rank = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.size)
            if all(
                a in axes or c == o
                for a, (c, o) in enumerate(zip(self.coordinate(other), coordinate_of_rank, strict=True))
            )
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True)) + "]"

    @classmethod
    def parse(cls, text: str) -> DeviceMesh:
        """Parse the text that ``str()`` returns, such as ``[node=2, gpu=4]``. Raises SpecError for any other text."""
        stripped = text.strip()
        pairs = [part.partition("=") for part in stripped[1:-1].split(",")]
        if not (stripped.startswith("[") and stripped.endswith("]")) or not all(_is_count(size) for *_, size in pairs):
            raise SpecError(f"Not a device mesh: {shown(text)}. Write it as [node=2, gpu=4].")
        return cls(tuple(int(size) for *_, size in pairs), tuple(name.strip() for name, *_ in pairs))


def _is_count(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 20  # Python refuses to convert very long digit strings
