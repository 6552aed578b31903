"""Conditions on symbolic sizes under which an exported program computes what its module does.

``torch.export`` follows one branch of a module's code. Where another size would have taken another branch, the program
has an assertion, which no graph has. So it is proven here, for all sizes of the symbols or for a range of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges

_TRIED = 4096
"""Sizes up to which a condition is tried one by one. Beyond them it is proven, or sizes are limited to them."""


@dataclass(frozen=True)
class _Symbol:
    """The range of a symbol, and its size in the example inputs."""

    least: int
    greatest: float
    example: int


class UnmetConditionError(Exception):
    """A condition on sizes that is not proven, and holds for no range of them that is found."""

    def __init__(self, condition: sympy.Basic, symbols: Mapping[str, _Symbol]):
        examples = sorted(f"{name} is {symbols[str(name)].example}" for name in condition.free_symbols)
        super().__init__(f"it takes sizes with `{condition}` alone, where {', '.join(examples)} in the example inputs")


def narrowed_sizes(program: ExportedProgram) -> dict[str, tuple[int, int]]:
    """Find the least and greatest sizes, by the names of PyTorch's symbols, for which all assertions on them hold.

    Symbols whose sizes none narrows are left out. Assertions on sizes that depend on values are not considered.

    Raises
    ------
    UnmetConditionError
        When an assertion on several sizes cannot be proven, or one on a size holds for no range of sizes up to the
        least or the greatest one.
    """
    symbols = _symbols(program)
    narrowed: dict[str, tuple[int, int]] = {}
    for condition in _conditions(program):
        names = {str(symbol) for symbol in condition.free_symbols}
        if not names or not names <= set(symbols) or _holds(_shifted(condition, symbols)):
            continue
        if len(names) > 1:
            raise UnmetConditionError(condition, symbols)
        (name,) = names
        found = _run_of_sizes(condition, symbols[name])
        if found is None:
            raise UnmetConditionError(condition, symbols)
        least, greatest = found
        before = narrowed.get(name, (1, greatest))
        narrowed[name] = (max(least, before[0]), min(greatest, before[1]))
    return narrowed


def least_of(bounds: ValueRanges[Any]) -> int:
    """Return the least size of a symbol; 1 where PyTorch has the bound of 2 that it takes where nothing is declared."""
    return int(bounds.lower) if bounds.lower > 2 else 1


def examples_of(program: ExportedProgram) -> dict[str, int]:
    """Map PyTorch's symbols to their sizes in the example inputs."""
    return {name: symbol.example for name, symbol in _symbols(program).items()}


def _symbols(program: ExportedProgram) -> dict[str, _Symbol]:
    """Map the names of the symbols of the inputs' shapes to their ranges; PyTorch takes the size 1 for no symbol's."""
    found = {}
    for node in program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                bounds = program.range_constraints[size.node.expr]
                found[str(size.node.expr)] = _Symbol(least_of(bounds), float(bounds.upper), int(size.node.hint))
    return found


def _conditions(program: ExportedProgram) -> Iterator[sympy.Basic]:
    """Yield the conditions on sizes that a program asserts."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        asserted = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
        if isinstance(asserted, torch.SymBool):
            yield asserted.node.expr


def _run_of_sizes(condition: sympy.Basic, symbol: _Symbol) -> tuple[int, int] | None:
    """Find the consecutive sizes about that of the example for which a condition on one symbol holds.

    None if they go neither down to the least size nor up to the greatest one, as where multiples alone are taken.
    """
    (variable,) = condition.free_symbols

    def holds(size: int) -> bool:
        return bool(condition.xreplace({variable: sympy.Integer(size)}) == sympy.true)

    least = greatest = symbol.example
    if not holds(symbol.example):
        return None
    while least > symbol.least and holds(least - 1):
        least -= 1
    tried = max(_TRIED, symbol.example)
    while greatest < min(symbol.greatest, tried) and holds(greatest + 1):
        greatest += 1
    if least > symbol.least and greatest < min(symbol.greatest, tried):
        return None
    if greatest == tried and _holds(_shifted(condition, {str(variable): _Symbol(least, symbol.greatest, 0)})):
        return least, int(min(symbol.greatest, torch.iinfo(torch.int32).max))
    return least, greatest


def _shifted(condition: sympy.Basic, symbols: Mapping[str, _Symbol]) -> sympy.Basic:
    """Write a condition in what its sizes exceed their least ones by, in functions that SymPy simplifies."""
    excess = {
        variable: symbols[str(variable)].least + sympy.Symbol(f"{variable}_excess", integer=True, nonnegative=True)
        for variable in condition.free_symbols
    }
    return condition.xreplace(excess).replace(Min, sympy.Min).replace(Max, sympy.Max)


def _holds(condition: sympy.Basic) -> bool:
    """Whether a condition is proven for all values of its variables."""
    if condition in (sympy.true, sympy.false):
        return bool(condition == sympy.true)
    if isinstance(condition, sympy.And):
        return all(map(_holds, condition.args))
    if not isinstance(condition, sympy.core.relational.Relational):
        return False
    a, b = condition.args
    if isinstance(condition, sympy.Eq):
        return _is_below(a, b, False) and _is_below(b, a, False)
    if isinstance(condition, sympy.Ne):
        return _is_below(a, b, True) or _is_below(b, a, True)
    strict = isinstance(condition, sympy.StrictLessThan | sympy.StrictGreaterThan)
    is_less = isinstance(condition, sympy.LessThan | sympy.StrictLessThan)
    return _is_below(a, b, strict) if is_less else _is_below(b, a, strict)


def _is_below(a: sympy.Expr, b: sympy.Expr, strict: bool) -> bool:
    """Whether ``a <= b``, or ``a < b`` if ``strict``, is proven."""
    difference = sympy.expand(b - a)
    if difference.is_positive or (difference.is_nonnegative and not strict):
        return True
    if any(_is_below(bound, b, strict) for bound in _upper_bounds(a)):
        return True
    if any(_is_below(a, bound, strict) for bound in _lower_bounds(b)):
        return True
    if isinstance(a, sympy.Max):
        return all(_is_below(each, b, strict) for each in a.args)
    return isinstance(b, sympy.Min) and all(_is_below(a, each, strict) for each in b.args)


def _upper_bounds(x: sympy.Expr) -> Iterable[sympy.Expr]:
    """Give expressions that are at least ``x``."""
    if isinstance(x, sympy.Min):
        return x.args
    if isinstance(x, FloorDiv) and x.args[1].is_positive:
        return [x.args[0] / x.args[1]]
    return [x.args[1] - 1] if isinstance(x, Mod | PythonMod | sympy.Mod) and x.args[1].is_positive else []


def _lower_bounds(x: sympy.Expr) -> Iterable[sympy.Expr]:
    """Give expressions that are at most ``x``."""
    if isinstance(x, sympy.Max):
        return x.args
    if isinstance(x, FloorDiv) and x.args[1].is_positive:
        return [(x.args[0] - x.args[1] + 1) / x.args[1]]
    return [sympy.Integer(0)] if isinstance(x, Mod | PythonMod | sympy.Mod) and x.args[1].is_positive else []
