"""Extents: the sizes of dims, either ints or hidet's expressions of symbolic dims."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import hidet
from hidet.graph import Tensor
from hidet.ir import expr as ir
from hidet.ir.expr import Constant, Expr, SymbolVar, symbol_var
from hidet.ir.tools import collect

from hidet_dist.errors import SpecError
from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.parts import Split
from hidet_dist.spec.symbols import local_name
from hidet_dist.spec.tensor import TensorShardSpec

Extent: TypeAlias = int | Expr

# Two distinct polynomials of low degree agree at one large random point with a chance of about 1e-8.
_TRIALS = 3


def extents_of(tensor: Tensor) -> tuple[Extent, ...]:
    """Return the shape of a tensor, with constants as ints."""
    return tuple(int(size) if isinstance(size, int | Constant) else size for size in tensor.shape)


def extent_text(extent: Extent) -> str:
    """Return an extent as text, as ``str`` does, in less time for a number or the name of a symbolic dim."""
    return extent.name if isinstance(extent, SymbolVar) else str(extent)


def symbols_in(extents: Sequence[Extent]) -> list[str]:
    """List the names of the symbolic dims in extents, in the order of their first use."""
    names: dict[str, None] = {}
    for extent in extents:
        if isinstance(extent, Expr):
            names.update(dict.fromkeys(sorted(symbol.name for symbol in collect(extent, SymbolVar))))
    return list(names)


def evaluate(extent: Extent, sizes: Mapping[str, int]) -> int:
    """Compute the value of an extent, given the sizes of its symbols.

    Raises
    ------
    ValueError
        When the extent is anything but an expression of symbols by ``+ - * / % < <= ?:``.
    """
    value = evaluate_number(extent, sizes)
    if isinstance(value, float):
        raise ValueError(f"the size {extent} is no integer")
    return value


def evaluate_number(expression: int | float | Expr, sizes: Mapping[str, int]) -> int | float:
    """Compute the value of a number, an expression of symbols such as ``1.0 / n``, given the sizes of the symbols.

    Raises
    ------
    ValueError
        As :func:`evaluate`; beside integers there are floats, their powers, and functions of one operand.
    """
    if isinstance(expression, int | float):
        return expression
    if isinstance(expression, Constant):
        return float(expression) if expression.type.is_float() else int(expression)
    if isinstance(expression, SymbolVar) and expression.name in sizes:
        return sizes[expression.name]
    if isinstance(expression, ir.Cast):
        kind = expression.target_type
        value = evaluate_number(expression.expr, sizes)
        return float(value) if kind.is_data_type() and kind.is_float() else int(value)
    if isinstance(expression, ir.IfThenElse):
        return evaluate_number(
            expression.then_expr if evaluate_number(expression.cond, sizes) else expression.else_expr, sizes
        )
    if isinstance(expression, ir.Call):
        return _call(expression, sizes)
    if isinstance(expression, ir.LessThan | ir.LessEqual):
        a, b = evaluate_number(expression.a, sizes), evaluate_number(expression.b, sizes)
        return int(a < b or (a == b and isinstance(expression, ir.LessEqual)))
    if isinstance(expression, ir.Add | ir.Sub | ir.Multiply):
        a, b = evaluate_number(expression.a, sizes), evaluate_number(expression.b, sizes)
        return a + b if isinstance(expression, ir.Add) else a - b if isinstance(expression, ir.Sub) else a * b
    if isinstance(expression, ir.Div | ir.FloorDiv | ir.Mod):
        return _divided(expression, evaluate_number(expression.a, sizes), evaluate_number(expression.b, sizes))
    raise ValueError(f"the size {expression} is not arithmetic of symbolic dims")


def _divided(expression: Expr, a: int | float, b: int | float) -> int | float:
    """Divide as a C program does integers that are not negative; floats by ``/`` only. Raises ValueError."""
    if isinstance(a, float) or isinstance(b, float):
        if isinstance(expression, ir.Div) and b:
            return a / b
        raise ValueError(f"the size {expression} is not arithmetic of symbolic dims")
    if b <= 0:
        raise ValueError(f"the size {expression} divides by {b}")
    return a % b if isinstance(expression, ir.Mod) else a // b


def _call(call: ir.Call, sizes: Mapping[str, int]) -> float:
    """Compute a function of numbers, such as a square root."""
    name = str(call.func_var.name).removeprefix("generic_")
    arguments = [float(evaluate_number(argument, sizes)) for argument in call.args]
    if name not in _FUNCTIONS:
        raise ValueError(f"the number {call} is not arithmetic of symbolic dims")
    return float(_FUNCTIONS[name](*arguments))


_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "pow": math.pow,
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "sin", "cos", "tanh")},
}


def same_extent(a: Extent, b: Extent) -> bool:
    """Tell whether two extents are equal for all sizes of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if str(a) == str(b):
        return True
    names = symbols_in([a, b])
    try:
        return all(
            evaluate(a, sizes) == evaluate(b, sizes)
            for sizes in ({name: _number(name, trial) for name in names} for trial in range(_TRIALS))
        )
    except ValueError:
        return False


