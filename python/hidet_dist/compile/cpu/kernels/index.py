"""Indices as sums of products: memory accesses that are linear in the loops around them.

hidet writes a reshape as divisions and remainders by the sizes of dims. Here they are resolved: a loop is split where a
division cuts it, so that the innermost loops contain only products and sums.

The rules have an index form of their own, :class:`hidet_dist.rules.access.IndexForm`: of numbers alone, with digits
that are equal by value, since proofs compare and hash forms. Here sizes may be symbols, and parts may be read from
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A product of a number and of variables whose values a kernel gets when it is called."""

    number: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Size) -> Size:
        return Size(self.number * other.number, tuple(sorted(self.symbols + other.symbols)))

    def per(self, other: Size) -> Size | None:
        """This size divided by another; None if the other is not a factor of it."""
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return None
            left.remove(symbol)
        if other.number == 0 or self.number % other.number:
            return None
        return Size(self.number // other.number, tuple(left))

    def at_least(self, other: Size) -> bool:
        """Whether this is at least another for all values >= 1 of the variables."""
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return False
            left.remove(symbol)
        return self.number >= other.number

    @property
    def constant(self) -> int | None:
        """The number, if there are no variables."""
        return None if self.symbols else self.number

    def __str__(self) -> str:
        number = f"INT64_C({self.number})"
        return " * ".join([number, *self.symbols] if self.number != 1 or not self.symbols else self.symbols)


ONE = Size(1)
_names = itertools.count()


@dataclass(frozen=True, eq=False)
class Axis:
    """A loop from 0 to ``extent``, compared by identity. ``name`` is set when the kernel's text is written."""

    extent: Size
    number: int = field(default_factory=lambda: next(_names))

    def split(self, factor: Size) -> tuple[Axis, Axis]:
        """Split into an outer and an inner loop; the inner one has the extent ``factor``, which divides this one's."""
        outer = self.extent.per(factor)
        assert outer is not None
        return Axis(outer), Axis(factor)


@dataclass(frozen=True, eq=False)
class Opaque:
    """A part of an index that is read from memory or not linear; ``term`` computes it."""

    term: Any
    axes: frozenset[Axis]


Atom = Axis | Opaque
_Key = tuple[Atom | None, tuple[str, ...]]


class SplitNeeded(Exception):
    """An axis must be split for an index to be linear."""

    def __init__(self, axis: Axis, factor: Size):
        super().__init__()
        self.axis, self.factor = axis, factor


class Index:
    """A sum of products of sizes and axes (or opaque parts)."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[_Key, int] | None = None):
        self.terms: dict[_Key, int] = {key: value for key, value in (terms or {}).items() if value}

    @staticmethod
    def of(value: int | Size | Atom) -> Index:
        """A number, a size or an axis as an index."""
        key: _Key = (value, ()) if isinstance(value, Axis | Opaque) else (None, ())
        if isinstance(value, Size):
            key = (None, value.symbols)
        return Index({key: value.number if isinstance(value, Size) else value if isinstance(value, int) else 1})

    def __add__(self, other: Index) -> Index:
        terms = dict(self.terms)
        for key, value in other.terms.items():
            terms[key] = terms.get(key, 0) + value
        return Index(terms)

    def __sub__(self, other: Index) -> Index:
        return self + other.times(Size(-1))

    def times(self, size: Size) -> Index:
        """This index, multiplied."""
        return Index(
            {
                (atom, tuple(sorted(symbols + size.symbols))): value * size.number
                for (atom, symbols), value in self.terms.items()
            }
        )

    def product(self, other: Index) -> Index | None:
        """The product with another index if it is linear, that is, if one of the two does not depend on loops."""
        for a, b in ((self, other), (other, self)):
            if all(atom is None for atom, _ in b.terms):
                total = Index()
                for (_, symbols), value in b.terms.items():
                    total = total + a.times(Size(value, symbols))
                return total
        return None

    @property
    def axes(self) -> set[Axis]:
        """The axes that the index depends on."""
        result: set[Axis] = set()
        for atom, _ in self.terms:
            if isinstance(atom, Axis):
                result.add(atom)
            elif isinstance(atom, Opaque):
                result |= atom.axes
        return result

    @property
    def constant(self) -> int | None:
        """The number, if the index is one."""
        if not self.terms:
            return 0
        return self.terms.get((None, ())) if len(self.terms) == 1 else None

    def step(self, axis: Axis) -> Size | None:
        """The increment per step of an axis; None if it is not a product or the index is not linear in the axis."""
        steps = [Size(value, symbols) for (atom, symbols), value in self.terms.items() if atom is axis]
        if any(isinstance(atom, Opaque) and axis in atom.axes for atom, _ in self.terms):
            return None
        if not steps:
            return Size(0)
        return steps[0] if len(steps) == 1 else None

    def lone_axis(self) -> Axis | None:
        """The axis, if the index is one axis and nothing else."""
        if len(self.terms) != 1:
            return None
        ((atom, symbols), value) = next(iter(self.terms.items()))
        return atom if isinstance(atom, Axis) and not symbols and value == 1 else None

    def divided_within(self, size: Size, ranges: Mapping[Axis, tuple[int, int]]) -> tuple[Index, Index] | None:
        """Compute the quotient and the remainder as :meth:`divided` does, where axes run over a part of their extent.

        ``ranges`` has the first place of each such axis, and that behind its last. None if they are not linear.
        """
        moved = {axis: Axis(Size(end - first)) for axis, (first, end) in ranges.items()}  # from 0 on
        back = {moved[axis]: Index.of(axis) + Index.of(-first) for axis, (first, _) in ranges.items()}
        from_zero = {axis: Index.of(moved[axis]) + Index.of(first) for axis, (first, _) in ranges.items()}
        try:
            both = self._with(from_zero).divided(size)
        except SplitNeeded:
            return None
        return None if both is None else (both[0]._with(back), both[1]._with(back))

    def _with(self, replaced: Mapping[Axis, Index]) -> Index:
        """Replace axes by indices."""
        total = Index()
        for (atom, symbols), value in self.terms.items():
            new = replaced.get(atom) if isinstance(atom, Axis) else None
            total = total + (Index({(atom, symbols): value}) if new is None else new.times(Size(value, symbols)))
        return total

    def divided(self, size: Size) -> tuple[Index, Index] | None:
        """Compute the quotient and the remainder by a size; None if they are not linear.

        Raises
        ------
        SplitNeeded
            When they are linear once an axis is split.
        """
        if size.constant == 1:
            return self, Index()
        quotient: dict[_Key, int] = {}
        rest: dict[_Key, int] = {}
        for (atom, symbols), value in self.terms.items():
            if value < 0 or isinstance(atom, Opaque):
                return None  # C rounds towards zero, and an opaque part may be less than that
            if atom is None and not symbols and size.constant:
                if value // size.constant:
                    quotient[atom, symbols] = value // size.constant
                if value % size.constant:
                    rest[atom, symbols] = value % size.constant
                continue
            quotient_size = Size(value, symbols).per(size)
            if quotient_size is None:
                rest[atom, symbols] = value
            else:
                key = (atom, quotient_size.symbols)
                quotient[key] = quotient.get(key, 0) + quotient_size.number
        if _less_than(rest, size):
            return Index(quotient), Index(rest)
        for (atom, symbols), value in rest.items():
            factor = size.per(Size(value, symbols))
            if isinstance(atom, Axis) and factor not in (None, ONE) and atom.extent.per(factor) not in (None, ONE):
                raise SplitNeeded(atom, factor)
        return None

    def within(self, ranges: Mapping[Axis, tuple[int, int]]) -> tuple[int, int] | None:
        """Bound the index, if all sizes are known. ``ranges`` has the axes that run over a part of their extent."""
        low = high = 0
        for (atom, symbols), value in self.terms.items():
            if symbols or isinstance(atom, Opaque):
                return None
            if atom is None:
                low, high = low + value, high + value
                continue
            if atom in ranges:
                first, end = ranges[atom]
            elif atom.extent.constant is not None:
                first, end = 0, atom.extent.constant
            else:
                return None
            ends = (value * first, value * (end - 1))
            low, high = low + min(ends), high + max(ends)
        return low, high


def _less_than(rest: Mapping[_Key, int], size: Size) -> bool:
    """Whether a sum of non-negative products is less than a size, as a mixed-radix number is."""
    digits: list[tuple[Size, Size]] = []
    bound = ONE
    for (atom, symbols), value in rest.items():
        if atom is None:
            if symbols:
                return False
            bound = Size(bound.number + value)
        else:
            assert isinstance(atom, Axis)
            digits.append((Size(value, symbols), atom.extent))
    digits.sort(key=lambda digit: (len(digit[0].symbols), digit[0].number))
    constant = size.constant is not None and all(not a.symbols and not b.symbols for a, b in digits)
    if constant:
        return bound.number + sum(a.number * (b.number - 1) for a, b in digits) <= size.number
    for step, extent in digits:
        if not step.at_least(bound):
            return False
        bound = step * extent
    return size.at_least(bound)
