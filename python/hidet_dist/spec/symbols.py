"""Symbolic dims: declarations of their sizes, and their binding to the shapes of a call's inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.errors import InputError
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.reading import read_object, read_text, read_whole

INT32_MAX = 2**31 - 1
"""The largest size of a symbolic dim: hidet's runtime holds sizes as int32."""


@dataclass(frozen=True)
class SymbolSize:
    """The declaration of a symbolic dim: the size to plan for, and a number that divides every size."""

    expected: int
    multiple_of: int = 1

    def of(self, name: str) -> SymbolPlan:
        """Make the symbol of that name, planned for the expected size."""
        return SymbolPlan(name, self.multiple_of, self.expected)


@dataclass(frozen=True)
class SymbolPlan:
    """A symbolic dim: its size is a positive multiple of ``multiple_of``; costs are predicted for ``size`` elements."""

    name: str
    multiple_of: int
    size: int

    def cut(self, count: int) -> SymbolPlan:
        """Make the symbol of the largest of ``count`` micro-batches; see :func:`micro_sizes`."""
        return SymbolPlan(self.name, self.multiple_of, micro_sizes(self.size, self.multiple_of, count)[0])

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return {"name": self.name, "multiple_of": self.multiple_of, "size": self.size}

    @classmethod
    def from_json(cls, data: Any) -> SymbolPlan:
        """Read the JSON values that :meth:`to_json` makes. Raises SpecError for others."""
        data = read_object(data, "a symbolic dim")
        return cls(read_text(data, "name"), read_whole(data, "multiple_of", 1), read_whole(data, "size", 1))


@dataclass(frozen=True)
class LocalSymbol:
    """A symbol of the local program: the size of ``symbol`` divided by the ``shards`` of a dim."""

    name: str
    symbol: str
    shards: int


def micro_sizes(size: int, multiple_of: int, count: int) -> tuple[int, ...]:
    """Divide a batch of ``size`` elements into at most ``count`` micro-batches; the first are the largest.

    Each is a positive multiple of ``multiple_of``, which divides ``size``, and they differ by at most that number. A
    batch of fewer than ``count`` such units has one micro-batch per unit.
    """
    units = size // multiple_of
    number = min(count, units)
    return tuple((units // number + (place < units % number)) * multiple_of for place in range(number))


def local_name(symbol: str, shards: int) -> str:
    """Return the name of a symbol's shard."""
    return symbol if shards == 1 else f"{symbol}_over_{shards}"


def local_symbols(symbols: Sequence[SymbolPlan], mesh: DeviceMesh) -> tuple[LocalSymbol, ...]:
    """List the symbols, and all shards of them that a program on the mesh may have."""
    groups = {
        mesh.group_size(axes) for n in range(mesh.ndim + 1) for axes in itertools.combinations(range(mesh.ndim), n)
    }
    return tuple(
        LocalSymbol(local_name(symbol.name, shards), symbol.name, shards)
        for symbol in symbols
        for shards in sorted(groups)
        if symbol.multiple_of % shards == 0
    )


def bind(
    symbols: Sequence[SymbolPlan],
    local_symbols: Sequence[LocalSymbol],
    inputs: Iterable[tuple[Sequence[int | str], Sequence[int]]],
) -> dict[str, int]:
    """Determine the size of each local symbol from the inputs' shapes, which have all of them.

    Parameters and errors are those of :func:`known_sizes`.
    """
    return local_sizes(local_symbols, known_sizes(symbols, local_symbols, inputs))


def local_sizes(local_symbols: Sequence[LocalSymbol], sizes: Mapping[str, int]) -> dict[str, int]:
    """Compute the size of each local symbol from the sizes of the symbols."""
    return {local.name: sizes[local.symbol] // local.shards for local in local_symbols}


def check_sizes(symbols: Sequence[SymbolPlan], sizes: Mapping[str, int]) -> None:
    """Check the sizes of symbols. Raises InputError for one that is not a multiple of the declared number."""
    for symbol in symbols:
        size, multiple = sizes[symbol.name], symbol.multiple_of
        if not 1 <= size <= INT32_MAX or size % multiple:
            wanted = f"a positive multiple of {multiple}" if multiple > 1 else "at least 1"
            raise InputError(f"The symbolic dim {symbol.name} must be {wanted}, and at most {INT32_MAX}; got {size}.")


def known_sizes(
    symbols: Sequence[SymbolPlan],
    local_symbols: Sequence[LocalSymbol],
    inputs: Iterable[tuple[Sequence[int | str], Sequence[int]]],
    numbers: Sequence[int] | None = None,
) -> dict[str, int]:
    """Determine the sizes of those symbols that the inputs' shapes have.

    Parameters
    ----------
    symbols: sequence of SymbolPlan
        The declarations.
    local_symbols: sequence of LocalSymbol
        The symbols in the shapes.
    inputs: iterable of (shape, shape)
        For each input, its declared shape, with names of local symbols, and its actual shape.
    numbers: sequence of int, optional
        The numbers of the inputs in errors; from 0 on by default.

    Raises
    ------
    InputError
        When a size is not a multiple of the declared number, or two sizes of one symbol differ.
    """
    by_name: Mapping[str, LocalSymbol] = {local.name: local for local in local_symbols}
    multiples = {symbol.name: symbol.multiple_of for symbol in symbols}
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for place, (written, shape) in enumerate(inputs):
        number = place if numbers is None else numbers[place]
        for dim, (extent, given) in enumerate(zip(written, shape, strict=True)):
            if isinstance(extent, int):
                continue
            local = by_name[extent]
            name, size = local.symbol, given * local.shards
            where = f"dim {dim} of input {number}"
            what = f"{name} = {size}" + (f" ({local.shards} shards of {given})" if local.shards > 1 else "")
            multiple = multiples[name]
            if size < 1 or size % multiple:
                wanted = f"a positive multiple of {multiple}" if multiple > 1 else "at least 1"
                raise InputError(f"The symbolic dim {name} must be {wanted}; {where} says {what}.")
            if size > INT32_MAX:
                raise InputError(f"The symbolic dim {name} must be at most {INT32_MAX}; {where} says {what}.")
            if sizes.setdefault(name, size) != size:
                raise InputError(
                    f"The symbolic dim {name} must be the same everywhere; {where} says {what}, but {first[name]} says "
                    f"{name} = {sizes[name]}."
                )
            first.setdefault(name, where)
    return sizes
