"""Symbolic dims: declarations of their sizes, and their binding to the shapes of a call's inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from hidet_dist.codec import OMITTED, Positive
from hidet_dist.errors import ConfigError, InputError
from hidet_dist.spec.mesh import DeviceMesh

INT32_MAX = 2**31 - 1
"""The largest size of a symbolic dim: hidet's runtime holds sizes as int32."""


_MARK = "_hidet_dist_sizes_of_symbols"


@dataclass(frozen=True)
class SymbolSize:
    """The declaration of a symbolic dim.

    Attributes
    ----------
    expected: the size to plan for.
    multiple_of: a number that divides every size.
    most: the greatest size; None where only the runtime has one.
    least: the least size.
    """

    expected: int
    multiple_of: int = 1
    most: int | None = None
    least: int = 1

    def of(self, name: str) -> SymbolPlan:
        """Make the symbol of that name, planned for the expected size."""
        return SymbolPlan(name, self.multiple_of, self.expected, self.most, self.least)

    def check(self, what: str) -> None:
        """Raise ConfigError, which begins with ``what``, for sizes that contradict each other."""
        if self.expected % self.multiple_of:
            raise ConfigError(f"{what}: 'expected' = {self.expected} is no multiple of {self.multiple_of}.")
        if self.most is not None and self.expected > self.most:
            raise ConfigError(f"{what}: 'expected' = {self.expected} is more than the greatest size, {self.most}.")
        if self.expected < self.least:
            raise ConfigError(f"{what}: 'expected' = {self.expected} is less than the least size, {self.least}.")


@dataclass(frozen=True)
class SymbolPlan:
    """A symbolic dim: its size is a positive multiple of ``multiple_of``; costs are predicted for ``size`` elements.

    ``least`` is the least size, and ``most`` the greatest; None where only the runtime has one. Where a batch is cut
    into micro-batches, ``size`` is that of the largest of them, and the other numbers are those of the whole batch.
    """

    name: str
    multiple_of: Positive
    size: Positive
    most: Annotated[Positive | None, OMITTED] = None
    least: Annotated[Positive, OMITTED] = 1

    @property
    def greatest(self) -> int:
        """The greatest size, of the declaration or else of the runtime."""
        return INT32_MAX if self.most is None else self.most

    @property
    def declared(self) -> SymbolSize:
        """The declaration."""
        return SymbolSize(self.size, self.multiple_of, self.most, self.least)

    def cut(self, count: int) -> SymbolPlan:
        """Make the symbol of the largest of ``count`` micro-batches; see :func:`micro_sizes`."""
        return replace(self, size=micro_sizes(self.size, self.multiple_of, count)[0])


def multiples_of(symbols: Iterable[SymbolPlan]) -> dict[str, int]:
    """Map the names of symbolic dims to numbers that divide their sizes."""
    return {symbol.name: symbol.multiple_of for symbol in symbols}


@dataclass(frozen=True)
class LocalSymbol:
    """A symbol of the local program: the size of ``symbol`` divided by the ``shards`` of a dim."""

    name: str
    symbol: str
    shards: int


def limit_sizes(graph: Any, limits: Mapping[str, tuple[int, int]]) -> None:
    """Attach to a graph the least and greatest sizes of symbolic dims for which it computes what its model does."""
    setattr(graph, _MARK, dict(limits))


def within_limits(graph: Any, declared: Mapping[str, SymbolSize]) -> dict[str, SymbolSize]:
    """Limit declarations to the sizes of a graph. Raises ConfigError for an expected size beyond them."""
    limits: dict[str, tuple[int, int]] = getattr(graph, _MARK, {})
    result = {}
    for name, size in declared.items():
        least, most = limits.get(name, (1, INT32_MAX))
        most = min(most, INT32_MAX if size.most is None else size.most)
        result[name] = replace(size, most=most if most < INT32_MAX else None, least=max(least, size.least))
        result[name].check(f"optimization_config['symbols'][{name!r}]")
    return result


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
    """Check the sizes of symbols. Raises InputError for one that its declaration does not have."""
    for symbol in symbols:
        size, most = sizes[symbol.name], symbol.greatest
        if not symbol.least <= size <= most or size % symbol.multiple_of:
            wanted = _wanted(symbol)
            raise InputError(f"The symbolic dim {symbol.name} must be {wanted}, and at most {most}; got {size}.")


def _wanted(symbol: SymbolPlan) -> str:
    """Say which numbers a symbol's sizes are, without the greatest one."""
    if symbol.multiple_of == 1:
        return f"at least {symbol.least}"
    more = f" of at least {symbol.least}" if symbol.least > symbol.multiple_of else ""
    return f"a positive multiple of {symbol.multiple_of}{more}"


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
        When a size is not a multiple of the declared number, or too small or large, or two sizes of one symbol differ.
    """
    by_name: Mapping[str, LocalSymbol] = {local.name: local for local in local_symbols}
    declared = {symbol.name: symbol for symbol in symbols}
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
            symbol = declared[name]
            if size < symbol.least or size % symbol.multiple_of:
                raise InputError(f"The symbolic dim {name} must be {_wanted(symbol)}; {where} says {what}.")
            if size > symbol.greatest:
                raise InputError(f"The symbolic dim {name} must be at most {symbol.greatest}; {where} says {what}.")
            if sizes.setdefault(name, size) != size:
                raise InputError(
                    f"The symbolic dim {name} must be the same everywhere; {where} says {what}, but {first[name]} says "
                    f"{name} = {sizes[name]}."
                )
            first.setdefault(name, where)
    return sizes
