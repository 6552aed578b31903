"""Loops of nests without reductions: vectors, tiles, and runs of half-precision elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hidet_dist.compile.cpu.kernels.arrangement import PARALLEL_WORK
from hidet_dist.compile.cpu.kernels.code import Code
from hidet_dist.compile.cpu.kernels.expressions import Expressions
from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Size
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, COSTLY_WORK, Nest
from hidet_dist.compile.cpu.kernels.space import LoopSpace
from hidet_dist.compile.cpu.kernels.terms import TYPES, Compare, Load, Term, is_costly, reduced_axes, walk

_RUN = BLOCK  # half-precision elements that are converted at a time
_SHORTEST_RUN = 8
_TILE = 16  # rows and columns of a transposed tile: 16 floats are a cache line
_MOST_PIECES = 8
_MOST_PEELED = 16  # iterations of a loop that GCC writes one by one (max-completely-peel-times)


class Loops:
    """Writes loops over elements.

    Attributes
    ----------
    space: the loops' names and extents.
    code: takes the lines.
    expressions: writes the expressions in the loops.
    """

    def __init__(self, space: LoopSpace, code: Code, expressions: Expressions):
        self.space = space
        self.code = code
        self.expressions = expressions

    @contextmanager
    def outer_loops(self) -> Iterator[None]:
        """Write the loops around all nests, parallel where threads pay off."""
        schedule = self.space.schedule
        loops = [axis for axis in schedule.outer if self.space.extent(axis) != ONE]
        for axis in schedule.outer:
            if axis not in loops:
                self.space.names[axis] = "0"
        block = schedule.block
        heads = [self.loop_head(axis) for axis in loops]
        if block is not None:
            self.space.block_start = f"b{next(self.code.fresh)}"
            heads.append(
                f"for (int64_t {self.space.block_start} = 0; {self.space.block_start} < {self.space.extent(block)}; "
                f"{self.space.block_start} += {self.space.chunk})"
            )
        condition = self.parallel_condition() if heads else None
        if condition is not None:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            self.code.put(f"#pragma omp parallel for{collapse} schedule(static){condition}")
        for number, head in enumerate(heads):
            if condition is None and number < len(loops):
                self.keep_loop(self.space.extent(loops[number]).constant)
            self.code.put(head + " {")
            self.code.depth += 1
        if block is not None:
            self.put_end(self.space.block_start, self.space.extent(block), self.space.chunk)
        yield
        for _ in heads:
            self.code.depth -= 1
            self.code.put("}")

    def parallel_condition(self) -> str | None:
        """Write the condition under which threads pay off; None for never."""
        texts, total = [], 0
        for nest in self.space.schedule.nests:
            work = ONE
            axes = {*nest.axes} | {axis for r in nest.reductions() for axis in reduced_axes(r)}
            for axis in sorted(axes, key=lambda axis: axis.number):
                work = work * axis.extent
            if any(map(is_costly, walk(nest.value))):
                work = work * Size(COSTLY_WORK)
            if work.constant is None:
                texts.append(str(work))
            else:
                total += work.constant
        if not texts:
            return "" if total >= PARALLEL_WORK else None
        return f" if ({' + '.join([*texts, str(total)])} >= {PARALLEL_WORK})"

    def loop_head(self, axis: Axis, start: str = "0", end: str | None = None) -> str:
        """Write the head of an axis's loop from ``start`` to ``end``; by default over its whole extent."""
        name = self.space.name(axis)
        return f"for (int64_t {name} = {start}; {name} < {self.space.extent(axis) if end is None else end}; ++{name})"

    def keep_loop(self, iterations: int | None) -> None:
        """Keep the compiler from unrolling a loop over elements that are written.

        Written at once, these are stored as one vector. GCC 12 then takes the mask of the first vector of elements that
        are read where a condition holds for that of all of them.
        """
        if iterations is not None and iterations <= _MOST_PEELED and self.space.schedule.conditional:
            self.code.put("#pragma GCC unroll 1")

    @contextmanager
    def loops(self, axes: Sequence[Axis], written: bool = False) -> Iterator[None]:
        """Write loops over axes, the first one outermost, around the lines that the block writes.

        ``written`` is whether the axes are those of elements that are written, rather than reduced.
        """
        for axis in axes:
            if written:
                self.keep_loop(self.space.extent(axis).constant)
            if self.space.is_blocked(axis):
                self.code.put(self.loop_head(axis, self.space.block_start, f"e{self.space.block_start}") + " {")
            else:
                self.code.put(self.loop_head(axis) + " {")
            self.code.depth += 1
        yield
        for _ in axes:
            self.code.depth -= 1
            self.code.put("}")

    def put_end(self, start: str, extent: Size, length: int) -> None:
        """Declare the end of a block of ``length`` that begins at ``start``."""
        self.code.put(f"const int64_t e{start} = {start} + {length} < {extent} ? {start} + {length} : {extent};")

    @contextmanager
    def simd(self, axis: Axis, start: str, end: str) -> Iterator[None]:
        """Write an innermost loop with independent iterations."""
        self.code.put("#pragma GCC ivdep")
        first, stop = self.space.ranges.get(axis, (0, self.space.extent(axis).constant))
        self.keep_loop(None if stop is None else stop - first)
        with self.code.braces(self.loop_head(axis, start, end)):
            yield

    def store(self, nest: Nest, half: str | None = None) -> None:
        """Store a nest's value in its target, or in ``half``, a float to be rounded later."""
        shared = self.expressions.name_shared(nest.value)
        target = self.expressions.place(nest.target, [Index.of(axis) for axis in nest.axes])
        value = self.expressions.stored(nest)
        if self.expressions.is_copy(nest):
            self.code.put(f"{target} = {self.expressions.place(value.buffer, value.indices)};")
        elif half is None:
            self.code.put(f"{target} = hd::To<{TYPES[nest.target.dtype]}>::from({self.expressions.term(value)});")
        else:
            self.code.put(f"{half} = (float){self.expressions.term(value)};")
        for term in shared:
            del self.expressions.results[term]

    def element_wise(self, nest: Nest, inner: list[Axis]) -> None:
        """Write the loops of a nest without reductions."""
        if not inner:
            self.store(nest)
            return
        if self.space.across is not None:
            self.tiles(nest, self.space.across, inner[-1])
            return
        with self.loops(inner[:-1], written=True):
            self.vector_loop(nest, inner[-1])

    def tiles(self, nest: Nest, across: Axis, last: Axis) -> None:
        """Write loops in tiles, so that every cache line that is read is used several times."""
        starts = {axis: f"b{next(self.code.fresh)}" for axis in (across, last)}
        condition = self.parallel_condition()
        if condition is not None and not any(self.space.extent(axis) != ONE for axis in self.space.schedule.outer):
            self.code.put(f"#pragma omp parallel for schedule(static){condition}")
        for axis, start in starts.items():
            self.code.put(f"for (int64_t {start} = 0; {start} < {self.space.extent(axis)}; {start} += {_TILE}) {{")
            self.code.depth += 1
            self.put_end(start, self.space.extent(axis), _TILE)
        for axis, start in starts.items():
            self.keep_loop(_TILE)
            self.code.put(self.loop_head(axis, start, f"e{start}") + " {")
            self.code.depth += 1
        self.store(nest)
        for _ in range(4):
            self.code.depth -= 1
            self.code.put("}")

    def vector_loop(self, nest: Nest, axis: Axis) -> None:
        """Write the innermost loop, in pieces within which the conditions on its axis are constant."""
        if self.space.is_blocked(axis):
            self.run(nest, axis, self.space.block_start, f"e{self.space.block_start}")
            return
        for start, end in self.pieces(nest.value, axis):
            if start is not None and end is not None:
                self.space.ranges[axis] = (start, end)
            self.run(nest, axis, str(start or 0), str(self.space.extent(axis) if end is None else end))
            self.space.ranges.pop(axis, None)

    def pieces(self, value: Term, axis: Axis) -> list[tuple[int | None, int | None]]:
        """Cut an axis into ranges in which each condition on it is constant; ``[(None, None)]`` for one whole range."""
        extent = self.space.extent(axis).constant
        if extent is None or axis in self.space.merged or self.space.extents.get(axis, axis.extent) != axis.extent:
            return [(None, None)]
        cuts = {0, extent}
        for term in walk(value):
            if not isinstance(term, Compare):
                continue
            difference = term.left - term.right
            step = difference.step(axis)
            fixed = difference - Index.of(axis).times(step) if step is not None else None
            offset = None if fixed is None else fixed.within(self.space.ranges)
            if step is None or step.constant in (None, 0) or offset is None or offset[0] != offset[1]:
                continue
            # step * i + offset changes its sign at this point.
            change = -(offset[0] // step.number) if step.number > 0 else offset[0] // -step.number
            cuts |= {cut for cut in (change, change + 1) if 0 < cut < extent}
        ends = sorted(cuts)
        if not 2 <= len(ends) <= _MOST_PIECES + 1:
            return [(None, None)]
        pieces = list(itertools.pairwise(ends))
        return self.joined(value, axis, pieces)

    def joined(self, value: Term, axis: Axis, pieces: list[tuple[int, int]]) -> list[tuple[int | None, int | None]]:
        """Join neighbouring pieces in which all conditions are the same."""
        result: list[tuple[int | None, int | None]] = []
        before: list[bool | None] | None = None
        for start, end in pieces:
            self.space.ranges[axis] = (start, end)
            now = [self.expressions.known(term) for term in walk(value) if isinstance(term, Compare)]
            if result and now == before:
                result[-1] = (result[-1][0], end)
            else:
                result.append((start, end))
            before = now
        del self.space.ranges[axis]
        return result

    def run(self, nest: Nest, axis: Axis, start: str, end: str) -> None:
        """Write the loop that computes and stores a nest's values; half-precision elements are converted in runs."""
        stored = nest.target.dtype == "float16" and self.expressions.is_contiguous(
            nest.target, [*map(Index.of, nest.axes)], axis
        )
        begin_end = self.space.ranges.get(axis)
        length = self.space.extent(axis).constant if begin_end is None else begin_end[1] - begin_end[0]
        short = length is not None and length < _SHORTEST_RUN
        if short or self.expressions.is_copy(nest) or not (stored or self.halves(self.expressions.stored(nest), axis)):
            with self.simd(axis, start, end):
                self.store(nest)
            return
        if self.converts(nest, axis):
            load = self.expressions.stored(nest)
            source = self.expressions.place_at(load.buffer, load.indices, axis, start)
            target = self.expressions.place_at(nest.target, [Index.of(each) for each in nest.axes], axis, start)
            self.code.put(f"hd::{'store' if stored else 'load'}_run(&{source}, {end} - {start}, &{target});")
            return
        first, number = f"b{next(self.code.fresh)}", f"n{next(self.code.fresh)}_"
        with self.code.braces(f"for (int64_t {first} = {start}; {first} < {end}; {first} += {_RUN})"):
            self.code.put(f"const int64_t {number} = {end} - {first} < {_RUN} ? {end} - {first} : {_RUN};")
            with self.converted(nest.value, axis, first, number):
                result = f"h{next(self.code.fresh)}"
                if stored:
                    self.code.put(f"alignas(64) float {result}[{_RUN}];")
                with self.simd(axis, first, f"{first} + {number}"):
                    self.store(nest, f"{result}[{self.space.name(axis)} - {first}]" if stored else None)
            if stored:
                place = self.expressions.place_at(nest.target, [Index.of(each) for each in nest.axes], axis, first)
                self.code.put(f"hd::store_run({result}, {number}, &{place});")

    def converts(self, nest: Nest, axis: Axis) -> bool:
        """Whether a loop only converts contiguous half-precision elements to contiguous floats, or the reverse."""
        value = self.expressions.stored(nest)
        kinds = {"float16", "float32"}
        return (
            isinstance(value, Load)
            and {value.buffer.dtype, nest.target.dtype} == kinds
            and self.expressions.is_contiguous(value.buffer, value.indices, axis)
            and self.expressions.is_contiguous(nest.target, [Index.of(each) for each in nest.axes], axis)
        )

    def halves(self, value: Term, axis: Axis) -> list[Load]:
        """List the half-precision loads that a value always needs and that are contiguous along an axis."""
        loads = [
            term for term in self.expressions.always(value) if isinstance(term, Load) and term.buffer.dtype == "float16"
        ]
        return [load for load in loads if self.expressions.is_contiguous(load.buffer, load.indices, axis)]

    @contextmanager
    def converted(self, value: Term, axis: Axis, first: str, number: str) -> Iterator[None]:
        """Convert a value's half-precision loads to floats, ``number`` elements of an axis from ``first`` on."""
        loads = self.halves(value, axis)  # without those that are already loaded
        variable = self.space.name(axis)
        places: dict[str, str] = {}
        for load in loads:
            place = self.expressions.place_at(load.buffer, load.indices, axis, first)
            if place not in places:
                places[place] = f"h{next(self.code.fresh)}"
                self.code.put(f"alignas(64) float {places[place]}[{_RUN}];")
                self.code.put(f"hd::load_run(&{place}, {number}, {places[place]});")
            self.expressions.results[load] = f"{places[place]}[{variable} - {first}]"
        yield
        for load in loads:
            del self.expressions.results[load]
