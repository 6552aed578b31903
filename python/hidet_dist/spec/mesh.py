"""The device mesh: a row-major grid of ranks with named axes, and the parts into which each splits a dim by default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import SpecError
from hidet_dist.limits import MOST_DEVICES

MAX_AXES = 10  # so that a mesh axis is one digit in the text of a spec
MOST_SHARE = 2**16
"""The largest share of a coordinate along an uneven axis."""


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of ranks with any number of axes; a rank is the row-major index of its coordinate.

    Parameters
    ----------
    shape: tuple[int, ...]
        Devices along each axis, at least one axis, each at least 1; at most ``MOST_DEVICES`` in all.
    axis_names: tuple[str, ...]
        One name per axis; ``axis0, axis1, ...`` by default.
    shares: tuple of tuple[int, ...]
        For each axis the share of each of its coordinates, in whole parts, or an empty tuple for an even axis. An axis
        with the shares ``(11, 5)`` splits a dim of 32 elements into 22 and 10, where a spec gives no other parts.
        Shares are kept in lowest terms, and equal shares make an even axis; without uneven axes the tuple is empty.

    Raises
    ------
    SpecError
        For an empty shape, a size below 1, too many devices, repeated names, or names or shares that do not match the
        shape.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()

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
        object.__setattr__(self, "shares", self._in_lowest_terms(tuple(map(tuple, self.shares))))

    def _in_lowest_terms(self, shares: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if shares and len(shares) != self.ndim:
            raise SpecError(f"The mesh {self.shape} has {self.ndim} axes but shares for {len(shares)}.")
        reduced = []
        for name, size, of_axis in zip(self.axis_names, self.shape, shares, strict=False):
            if of_axis and len(of_axis) != size:
                raise SpecError(f"The mesh axis {name} has {size} coordinates but {len(of_axis)} shares: {of_axis}.")
            if not all(is_whole(share, 1, MOST_SHARE) for share in of_axis):
                raise SpecError(f"Shares are whole numbers from 1 to {MOST_SHARE}; {name} has {shown(of_axis)}.")
            divisor = math.gcd(*of_axis)
            reduced.append(tuple(share // divisor for share in of_axis) if len(set(of_axis)) > 1 else ())
        return tuple(reduced) if any(reduced) else ()

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
        number = 1
        for axis in axes:
            number *= self.shape[axis]
        return number

    def is_uneven(self) -> bool:
        """Tell whether one of its axes has shares."""
        return bool(self.shares)

    def without_shares(self) -> DeviceMesh:
        """Return the mesh with even axes only."""
        return DeviceMesh(self.shape, self.axis_names) if self.shares else self

    def shares_of(self, axis: int) -> tuple[int, ...]:
        """Return the share of each coordinate along an axis; 1 for each along an even axis."""
        return (self.shares[axis] if self.shares else ()) or (1,) * self.shape[axis]

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
        shares = self.shares or ((),) * self.ndim
        sizes = [":".join(map(str, of_axis)) or str(n) for n, of_axis in zip(self.shape, shares, strict=True)]
        return "[" + ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, sizes, strict=True)) + "]"

    @classmethod
    def parse(cls, text: str) -> DeviceMesh:
        """Parse the text that ``str()`` returns, such as ``[node=2, gpu=4]``, or ``[gpu=11:5]`` for two unequal shares.

        Raises SpecError for any other text.
        """
        stripped = text.strip()
        pairs = [part.partition("=") for part in stripped[1:-1].split(",")]
        numbers = [size.split(":") for *_, size in pairs]
        if not (stripped.startswith("[") and stripped.endswith("]")) or not all(
            _is_count(number) for size in numbers for number in size
        ):
            raise SpecError(f"Not a device mesh: {shown(text)}. Write it as [node=2, gpu=4].")
        shares = tuple(tuple(map(int, size)) if len(size) > 1 else () for size in numbers)
        sizes = tuple(len(size) if len(size) > 1 else int(size[0]) for size in numbers)
        return cls(sizes, tuple(name.strip() for name, *_ in pairs), shares)


def _is_count(text: str) -> bool:
    return text.strip().isdecimal() and len(text) < 20  # Python refuses to convert very long digit strings
