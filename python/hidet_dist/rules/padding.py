"""Padding: the factors that may be padded where they do not divide, and the inputs whose padding must be masked.

The padding of an activation has unspecified values, computed from other padding. An element in the padding of a
*spatial* factor depends only on padding and is never used: it is cut off where the dim is gathered. A *reduction* over
a padded factor would include it. There the operands are masked with zeros, which is right for sums of products, as
these are zero where an operand is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.expr import if_then_else

from hidet_dist.rules.access import Definition, Digit, IndexForm
from hidet_dist.rules.declared import DECLARED
from hidet_dist.spec import DeviceMesh
from hidet_dist.traits import has_traits, routed_of

_DIVISIONS = ("Div", "FloorDiv", "Mod")
_ARITHMETIC = (*_DIVISIONS, "Add", "Sub", "Multiply")


def paddable(
    op: Operator,
    definition: Definition,
    layouts: Sequence[Sequence[tuple[Digit, ...] | None]],
    reduce_ops: Mapping[Digit, Sequence[tuple[int, str]]],
) -> frozenset[Digit]:
    """Select the digits that may be padded, of those that may be sharded.

    ``layouts`` are those of all inputs and outputs. A digit may be padded if each dim that it indexes is that digit
    alone, and padding cannot affect results: no index and no integer divisor is read from it, and a reduction over it
    is a sum that masking keeps right. Operators that map, move or look up elements, or multiply matrices, have such
    digits. Others do not get padding, which would hardly ever pay there.
    """
    if type(op) in DECLARED:
        return frozenset()  # its kernel treats padding differently from its definition
    reductions = [node for node in _nodes(definition.canonical) if node[0] in ("reduce", "arg")]
    routed = routed_of(op)
    is_product = len(reductions) == len(definition.reductions) == 1 and _is_product(reductions[0])
    if reductions and routed is None and not is_product:
        return frozenset()
    dims = [digits for layout in layouts for digits in layout if digits]
    together = {digit for digits in dims if len(digits) > 1 for digit in digits}
    alone = {digit for digits in dims for digit in digits} - together - set(_fragile(definition.canonical, op))
    if routed is not None:
        # No row has the label 0, so masked experts are no row's. Masked inner elements must add zeros. A masked choice
        # would be one of the first expert.
        alone = alone.difference(*(digits or () for digits in layouts[routed.chosen][1:]))
        spatial = alone.difference(reduce_ops).union(alone.intersection(layouts[routed.labels][0] or ()))
        summed = (
            digit
            for digit in alone - spatial
            if all(_at_zeros(node, digit) == 0 for node in reductions if digit in node[3])
        )
        return frozenset(spatial.union(summed))
    return frozenset(
        digit for digit in alone if digit not in reduce_ops or _maskable(digit, reductions, reduce_ops[digit])
    )


def _is_product(node: Any) -> bool:
    """Tell whether a reduction is that of a matrix product: a sum of products."""
    return node[:2] == ("reduce", "sum") and len(node[3]) == 1 and node[5][0] == "Multiply"


def _maskable(digit: Digit, reductions: Sequence[Any], ops: Sequence[tuple[int, str]]) -> bool:
    """Tell whether all reductions over the digit are sums that zeros in the operands do not change."""
    over_digit = [node for node in reductions if digit in node[3]]
    return all(op == "sum" for _, op in ops) and all(_is_zero(node[5], digit) for node in over_digit)


def _is_zero(node: Any, digit: Digit) -> bool:
    """Tell whether a value is zero wherever the operands that the digit indexes are zero."""
    kind = node[0]
    if kind == "access":
        return any(isinstance(index, IndexForm) and digit in index.digits for index in node[2])
    if kind == "const":
        return _constant(node) == 0
    if kind in ("cast", "Neg"):
        return _is_zero(node[-1], digit)
    if kind == "Multiply":
        # Zero times infinity is not zero.
        zeros = [_is_zero(operand, digit) for operand in node[1:]]
        finite = [zero or _is_finite(operand) for zero, operand in zip(zeros, node[1:], strict=True)]
        return any(zeros) and all(finite)
    if kind in ("Add", "Sub"):
        return all(_is_zero(operand, digit) for operand in node[1:])
    if kind == "if":
        return all(_is_zero(branch, digit) for branch in node[2:])
    return False


_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    **{name: getattr(math, name) for name in ("exp", "expm1", "tanh", "erf", "sqrt", "sin", "cos", "atan")},
    **{"abs": abs, "max": max, "min": min},
}


def _at_zeros(node: Any, digit: Digit) -> float | None:
    """Compute a value where the elements that the digit indexes are zeros, and others are finite; None if unknown."""
    kind = node[0]
    if kind == "access":
        indexed = any(isinstance(index, IndexForm) and digit in index.digits for index in node[2])
        return 0.0 if indexed else None
    if kind == "const":
        return _constant(node)
    if kind == "cast":
        return _at_zeros(node[-1], digit)
    if kind == "reduce":
        return 0.0 if node[1] == "sum" and _at_zeros(node[5], digit) == 0 else None
    if kind == "if":
        values = {_at_zeros(branch, digit) for branch in node[2:]}
        return values.pop() if len(values) == 1 else None
    operands = node[2:] if kind == "call" else node[1:]
    if kind not in ("Neg", "Add", "Sub", "Multiply", "Div", "call"):
        return None
    values_of = [_at_zeros(operand, digit) for operand in operands]
    known = [value for value in values_of if value is not None]
    if kind == "Multiply" and 0.0 in known:
        unknown = (operand for operand, value in zip(operands, values_of, strict=True) if value is None)
        return None if any(digit in _digits(operand) for operand in unknown) else 0.0
    if len(known) < len(values_of):
        return None
    try:
        value = _computed(kind, node[1].removeprefix("generic_") if kind == "call" else "", known)
    except (ArithmeticError, KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _computed(kind: str, function: str, operands: Sequence[float]) -> float:
    """Compute an operation on numbers. Raises KeyError for an unknown function, ArithmeticError or ValueError."""
    if kind == "call":
        return _FUNCTIONS[function](*operands)
    if kind == "Neg":
        return -operands[0]
    if kind == "Div":
        return operands[0] / operands[1]
    return {"Add": sum, "Sub": lambda pair: pair[0] - pair[1], "Multiply": math.prod}[kind](operands)


def _constant(node: Any) -> float | None:
    try:
        return float(node[-1])
    except ValueError:
        return None


def _is_finite(node: Any) -> bool:
    value = _constant(node) if node[0] == "const" else None
    return value is not None and math.isfinite(value)


def _nodes(node: Any) -> Iterator[Any]:
    """Yield all nodes of a canonical form, which are named by their first entry."""
    if isinstance(node, tuple):
        if node and isinstance(node[0], str):
            yield node
        for part in node:
            yield from _nodes(part)


def _digits(node: Any) -> Iterator[Digit]:
    if isinstance(node, IndexForm):
        yield from node.digits
    elif isinstance(node, tuple):
        for part in node:
            yield from _digits(part)


def _fragile(canonical: Any, op: Operator) -> Iterator[Digit]:
    """Yield the digits of values that are used as an index or an integer divisor, where arbitrary values may fault."""
    for node in _nodes(canonical):
        if node[0] in ("access", "table"):
            for index in node[-1]:
                if not isinstance(index, IndexForm):
                    yield from _digits(index)
        elif node[0] in _DIVISIONS and not _is_float(node, op):
            yield from _digits(node[2])


def _is_float(node: Any, op: Operator) -> bool:
    """Tell whether a value is known to be a floating point number."""
    kind = node[0]
    if kind == "access":
        return bool(op.inputs[node[1]].dtype.is_float())
    if kind == "const":
        return "float" in node[1] or "." in node[-1]
    if kind == "cast":
        return "float" in node[1]
    if kind in _ARITHMETIC:
        return any(_is_float(operand, op) for operand in node[1:])
    if kind == "if":
        return all(_is_float(branch, op) for branch in node[2:])
    if kind == "reduce":
        return _is_float(node[5], op)
    if kind == "call":
        return not node[1].removeprefix("generic_").startswith("is") and any(_is_float(x, op) for x in node[2:])
    return kind == "Neg" and _is_float(node[1], op)


class MaskPaddingTask(Task):
    """The task of setting elements of ``x`` to zero whose index along ``dim``, over all shards, is ``size`` or more."""

    def __init__(  # type: ignore[no-untyped-def]
        self, x, coordinate, dim: int, mesh_axes: Sequence[int], sizes: Sequence[int], size: int
    ):
        def element(*indices: Any) -> Any:
            shard = coordinate[mesh_axes[0]]
            for axis, count in zip(mesh_axes[1:], sizes[1:], strict=True):
                shard = shard * count + coordinate[axis]
            inside = shard * x.shape[dim] + indices[dim] < size
            return if_then_else(inside, x[list(indices)], x.type.dtype.zero)

        attributes = {"dim": dim, "mesh_axes": list(mesh_axes), "sizes": list(sizes), "size": size}
        super().__init__("mask_padding", [x, coordinate], [compute("y", x.shape, element)], attributes=attributes)


@has_traits(kernel="elementwise")
class MaskPaddingOp(Operator):
    """The operator that sets the padding of ``dim`` to zero, of which ``mesh_axes`` split ``size`` elements.

    ``sizes`` are the sizes of the mesh axes.
    """

    def __init__(
        self, x: Tensor, coordinate: Tensor, dim: int, mesh_axes: Sequence[int], sizes: Sequence[int], size: int
    ):
        task = MaskPaddingTask(input_like(x, "x"), input_like(coordinate, "coordinate"), dim, mesh_axes, sizes, size)
        attributes = {"dim": dim, "mesh_axes": list(mesh_axes), "sizes": list(sizes), "size": size}
        super().__init__(inputs=[x, coordinate], attributes=attributes, task=task)


def mask_padding(
    x: Tensor, dim: int, size: int, mesh_axes: Sequence[int], mesh: DeviceMesh, coordinate: Callable[[], Tensor]
) -> Tensor:
    """Zero the padding along ``dim`` in the shard ``x`` of a tensor with ``size`` elements along it."""
    sizes = [mesh.shape[axis] for axis in mesh_axes]
    return MaskPaddingOp(x, coordinate(), dim, mesh_axes, sizes, size).outputs[0]
