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
    """Determine the size of each local symbol from the inputs' shapes.

    Parameters
    ----------
    symbols: sequence of SymbolPlan
        The declarations.
    local_symbols: sequence of LocalSymbol
        The symbols in the shapes, whose sizes are returned.
    inputs: iterable of (shape, shape)
        For each input, its declared shape, with names of local symbols, and its actual shape.

    Raises
    ------
    InputError
        When a size is not a multiple of the declared number, or two sizes of one symbol differ.
    """
    by_name: Mapping[str, LocalSymbol] = {local.name: local for local in local_symbols}
    multiples = {symbol.name: symbol.multiple_of for symbol in symbols}
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for number, (written, shape) in enumerate(inputs):
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
    return {local.name: sizes[local.symbol] // local.shards for local in local_symbols}
