"""Terms as C++ expressions: elements in memory, and conditions that are known at compile time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hidet_dist.compile.cpu.kernels.code import Code
from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Opaque, Size
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, Nest
from hidet_dist.compile.cpu.kernels.space import LoopSpace
from hidet_dist.compile.cpu.kernels.terms import (
    SHORT_FLOATS,
    TYPES,
    And,
    ArgReduction,
    Compare,
    Conditional,
    Convert,
    Extent,
    Function,
    Infix,
    KernelBuffer,
    Literal,
    Load,
    Not,
    Operation,
    Or,
    Prefix,
    Reduction,
    Round,
    Term,
    Test,
    Value,
    parts,
)

_TESTS = {"isnan": "({0} != {0})", "isinf": "(hd::abs({0}) == INFINITY)", "isfinite": "(hd::abs({0}) < INFINITY)"}


class Expressions:
    """Writes terms as expressions of C++.

    Attributes
    ----------
    space: the loops around the expressions.
    code: takes the declarations of values that are used more than once.
    buffers: the names of buffers in memory.
    results: the variables of terms that are already computed: reductions, and terms that are used more than once.
    """

    def __init__(self, space: LoopSpace, code: Code):
        self.space = space
        self.code = code
        self.buffers: dict[KernelBuffer, str] = {buffer: f"x{n}" for n, buffer in enumerate(space.schedule.inputs)}
        self.results: dict[Term, str] = {}

    def index(self, index: Index) -> str:
        """An index as an expression of C++."""
        texts: list[str] = []
        for (atom, symbols), value in index.terms.items():
            factors = [] if value == 1 and (symbols or atom is not None) else [f"INT64_C({value})"]
            factors += symbols
            if isinstance(atom, Axis):
                variable = self.space.name(atom)
                if variable == "0":
                    continue
                factors.append(variable)
            elif isinstance(atom, Opaque):
                factors.append(f"(int64_t){self.term(atom.term)}")
            texts.append(" * ".join(factors))
        return " + ".join(texts) or "0"

    def term(self, term: Term) -> str:
        """A term as an expression of C++."""
        if term in self.results:
            return self.results[term]
        match term:
            case Load():
                return self.load(term)
            case Value():
                return f"(({term.ctype})({self.index(term.index)}))"
            case Literal():
                return _literal(term)
            case Extent():
                return f"({term.ctype})({term.size})"
            case Compare():
                known = self.known(term)
                if known is not None:
                    return "true" if known else "false"
                return f"(({self.index(term.left)}) {term.operator} ({self.index(term.right)}))"
            case Conditional():
                known = self.known(term.condition)
                if known is not None:
                    return self.term(term.then if known else term.other)
                return f"({self.term(term.condition)} ? {self.term(term.then)} : {self.term(term.other)})"
            case Reduction() | ArgReduction():
                raise AssertionError(f"{type(term).__name__} outside of its loop")
            case _:
                return self.operation(term)

    def operation(self, term: Operation) -> str:
        """An operation as an expression of C++."""
        match term:
            case Infix():
                return f"{_narrowed(term)}({self.term(term.left)} {term.operator} {self.term(term.right)})"
            case Prefix():
                return f"{_narrowed(term)}({term.operator}{self.term(term.operand)})"
            case Function():
                return f"{_narrowed(term)}{term.name}({', '.join(self.term(each) for each in term.arguments)})"
            case Test():
                operand = self.term(term.operand)
                return _TESTS[term.kind].format(operand)
            case Convert():
                return f"(({term.ctype}){self.term(term.operand)})"
            case Round():
                return f"hd::load(hd::To<{TYPES[term.dtype]}>::from({self.term(term.operand)}))"
            case And():
                return f"({self.term(term.left)} && {self.term(term.right)})"
            case Or():
                return f"({self.term(term.left)} || {self.term(term.right)})"
            case Not():
                return f"(!{self.term(term.operand)})"

    def known(self, condition: Term) -> bool | None:
        """Evaluate a condition over the current ranges of the axes; None if it holds only in part of them."""
        if isinstance(condition, Compare):
            interval = (condition.left - condition.right).within(self.space.ranges)
            if interval is None:
                return None
            low, high = interval
            outcomes = {
                "<": (high < 0, low >= 0),
                "<=": (high <= 0, low > 0),
                "==": (low == high == 0, low > 0 or high < 0),
                "!=": (low > 0 or high < 0, low == high == 0),
            }[condition.operator]
            return True if outcomes[0] else False if outcomes[1] else None
        if isinstance(condition, Not):
            known = self.known(condition.operand)
            return None if known is None else not known
        if isinstance(condition, And | Or):
            values = [self.known(condition.left), self.known(condition.right)]
            decisive = isinstance(condition, Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        return None

    def load(self, load: Load) -> str:
        """An element of a buffer; half-precision floats as ``float``."""
        return f"hd::load({self.place(load.buffer, load.indices)})"

    def place(self, buffer: KernelBuffer, indices: Sequence[Index]) -> str:
        """An element of a buffer, as an lvalue."""
        nest = next((n for n in self.space.schedule.nests[:-1] if n.target is buffer), None)
        if nest is None:
            name = self.buffers.get(buffer, "y")
            return f"{name}[{self.index(buffer.flat(indices))}]"
        inner = self.space.schedule.inner(nest)
        if not inner:
            return self.buffers[buffer]
        place, stride = "", ONE
        for axis, index in zip(reversed(nest.axes), reversed(indices), strict=True):
            if axis not in inner:
                continue
            blocked = self.space.is_blocked(axis)
            offset = f"({self.index(index)}{f' - {self.space.block_start}' if blocked else ''}) * ({stride})"
            place = f"{offset} + {place}" if place else offset
            stride = stride * (Size(BLOCK) if blocked else axis.extent)
        return f"{self.buffers[buffer]}[{place}]"

    def place_at(self, buffer: KernelBuffer, indices: Sequence[Index], axis: Axis, place: str) -> str:
        """An element where an axis is at ``place``."""
        variable = self.space.name(axis)
        self.space.names[self.space.named(axis)] = place
        text = self.place(buffer, indices)
        self.space.names[self.space.named(axis)] = variable
        return text

    def is_contiguous(self, buffer: KernelBuffer, indices: Sequence[Index], axis: Axis) -> bool:
        """Whether elements along an axis are contiguous in a tensor."""
        in_memory = buffer in self.space.schedule.inputs or buffer is self.space.schedule.nests[-1].target
        axes = [alias for alias, origin in self.space.schedule.same.items() if origin is axis or alias is axis] or [
            axis
        ]
        steps = [buffer.flat(indices).step(alias) for alias in axes]
        return in_memory and None not in steps and [step for step in steps if step is not None and step.number] == [ONE]

    def is_copy(self, nest: Nest) -> bool:
        """Whether a nest only copies elements."""
        return isinstance(nest.value, Load) and nest.value.buffer.dtype == nest.target.dtype

    @staticmethod
    def stored(nest: Nest) -> Any:
        """The value that a nest computes, without the rounding that its store does."""
        value = nest.value
        return value.operand if isinstance(value, Round) and value.dtype == nest.target.dtype else value

    def bounds(self, condition: Term, axis: Axis) -> tuple[int, int] | None:
        """The range of an axis in which a condition on it alone holds."""
        if not isinstance(condition, Compare) or condition.operator not in ("<", "<="):
            return None
        difference = condition.left - condition.right
        step = difference.step(axis)
        if step is None or not step.constant:
            return None
        offset = (difference - Index.of(axis).times(step)).within(self.space.ranges)
        if offset is None or offset[0] != offset[1] or difference.axes - {axis} - set(self.space.ranges):
            return None
        limit = -offset[0] - (condition.operator == "<")  # step * i <= limit
        if step.number > 0:
            return -(2**62), limit // step.number + 1
        return -(limit // -step.number), 2**62

    def always(self, root: Term) -> list[Term]:
        """List the terms within a term that are evaluated whatever its conditions, each once."""
        return self.needed(root)[0]

    def needed(self, root: Term) -> tuple[list[Term], dict[Term, int]]:
        """List the terms within a term that are always evaluated, and count the uses of each term."""
        counts: dict[Term, int] = {}
        always: list[Term] = []

        def visit(term: Term, needed: bool) -> None:
            counts[term] = counts.get(term, 0) + 1
            if counts[term] > 1 or term in self.results:
                return
            if isinstance(term, Conditional) and self.known(term.condition) is None:
                visit(term.condition, needed)
                visit(term.then, False)
                visit(term.other, False)
            elif isinstance(term, Conditional):
                visit(term.then if self.known(term.condition) else term.other, needed)
            elif isinstance(term, And | Or):
                visit(term.left, needed)
                visit(term.right, False)
            else:
                for part in parts(term):
                    visit(part, needed)
            if needed:
                always.append(term)

        visit(root, True)
        return always, counts

    def name_shared(self, root: Term) -> list[Term]:
        """Declare variables for terms that are used more than once and always evaluated."""
        always, counts = self.needed(root)
        named: list[Term] = []
        for term in always:
            if counts[term] > 1 and isinstance(term, Operation | Conditional) and parts(term):
                name = f"t{next(self.code.fresh)}"
                self.code.put(f"const auto {name} = {self.term(term)};")
                self.results[term] = name
                named.append(term)
        return named


def _narrowed(term: Infix | Prefix | Function) -> str:
    return "" if term.narrowed is None else f"({term.narrowed})"


def _literal(term: Literal) -> str:
    if term.dtype == "bool":
        return "true" if term.value else "false"
    ctype = "float" if term.dtype in SHORT_FLOATS else TYPES[term.dtype]
    if isinstance(term.value, float):
        if math.isnan(term.value):
            text = "NAN"
        elif math.isinf(term.value):
            text = "INFINITY" if term.value > 0 else "(-INFINITY)"
        else:
            text = f"({term.value!r})"
        return f"(({ctype}){text})"
    suffix = "UINT64_C" if term.dtype == "uint64" else "INT64_C"
    text = "INT64_MIN" if term.value == -(2**63) else f"{suffix}({term.value})"
    return f"(({ctype}){text})"
