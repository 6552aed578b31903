"""Loops of reductions: a row in vector lanes, or neighbouring columns in parallel lanes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack

from hidet_dist.compile.cpu.kernels.code import Code
from hidet_dist.compile.cpu.kernels.expressions import Expressions
from hidet_dist.compile.cpu.kernels.index import ONE, Axis
from hidet_dist.compile.cpu.kernels.loops import Loops
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, Nest, lane_axis
from hidet_dist.compile.cpu.kernels.space import LoopSpace
from hidet_dist.compile.cpu.kernels.terms import (
    AnyReduction,
    ArgReduction,
    Compare,
    Conditional,
    Reduction,
    Term,
    axes_of,
    conjuncts,
    is_identity,
    walk,
)

LANES = 32  # accumulators of a row
_FEW_LANES = 16  # accumulators of a row that is not much longer than this
_SHORT_ROW = 4 * LANES
_MOST_UNROLLED = 32


class Reductions:
    """Writes the loops of reductions.

    Attributes
    ----------
    space: the loops' names and extents.
    code: takes the lines.
    expressions: writes the reduced expressions.
    loops: writes the loops around, and the stores of results.
    """

    def __init__(self, space: LoopSpace, code: Code, expressions: Expressions, loops: Loops):
        self.space = space
        self.code = code
        self.expressions = expressions
        self.loops = loops

    def column(self, reductions: Sequence[AnyReduction], inner: list[Axis]) -> Axis | None:
        """Return the axis whose neighbouring elements are reduced in parallel; None if each row is reduced in lanes."""
        for axis in inner:
            if self.space.is_blocked(axis):
                return axis
        lanes = [lane_axis(reduction, inner) for reduction in reductions]
        return next((axis for axis in lanes if axis in inner), None)

    def row_reduction(self, reduction: AnyReduction) -> None:
        """Write the reduction to one number: loops over the reduced axes, the innermost in lanes."""
        result = f"s{next(self.code.fresh)}"
        if isinstance(reduction, ArgReduction):
            self.place_of_extreme(reduction, result)
            return
        axes = [axis for axis in reduction.axes if axis not in self.space.merged and self.space.extent(axis) != ONE]
        for axis in reduction.axes:
            if axis not in axes and axis not in self.space.merged:
                self.space.names[axis] = "0"
        lane = lane_axis(reduction, [])
        lane = axes[-1] if axes and (lane is None or lane not in axes) else lane
        operation = f"hd::{reduction.operation}"
        lanes = lane is not None and lane in axes and reduction.ctype != "bool"
        if lanes and lane is not None and (self.space.extent(lane).constant or LANES) >= _FEW_LANES:
            number = _FEW_LANES if (self.space.extent(lane).constant or _SHORT_ROW) < _SHORT_ROW else LANES
            self.code.put(f"{reduction.ctype} a{result}[{number}];")
            self.code.put(f"hd::start<{operation}>(a{result});")
            with self.loops.loops([axis for axis in axes if axis is not lane]):
                self.in_lanes(reduction, lane, operation, f"a{result}", number)
            self.code.put(f"const {reduction.ctype} {result} = hd::finish<{operation}>(a{result});")
        else:
            self.code.put(f"{reduction.ctype} {result} = {operation}::identity();")
            with self.loops.loops(axes):
                shared = self.expressions.name_shared(reduction.value)
                value = self.expressions.term(reduction.value)
                self.code.put(f"{result} = {operation}::combine({result}, ({reduction.ctype}){value});")
                for term in shared:
                    del self.expressions.results[term]
        self.expressions.results[reduction] = result

    def in_lanes(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, number: int) -> None:
        """Accumulate ``number`` elements along the lane axis at a time, one per lane."""
        start = f"b{next(self.code.fresh)}"
        extent = self.space.extent(lane)
        whole = None if extent.constant is None else extent.constant - extent.constant % number
        self.code.put(f"int64_t {start} = 0;")
        condition = f"{start} + {number} <= {extent}" if whole is None else f"{start} < {whole}"
        with self.code.braces(f"for (; {condition}; {start} += {number})"):
            self.lane_step(reduction, lane, operation, lanes, start, str(number))
        if whole is None or whole != extent.constant:
            self.lane_step(reduction, lane, operation, lanes, start, f"{extent} - {start}")

    def lane_step(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, start: str, number: str) -> None:
        """Accumulate up to ``number`` elements; half-precision elements are converted to floats first."""
        with ExitStack() as stack:
            if self.loops.halves(reduction.value, lane):
                stack.enter_context(self.code.braces(""))
                stack.enter_context(self.loops.converted(reduction.value, lane, start, number))
            self.lane_loop(reduction, lane, operation, lanes, start, number)

    def lane_loop(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, start: str, number: str) -> None:
        """Write the loop over lanes."""
        self.code.put("#pragma GCC ivdep")
        self.loops.keep_loop(int(number) if number.isdigit() else None)
        with self.code.braces(f"for (int64_t l = 0; l < {number}; ++l)"):
            self.code.put(f"const int64_t {self.space.name(lane)} = {start} + l;")
            shared = self.expressions.name_shared(reduction.value)
            value = f"({reduction.ctype}){self.expressions.term(reduction.value)}"
            self.code.put(f"{lanes}[l] = {operation}::combine({lanes}[l], {value});")
            for term in shared:
                del self.expressions.results[term]

    def place_of_extreme(self, reduction: ArgReduction, result: str) -> None:
        """Write the loop that computes the first index of the least or greatest element."""
        best, operation = f"m{result}", "Max" if reduction.operator == ">" else "Min"
        self.code.put(f"{reduction.ctype} {best} = hd::{operation}<{reduction.ctype}>::identity();")
        self.code.put(f"int64_t {result} = 0;")
        with self.loops.loops(reduction.axes):
            self.code.put(f"const {reduction.ctype} v = {self.expressions.term(reduction.value)};")
            # The first NaN is the extreme, as in PyTorch.
            with self.code.braces(f"if (v {reduction.operator} {best} || (v != v && {best} == {best}))"):
                self.code.put(f"{best} = v;")
                self.code.put(f"{result} = {self.expressions.index(reduction.index)};")
        self.expressions.results[reduction] = result

    def columns(self, nest: Nest, reductions: Sequence[AnyReduction], column: Axis) -> None:
        """Write the reductions of neighbouring columns in parallel, one block of columns at a time."""
        blocked = self.space.is_blocked(column)
        start = self.space.block_start if blocked else f"b{next(self.code.fresh)}"
        extent = self.space.extent(column)
        if not blocked:
            self.code.put(f"for (int64_t {start} = 0; {start} < {extent}; {start} += {BLOCK}) {{")
            self.code.depth += 1
            self.loops.put_end(start, extent, BLOCK)
        accumulators = []
        for reduction in reductions:
            accumulators.append(self.column_reduction(reduction, column, start))
        with self.loops.simd(column, start, f"e{start}"):
            for reduction, name in zip(reductions, accumulators, strict=True):
                self.expressions.results[reduction] = f"{name}[{self.space.name(column)} - {start}]"
            self.loops.store(nest)
        if not blocked:
            self.code.depth -= 1
            self.code.put("}")

    def column_reduction(self, reduction: AnyReduction, column: Axis, start: str) -> str:
        """Reduce a block of columns; return the name of the array with a result for each."""
        name = f"c{next(self.code.fresh)}"
        position = f"{self.space.name(column)} - {start}"
        if isinstance(reduction, ArgReduction):
            self.code.put(f"int64_t {name}[{BLOCK}];")
            with self.code.braces(self.loops.loop_head(column, start, f"e{start}")):
                self.place_of_extreme(reduction, f"s{name}")
                self.code.put(f"{name}[{position}] = s{name};")
            return name
        operation = f"hd::{reduction.operation}"
        self.code.put(f"alignas(64) {reduction.ctype} {name}[{BLOCK}];")
        self.code.put(f"for (int64_t l = 0; l < e{start} - {start}; ++l) {name}[l] = {operation}::identity();")
        axes = [axis for axis in reduction.axes if axis not in self.space.merged and self.space.extent(axis) != ONE]
        for axis in reduction.axes:
            if axis not in axes and axis not in self.space.merged:
                self.space.names[axis] = "0"
        steps = 1
        for axis in axes:
            steps *= self.space.extent(axis).constant or _MOST_UNROLLED + 1
        guarded = any(isinstance(term, Compare) for term in walk(reduction.value))
        if guarded and steps <= _MOST_UNROLLED:
            for places in itertools.product(*(range(self.space.extent(axis).number) for axis in axes)):
                for axis, place in zip(axes, places, strict=True):
                    self.space.names[axis] = str(place)
                    self.space.ranges[axis] = (place, place + 1)
                self.guarded_step(reduction, column, start, name)
            for axis in axes:
                del self.space.ranges[axis]
        else:
            with self.loops.loops(axes):
                self.column_step(reduction, reduction.value, column, start, f"e{start}", name)
        return name

    def guarded_step(self, reduction: Reduction, column: Axis, start: str, name: str) -> None:
        """Write one step of a reduction; where a condition guards it, over the columns that satisfy the condition."""
        value = reduction.value
        extent = self.space.extent(column).constant
        if not (isinstance(value, Conditional) and is_identity(value.other, reduction) and extent is not None):
            self.column_step(reduction, value, column, start, f"e{start}", name)
            return
        loose = []
        low, high = 0, extent
        for condition in conjuncts(value.condition):
            if self.expressions.known(condition) is False:
                return
            if self.expressions.known(condition) is True:
                continue
            bounds = self.expressions.bounds(condition, column)
            if bounds is not None:
                low, high = max(low, bounds[0]), min(high, bounds[1])
            else:
                loose.append(condition)
        outside = [c for c in loose if column not in axes_of(c)]
        if len(outside) < len(loose):
            self.column_step(reduction, value, column, start, f"e{start}", name)
            return
        head = " && ".join(self.expressions.term(condition) for condition in outside) or "true"
        with self.code.braces(f"if ({head})"):
            first, end = f"f{next(self.code.fresh)}", f"g{next(self.code.fresh)}"
            self.code.put(f"const int64_t {first} = {start} > {low} ? {start} : {low};")
            self.code.put(f"const int64_t {end} = e{start} < {high} ? e{start} : {high};")
            self.column_step(reduction, value.then, column, first, end, name, start)

    def column_step(
        self, reduction: Reduction, value: Term, column: Axis, first: str, end: str, name: str, base: str | None = None
    ) -> None:
        """Accumulate a value into each column from ``first`` to ``end``."""
        with ExitStack() as stack:
            if self.loops.halves(value, column):
                stack.enter_context(self.code.braces(""))
                stack.enter_context(self.loops.converted(value, column, first, f"{end} - {first}"))
            stack.enter_context(self.loops.simd(column, first, end))
            shared = self.expressions.name_shared(value)
            place = f"{name}[{self.space.name(column)} - {base or first}]"
            element = f"({reduction.ctype}){self.expressions.term(value)}"
            self.code.put(f"{place} = hd::{reduction.operation}::combine({place}, {element});")
            for term in shared:
                del self.expressions.results[term]
