"""Terms: a kernel's computation as a tree of values, operations and reductions over axes.

hidet's definitions are lowered to terms by :mod:`hidet_dist.compile.cpu.kernels.lowering`, and written as C++ by
:mod:`hidet_dist.compile.cpu.kernels.expressions`. A term that is used twice is one object: terms are compared by
identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hidet.ir.compute import TensorNode

from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Opaque, Size

TYPES = {
    "bool": "bool",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "float16": "hd::f16",
    "bfloat16": "hd::bf16",
    "float32": "float",
    "float64": "double",
}
"""The C++ type of each dtype's elements in memory."""
SHORT_FLOATS = ("float16", "bfloat16")
"""Half-precision floats: computed as ``float``, and rounded when they are stored."""


@dataclass(frozen=True, eq=False)
class KernelBuffer:
    """The memory of a tensor that a kernel reads or writes."""

    dtype: str
    shape: tuple[Size, ...]
    node: TensorNode

    def flat(self, indices: Sequence[Index]) -> Index:
        """Return the linear index of an element."""
        place, stride = Index(), ONE
        for size, index in zip(reversed(self.shape), reversed(indices), strict=True):
            place = place + index.times(stride)
            stride = stride * size
        return place


# Leaves


@dataclass(frozen=True, eq=False)
class Load:
    """An element of a buffer."""

    buffer: KernelBuffer
    indices: tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """An index as a value of a C++ type."""

    index: Index
    ctype: str


@dataclass(frozen=True, eq=False)
class Literal:
    """A number of a dtype."""

    dtype: str
    value: bool | int | float


@dataclass(frozen=True, eq=False)
class Extent:
    """A size as a value of a C++ type."""

    size: Size
    ctype: str