def same_shape(a: Sequence[Extent], b: Sequence[Extent]) -> bool:
    """Tell whether two shapes have the same extents for all sizes of their symbols."""
    return len(a) == len(b) and all(map(same_extent, a, b))


def _number(name: str, trial: int) -> int:
    digest = hashlib.sha256(f"{name} {trial}".encode()).digest()
    return 2**31 + int.from_bytes(digest[:4], "big")


def local_extent(extent: Extent, shards: int, multiples: Mapping[str, int]) -> Extent | None:
    """Return the extent of one of ``shards`` equal shards of a dim; None if it is not known to divide.

    A symbol's shard is a separate symbol (:func:`hidet_dist.spec.symbols.local_name`), so that local shapes have the
    same form as global ones. ``multiples`` maps each symbol to a number that divides its sizes.
    """
    if shards == 1:
        return extent
    factors = factors_of(extent)
    for number, factor in enumerate(factors):
        part = math.gcd(shards, divisor_of(factor, multiples))
        shards //= part
        factors[number] = _shard(factor, part)
    return hidet.utils.prod(factors) if shards == 1 else None


def even_parts(multiple: int, mesh: DeviceMesh) -> int:
    """Return the number of parts into which a symbolic dim may be split, whose sizes ``multiple`` divides.

    Axes with shares do not split it: the number is no multiple of the sum of their shares.
    """
    shares = [mesh.shares_of(axis) for axis in range(mesh.ndim)]
    uneven = [of_axis for of_axis in shares if len(set(of_axis)) > 1]
    parts = math.gcd(multiple, mesh.size // math.prod(map(len, uneven)))
    return parts if all(parts % sum(of_axis) for of_axis in uneven) else 1


def part_extent(extent: int, split: Split, mesh: DeviceMesh) -> Extent:
    """Return the extent of a device's part of a dim of ``extent``, where the parts of the devices are unequal.

    It is a number times the symbol of the device's part along each axis with unequal parts (:meth:`Split.symbols`).
    """
    number = extent // split.units
    symbols = [symbol_var(name) for name in split.symbols(mesh)]
    return hidet.utils.prod(symbols if number == 1 else [number, *symbols])


def part_shape(
    shape: Sequence[Extent],
    spec: TensorShardSpec,
    mesh: DeviceMesh,
    multiples: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Extent, ...]:
    """Return the shape of a device's shard, with symbols for unequal parts.

    ``multiples`` maps each symbol of ``shape`` to a number that divides its sizes. Raises SpecError for a misfit: a
    symbolic dim must divide whatever its size is, and has no unequal parts.
    """
    # Symbolic dims are checked below, and 0 fits any spec.
    local = spec.local_shape([extent if isinstance(extent, int) else 0 for extent in shape], mesh)
    return tuple(
        size if isinstance(whole, int) and spec.is_even(dim, mesh) else _part(whole, dim, spec, mesh, multiples)
        for dim, (whole, size) in enumerate(zip(shape, local, strict=True))
    )


def _part(extent: Extent, dim: int, spec: TensorShardSpec, mesh: DeviceMesh, multiples: Mapping[str, int]) -> Extent:
    """Return a part of a dim that is symbolic, or of which parts are unequal. Raises SpecError where it is both."""
    even = spec.is_even(dim, mesh)
    if isinstance(extent, int) and not even:
        return part_extent(extent, spec.split(dim, mesh), mesh)
    shards = mesh.group_size(spec.mesh_axes_per_dim[dim])
    even = even and (not mesh.shares or even_parts(divisor_of(extent, multiples), mesh) % shards == 0)
    local = local_extent(extent, shards, multiples) if even else None
    if local is None:
        raise SpecError(f"{spec} splits {extent} into {shards}, which it is not declared to be a multiple of")
    return local


def choose(values: Sequence[int], index: Expr | int) -> Expr | int:
    """Return ``values[index]`` as an expression of the index."""
    if all(value == number for number, value in enumerate(values)):
        return index
    if len(set(values)) == 1:
        return values[0]
    result: Expr | int = values[-1]
    for number in reversed(range(len(values) - 1)):
        result = ir.if_then_else(index == number, values[number], result)
    return result


def part_interval(
    extent: Extent, parts: Sequence[Sequence[int]], coordinates: Sequence[Expr | int]
) -> tuple[Extent, Extent]:
    """Return the begin and the size of a part of a dim of ``extent``, as :meth:`Split.interval` does.

    ``parts`` are those of the axes that split the dim, major to minor, and ``coordinates`` those along these axes.
    """
    begin: Extent = 0
    for of_axis, coordinate in zip(parts, coordinates, strict=True):
        part = extent // sum(of_axis)
        begin = begin + part * choose([sum(of_axis[:number]) for number in range(len(of_axis))], coordinate)
        extent = part * choose(of_axis, coordinate)
    return begin, extent


def factors_of(extent: Extent) -> list[Extent]:
    """List the factors of an extent; only the extent itself if it is not a product."""
    if isinstance(extent, ir.Multiply):
        return [*factors_of(extent.a), *factors_of(extent.b)]
    return [int(extent) if isinstance(extent, Constant) else extent]


def quotient(extent: Extent, divisor: Extent) -> int | None:
    """Return the whole number that is ``extent / divisor`` for all sizes of their symbols; None if there is none."""
    found = ratio(extent, divisor)
    return found if isinstance(found, int) else None


def ratio(extent: Extent, divisor: Extent) -> Extent | None:
    """Divide a product by one of some of its factors; None if no product of a whole number and factors is left."""
    number, divided_by = (
        math.prod(factor for factor in factors_of(each) if isinstance(factor, int)) for each in (extent, divisor)
    )
    if number % divided_by:
        return None
    if not number:
        return 0
    left = [factor for factor in factors_of(extent) if not isinstance(factor, int)]
    for factor in factors_of(divisor):
        if not isinstance(factor, int):
            same = next((at for at, other in enumerate(left) if str(other) == str(factor)), None)
            if same is None:
                return None
            del left[same]
    number //= divided_by
    return hidet.utils.prod(left if left and number == 1 else [number, *left])


def divisor_of(extent: Extent, multiples: Mapping[str, int]) -> int:
    """Return a number known to divide an extent; ``multiples`` maps each symbol to a divisor of its sizes."""
    numbers = [
        factor if isinstance(factor, int) else multiples[factor.name] if isinstance(factor, SymbolVar) else 1
        for factor in factors_of(extent)
    ]
    return math.prod(numbers)


def _shard(factor: Extent, shards: int) -> Extent:
    if isinstance(factor, SymbolVar):
        return symbol_var(local_name(factor.name, shards))
    return factor if shards == 1 else factor // shards