@dataclass(frozen=True, eq=False)
class Compare:
    """Two indices compared by ``<``, ``<=``, ``==`` or ``!=``."""

    operator: str
    left: Index
    right: Index

    def bound(self, holds: bool) -> tuple[Axis, int, int] | None:
        """Bound an axis where the comparison holds, or where it does not.

        Returns
        -------
        The axis, its first place there, and the place behind its last one, which may come before the first. None if the
        comparison is no inequality of one axis of a known extent.
        """
        difference = self.left - self.right
        axes = [atom for atom, _ in difference.terms if atom is not None]
        if self.operator not in ("<", "<=") or len(axes) != 1 or not isinstance(axes[0], Axis):
            return None
        axis, step = axes[0], difference.step(axes[0])
        offset = (difference - Index.of(axis).times(step)).constant if step is not None else None
        extent = axis.extent.constant
        if step is None or step.constant is None or offset is None or extent is None:
            return None
        # step * i + offset < 0, in whole numbers
        factor, rest = step.number, offset - (self.operator == "<=")
        if not holds:
            factor, rest = -factor, -rest - 1
        if factor > 0:
            return axis, 0, min(extent, -(rest // factor))
        return axis, max(0, rest // -factor + 1), extent


# Operations


@dataclass(frozen=True, eq=False)
class Infix:
    """``left operator right``, an operator of C++; ``narrowed`` is the short integer type of the result, or None."""

    operator: str
    left: Term
    right: Term
    narrowed: str | None = None


@dataclass(frozen=True, eq=False)
class Prefix:
    """``operator operand``, an operator of C++; ``narrowed`` as of :class:`Infix`."""

    operator: str
    operand: Term
    narrowed: str | None = None


@dataclass(frozen=True, eq=False)
class Function:
    """A call of a C++ function; ``costly`` if keeping the result is cheaper than computing it twice."""

    name: str
    arguments: tuple[Term, ...]
    narrowed: str | None = None
    costly: bool = False


@dataclass(frozen=True, eq=False)
class Test:
    """The test whether a float is NaN, infinite or finite: ``kind`` is ``isnan``, ``isinf`` or ``isfinite``."""

    kind: str
    operand: Term


@dataclass(frozen=True, eq=False)
class Convert:
    """A term converted to a C++ type."""

    ctype: str
    operand: Term


@dataclass(frozen=True, eq=False)
class Round:
    """A float rounded to a half-precision dtype."""

    dtype: str
    operand: Term


@dataclass(frozen=True, eq=False)
class And:
    """The conjunction of two conditions; the second one is evaluated only if the first holds."""

    left: Term
    right: Term


@dataclass(frozen=True, eq=False)
class Or:
    """The disjunction of two conditions; the second one is evaluated only if the first does not hold."""

    left: Term
    right: Term


@dataclass(frozen=True, eq=False)
class Not:
    """The negation of a condition."""

    operand: Term


@dataclass(frozen=True, eq=False)
class Conditional:
    """A conditional: one of two terms; the other is not computed."""

    condition: Term
    then: Term
    other: Term


# Reductions


@dataclass(frozen=True, eq=False)
class Reduction:
    """The accumulation of a term over axes: ``operation`` is a template of functions.h, ``ctype`` the type."""

    operation: str
    ctype: str
    axes: tuple[Axis, ...]
    value: Term


@dataclass(frozen=True, eq=False)
class ArgReduction:
    """The first ``index`` along axes of the least (``<``) or the greatest (``>``) term."""

    operator: str
    ctype: str
    axes: tuple[Axis, ...]
    index: Index
    value: Term


Operation: TypeAlias = Infix | Prefix | Function | Test | Convert | Round | And | Or | Not
AnyReduction: TypeAlias = Reduction | ArgReduction
Term: TypeAlias = Load | Value | Literal | Extent | Compare | Operation | Conditional | AnyReduction


def parts(term: Term) -> tuple[Term, ...]:
    """List the operands of a term, including the terms in its indices."""
    match term:
        case Load():
            return tuple(opaque for index in term.indices for opaque in _opaque(index))
        case Value():
            return tuple(_opaque(term.index))
        case Compare():
            return (*_opaque(term.left), *_opaque(term.right))
        case Literal() | Extent():
            return ()
        case Infix() | And() | Or():
            return (term.left, term.right)
        case Function():
            return term.arguments
        case Prefix() | Test() | Convert() | Round() | Not():
            return (term.operand,)
        case Conditional():
            return (term.condition, term.then, term.other)
        case Reduction() | ArgReduction():
            return (term.value,)


def _opaque(index: Index) -> list[Term]:
    return [atom.term for atom, _ in index.terms if isinstance(atom, Opaque)]


def walk(term: Term) -> list[Term]:
    """List a term and all terms within it, each once, before its operands."""
    terms: dict[Term, None] = {}
    pending = [term]
    while pending:
        current = pending.pop()
        if current not in terms:
            terms[current] = None
            pending.extend(parts(current))
    return list(terms)


def reads_conditionally(term: Term) -> bool:
    """Whether an element within a term is read only where a condition holds."""
    guarded = [branch for part in walk(term) for branch in _guarded(part)]
    return any(isinstance(part, Load) for branch in guarded for part in walk(branch))


def _guarded(term: Term) -> tuple[Term, ...]:
    """List the operands of a term that are computed only where a condition holds."""
    if isinstance(term, Conditional):
        return term.then, term.other
    return (term.right,) if isinstance(term, And | Or) else ()


def is_costly(term: Term) -> bool:
    """Whether a term, its operands aside, takes much longer to compute than a sum."""
    return isinstance(term, Function) and term.costly


def conjuncts(condition: Term) -> list[Term]:
    """Split a condition into the conditions of its conjunction."""
    if isinstance(condition, And):
        return [*conjuncts(condition.left), *conjuncts(condition.right)]
    return [condition]


def is_identity(term: Term, reduction: Reduction) -> bool:
    """Whether a term is the identity of a reduction of floats by a sum or a maximum."""
    if not isinstance(term, Literal) or term.dtype not in ("float16", "bfloat16", "float32", "float64"):
        return False
    name = reduction.operation.split("<")[0]
    if name == "Sum":
        return term.value == 0 and math.copysign(1.0, term.value) > 0
    return name == "Max" and term.value == -math.inf


def axes_of(term: Term) -> frozenset[Axis]:
    """The axes that a term depends on, without those that reductions within it reduce."""
    free = free_axes(term)
    return free - {axis for part in walk(term) for axis in reduced_axes(part)}


def reduced_axes(term: Term) -> tuple[Axis, ...]:
    """The axes that a reduction reduces; none for other terms."""
    return term.axes if isinstance(term, Reduction | ArgReduction) else ()


def free_axes(term: Term) -> frozenset[Axis]:
    """The axes that occur within a term."""
    axes: set[Axis] = set()
    for part in walk(term):
        if isinstance(part, Load):
            for index in part.indices:
                axes |= index.axes
        elif isinstance(part, Value):
            axes |= part.index.axes
        elif isinstance(part, Compare):
            axes |= part.left.axes | part.right.axes
    return frozenset(axes)
