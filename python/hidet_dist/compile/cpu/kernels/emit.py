"""A schedule as C++."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Opaque, Size
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, COSTLY_WORK, KEPT_BYTES, Nest, Schedule, lane_axis, loads_of
from hidet_dist.compile.cpu.kernels.terms import (
    TYPES,
    Apply,
    ArgReduction,
    Buffer,
    Choice,
    Compare,
    Load,
    Reduction,
    Value,
    axes_of,
    parts,
    reduced_axes,
    rounded,
    walk,
)

LANES = 32  # that a row is reduced in
_FEW_LANES = 16  # for rows that are not much longer than that
_SHORT_ROW = 4 * LANES
_RUN = BLOCK  # halves that are converted at a time
_SHORTEST_RUN = 8
_TILE = 16  # rows and columns that are transposed at a time: 16 cache lines of floats on either side
_PARALLEL_WORK = 2**15  # elements: some ten microseconds, more than it takes to wake a thread and wait for it
_CHUNK = 4096  # elements of one long loop that a thread takes at a time
_MOST_UNROLLED = 32
_MOST_PIECES = 8


def kernel_text(schedule: Schedule, name: str) -> str:
    """A function ``name`` of the addresses of the inputs and of the output, then of the sizes that are variables."""
    return _Writer(schedule).function(name)


class _Writer:
    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[Axis, str] = {}
        self.extents: dict[Axis, Size] = {}
        self.ranges: dict[Axis, tuple[int, int]] = {}
        self.buffers: dict[Buffer, str] = {buffer: f"x{n}" for n, buffer in enumerate(schedule.inputs)}
        self.results: dict[Any, str] = {}  # reductions and shared terms, by what they are called
        self.fresh = itertools.count()
        self.block_start = "0"
        self.chunk = BLOCK
        self.across: Axis | None = None  # the loop that runs in tiles with the last one
        self.merged: set[Axis] = set()  # loops that the next one within them runs over as well

    # Text

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        self.put(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    def named(self, axis: Axis) -> Axis:
        """The axis whose name an axis has."""
        return self.schedule.same.get(axis) or axis

    def name(self, axis: Axis) -> str:
        axis = self.named(axis)
        if axis not in self.names:
            self.names[axis] = f"i{next(self.fresh)}"
        return self.names[axis]

    def extent(self, axis: Axis) -> Size:
        origin = self.schedule.same.get(axis)
        return self.extents.get(axis, self.extents.get(origin, axis.extent) if origin is not None else axis.extent)

    def index(self, index: Index) -> str:
        texts: list[str] = []
        for (atom, symbols), value in index.terms.items():
            factors = [] if value == 1 and (symbols or atom is not None) else [f"INT64_C({value})"]
            factors += symbols
            if isinstance(atom, Axis):
                own = self.name(atom)
                if own == "0":
                    continue
                factors.append(own)
            elif isinstance(atom, Opaque):
                factors.append(f"(int64_t){self.term(atom.term)}")
            texts.append(" * ".join(factors))
        return " + ".join(texts) or "0"

    # Terms

    def term(self, term: Any) -> str:
        if term in self.results:
            return self.results[term]
        if isinstance(term, Load):
            return self.load(term)
        if isinstance(term, Value):
            return f"(({term.ctype})({self.index(term.index)}))"
        if isinstance(term, Apply):
            return term.text.format(*(self.term(argument) for argument in term.arguments))
        if isinstance(term, Compare):
            known = self.known(term)
            if known is not None:
                return "true" if known else "false"
            return f"(({self.index(term.left)}) {term.operator} ({self.index(term.right)}))"
        if isinstance(term, Choice):
            known = self.known(term.condition)
            if known is not None:
                return self.term(term.then if known else term.other)
            return f"({self.term(term.condition)} ? {self.term(term.then)} : {self.term(term.other)})"
        raise AssertionError(f"{type(term).__name__} outside of its loop")

    def known(self, condition: Any) -> bool | None:
        """Whether a condition holds in all of the ranges that the axes have here."""
        if isinstance(condition, Compare):
            found = (condition.left - condition.right).within(self.ranges)
            if found is None:
                return None
            low, high = found
            outcomes = {
                "<": (high < 0, low >= 0),
                "<=": (high <= 0, low > 0),
                "==": (low == high == 0, low > 0 or high < 0),
                "!=": (low > 0 or high < 0, low == high == 0),
            }[condition.operator]
            return True if outcomes[0] else False if outcomes[1] else None
        if isinstance(condition, Apply) and condition.text in ("({} && {})", "({} || {})", "(!{})"):
            values = [self.known(argument) for argument in condition.arguments]
            if condition.text == "(!{})":
                return None if values[0] is None else not values[0]
            decisive = condition.text == "({} || {})"
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        return None

    def load(self, load: Load) -> str:
        return f"hd::load({self.place(load.buffer, load.indices)})"

    def place(self, buffer: Buffer, indices: Sequence[Index]) -> str:
        nest = next((n for n in self.schedule.nests[:-1] if n.target is buffer), None)
        if nest is None:
            name = self.buffers.get(buffer, "y")
            return f"{name}[{self.index(buffer.flat(indices))}]"
        inner = self.schedule.inner(nest)
        if not inner:
            return self.buffers[buffer]
        place, stride = "", ONE
        for axis, index in zip(reversed(nest.axes), reversed(indices), strict=True):
            if axis not in inner:
                continue
            blocked = self.is_blocked(axis)
            own = f"({self.index(index)}{f' - {self.block_start}' if blocked else ''}) * ({stride})"
            place = f"{own} + {place}" if place else own
            stride = stride * (Size(BLOCK) if blocked else axis.extent)
        return f"{self.buffers[buffer]}[{place}]"

    def is_blocked(self, axis: Axis) -> bool:
        return self.schedule.block is not None and self.schedule.same.get(axis) is self.schedule.block

    # The function

    def function(self, name: str) -> str:
        schedule = self.schedule
        output = schedule.nests[-1]
        parameters = [f"const {TYPES[b.dtype]} *__restrict__ {self.buffers[b]}" for b in schedule.inputs]
        parameters.append(f"{TYPES[output.target.dtype]} *__restrict__ y")
        parameters += [f"const int64_t {symbol}" for symbol in schedule.symbols]
        self.coalesce()
        if len(schedule.nests) == 1 and not output.reductions():
            self.arrange_elements(output)
        self.put(f"static __attribute__((noinline)) void {name}({', '.join(parameters)}) {{")
        self.depth += 1
        with self.outer_loops():
            for number, nest in enumerate(schedule.nests):
                if nest is not output:
                    self.declare(nest, f"r{number}")
                self.nest(nest)
        self.depth -= 1
        self.put("}")
        return "\n".join(self.lines) + "\n"

    def coalesce(self) -> None:
        """Make one loop of neighbouring ones that walk through all memory without a gap between them."""
        schedule = self.schedule
        output = schedule.nests[-1]
        if len(schedule.nests) == 1 and not output.reductions():
            groups = [list(output.axes)]
        else:
            groups = [[axis for axis in output.axes if (axis in schedule.outer) is outer] for outer in (True, False)]
        for nest in schedule.nests:
            groups += [list(reduction.axes) for reduction in nest.reductions() if isinstance(reduction, Reduction)]
        for group in groups:
            runs = group[-1:]
            for axis in reversed(group[:-1]):
                if self.mergeable(axis, runs[0]):
                    self.merge(axis, runs[0])
                else:
                    runs.insert(0, axis)

    def merge(self, first: Axis, second: Axis) -> None:
        # Indices hold a step for each of both. The outer one's is left out; the inner one goes on beyond its extent.
        self.extents[second] = self.extent(first) * self.extent(second)
        self.extents[first] = ONE
        self.names[first] = "0"
        self.merged.add(first)

    def mergeable(self, first: Axis, second: Axis) -> bool:
        schedule = self.schedule
        if schedule.block in (first, second):
            return False
        size = self.extent(second)

        def own(axis: Axis) -> tuple[Axis, ...]:
            return (axis, *(other for other, origin in schedule.same.items() if origin is axis and other is not axis))

        ones, twos = own(first), own(second)
        both = {*ones, *twos}
        for nest in schedule.nests:
            places = []
            if nest is schedule.nests[-1]:
                places.append(nest.target.flat([Index.of(axis) for axis in nest.axes]))
            elif set(schedule.inner(nest)) & both:
                return False
            for term in walk(nest.value):
                if isinstance(term, Load):
                    kept = next((n for n in schedule.nests[:-1] if n.target is term.buffer), None)
                    if kept is None:
                        places.append(term.buffer.flat(term.indices))
                        continue
                    own_loops = schedule.inner(kept)
                    for axis, index in zip(kept.axes, term.indices, strict=True):
                        if axis in own_loops and index.axes & both:
                            return False
                elif (isinstance(term, Value) and term.index.axes & both) or (
                    isinstance(term, Compare) and (term.left.axes | term.right.axes) & both
                ):
                    return False
            for place in places:
                steps = []
                for group in (ones, twos):
                    found = [place.step(axis) for axis in group]
                    if None in found:
                        return False
                    total = [step for step in found if step is not None and step.number]
                    if len(total) > 1:
                        return False
                    steps.append(total[0] if total else Size(0))
                if steps[0] != steps[1] * size:
                    return False
        return True

    def arrange_elements(self, output: Nest) -> None:
        """The loops of a nest that reduces nothing: in tiles if it transposes, in chunks if there is but one."""
        loops = [axis for axis in output.axes if self.extent(axis) != ONE]
        if not loops:
            return
        self.schedule.outer = loops[:-1]
        across = self.transposed(output, loops[-1])
        if across is not None:
            self.across = across
            self.schedule.outer.remove(across)
        elif len(loops) == 1 and (self.extent(loops[0]).constant or _PARALLEL_WORK) >= _PARALLEL_WORK // COSTLY_WORK:
            self.schedule.block = loops[0]
            self.chunk = _CHUNK

    @contextmanager
    def outer_loops(self) -> Iterator[None]:
        schedule = self.schedule
        loops = [axis for axis in schedule.outer if self.extent(axis) != ONE]
        for axis in schedule.outer:
            if axis not in loops:
                self.names[axis] = "0"
        block = schedule.block
        heads = [self.loop_head(axis) for axis in loops]
        if block is not None:
            self.block_start = f"b{next(self.fresh)}"
            heads.append(
                f"for (int64_t {self.block_start} = 0; {self.block_start} < {self.extent(block)}; "
                f"{self.block_start} += {self.chunk})"
            )
        if heads:
            condition = self.parallel_condition()
            if condition is not None:
                collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
                self.put(f"#pragma omp parallel for{collapse} schedule(static){condition}")
        for head in heads:
            self.put(head + " {")
            self.depth += 1
        if block is not None:
            self.put_end(self.block_start, self.extent(block), self.chunk)
        yield
        for _ in heads:
            self.depth -= 1
            self.put("}")

    def parallel_condition(self) -> str | None:
        """When threads are worth it; None for never."""
        texts, total = [], 0
        for nest in self.schedule.nests:
            work = ONE
            axes = {*nest.axes} | {axis for r in nest.reductions() for axis in reduced_axes(r)}
            for axis in sorted(axes, key=lambda axis: axis.number):
                work = work * axis.extent
            if any(isinstance(term, Apply) and term.costly for term in walk(nest.value)):
                work = work * Size(COSTLY_WORK)
            if work.constant is None:
                texts.append(str(work))
            else:
                total += work.constant
        if not texts:
            return "" if total >= _PARALLEL_WORK else None
        return f" if ({' + '.join([*texts, str(total)])} >= {_PARALLEL_WORK})"

    def loop_head(self, axis: Axis, start: str = "0", end: str | None = None) -> str:
        name = self.name(axis)
        return f"for (int64_t {name} = {start}; {name} < {self.extent(axis) if end is None else end}; ++{name})"

    def declare(self, nest: Nest, name: str) -> None:
        """Room for what a nest keeps."""
        self.buffers[nest.target] = name
        ctype = TYPES[nest.target.dtype]
        size = ONE
        inner = self.schedule.inner(nest)
        for axis in inner:
            size = size * (Size(BLOCK) if self.is_blocked(axis) else axis.extent)
        if not inner:
            self.put(f"{ctype} {name};")
        elif size.constant is not None and size.constant * 8 <= KEPT_BYTES:
            self.put(f"alignas(64) {ctype} {name}[{size.constant}];")
        else:
            self.put(f"std::unique_ptr<{ctype}[]> {name}_(new {ctype}[{size}]);")
            self.put(f"{ctype} *__restrict__ {name} = {name}_.get();")

    # Nests

    def nest(self, nest: Nest) -> None:
        inner = [axis for axis in self.schedule.inner(nest) if axis not in self.merged]
        for axis in inner:
            if self.extent(axis) == ONE and not self.is_blocked(axis):
                self.names[self.schedule.same.get(axis) or axis] = "0"
        inner = [axis for axis in inner if self.extent(axis) != ONE or self.is_blocked(axis)]
        reductions = nest.reductions()
        if not reductions:
            self.element_wise(nest, inner)
            return
        column = self.column(reductions, inner)
        rest = [axis for axis in inner if axis is not column]
        with self.loops(rest):
            if column is None:
                for reduction in reductions:
                    self.row_reduction(reduction)
                self.store(nest)
            else:
                self.columns(nest, reductions, column)

    def column(self, reductions: Sequence[Any], inner: list[Axis]) -> Axis | None:
        for axis in inner:
            if self.is_blocked(axis):
                return axis
        found = [lane_axis(reduction, inner) for reduction in reductions]
        return next((axis for axis in found if axis in inner), None)

    @contextmanager
    def loops(self, axes: Sequence[Axis]) -> Iterator[None]:
        for axis in axes:
            if self.is_blocked(axis):
                self.put(self.loop_head(axis, self.block_start, f"e{self.block_start}") + " {")
            else:
                self.put(self.loop_head(axis) + " {")
            self.depth += 1
        yield
        for _ in axes:
            self.depth -= 1
            self.put("}")

    def store(self, nest: Nest, half: str | None = None) -> None:
        """Write what a nest computes, or keep it in ``half``, a float that is to be rounded."""
        shared = self.name_shared(nest.value)
        target = self.place(nest.target, [Index.of(axis) for axis in nest.axes])
        value = self.stored(nest)
        if self.is_copy(nest):
            self.put(f"{target} = {self.place(value.buffer, value.indices)};")
        elif half is None:
            self.put(f"{target} = hd::To<{TYPES[nest.target.dtype]}>::from({self.term(value)});")
        else:
            self.put(f"{half} = (float){self.term(value)};")
        for term in shared:
            del self.results[term]

    @staticmethod
    def stored(nest: Nest) -> Any:
        """What a nest computes, but for a rounding that is done as it is stored."""
        value = nest.value
        is_rounded = isinstance(value, Apply) and value.text == rounded(nest.target.dtype)
        return value.arguments[0] if is_rounded else value

    def is_copy(self, nest: Nest) -> bool:
        """Whether a nest only moves what it reads."""
        return isinstance(nest.value, Load) and nest.value.buffer.dtype == nest.target.dtype

    def always(self, root: Any) -> list[Any]:
        """The terms within a term that it needs whatever its conditions turn out to be, each once."""
        return self.needed(root)[0]

    def needed(self, root: Any) -> tuple[list[Any], dict[Any, int]]:
        """The terms within a term that it always needs, and how often it holds each term."""
        counts: dict[Any, int] = {}
        always: list[Any] = []

        def visit(term: Any, needed: bool) -> None:
            counts[term] = counts.get(term, 0) + 1
            if counts[term] > 1 or term in self.results:
                return
            if isinstance(term, Choice) and self.known(term.condition) is None:
                visit(term.condition, needed)
                visit(term.then, False)
                visit(term.other, False)
            elif isinstance(term, Choice):
                visit(term.then if self.known(term.condition) else term.other, needed)
            elif isinstance(term, Apply) and term.text in ("({} && {})", "({} || {})"):
                visit(term.arguments[0], needed)
                visit(term.arguments[1], False)
            else:
                for part in parts(term):
                    visit(part, needed)
            if needed:
                always.append(term)

        visit(root, True)
        return always, counts

    def name_shared(self, root: Any) -> list[Any]:
        """Compute first what a term holds more than once and always needs."""
        always, counts = self.needed(root)
        named = []
        for term in always:
            if counts[term] > 1 and isinstance(term, Apply | Choice) and parts(term):
                name = f"t{next(self.fresh)}"
                self.put(f"const auto {name} = {self.term(term)};")
                self.results[term] = name
                named.append(term)
        return named

    def element_wise(self, nest: Nest, inner: list[Axis]) -> None:
        if not inner:
            self.store(nest)
            return
        if self.across is not None:
            self.tiles(nest, self.across, inner[-1])
            return
        with self.loops(inner[:-1]):
            self.vector_loop(nest, inner[-1])

    def transposed(self, nest: Nest, last: Axis) -> Axis | None:
        """The axis that lies together in what is read where the last axis does not."""
        for load in loads_of(nest):
            if load.buffer not in self.schedule.inputs:
                continue
            place = load.buffer.flat(load.indices)
            step = place.step(last)
            if step is None or step.constant in (0, 1):
                continue
            for axis in nest.axes:
                if axis is not last and axis not in self.merged and place.step(axis) == ONE:
                    return axis if (self.extent(axis).constant or 4) >= 4 else None
        return None

    def tiles(self, nest: Nest, across: Axis, last: Axis) -> None:
        """Loops in tiles, so that the lines that are read serve more than once."""
        starts = {axis: f"b{next(self.fresh)}" for axis in (across, last)}
        condition = self.parallel_condition()
        if condition is not None and not any(self.extent(axis) != ONE for axis in self.schedule.outer):
            self.put(f"#pragma omp parallel for schedule(static){condition}")
        for axis, start in starts.items():
            self.put(f"for (int64_t {start} = 0; {start} < {self.extent(axis)}; {start} += {_TILE}) {{")
            self.depth += 1
            self.put_end(start, self.extent(axis), _TILE)
        for axis, start in starts.items():
            self.put(self.loop_head(axis, start, f"e{start}") + " {")
            self.depth += 1
        self.store(nest)
        for _ in range(4):
            self.depth -= 1
            self.put("}")

    def put_end(self, start: str, extent: Size, length: int) -> None:
        self.put(f"const int64_t e{start} = {start} + {length} < {extent} ? {start} + {length} : {extent};")

    def vector_loop(self, nest: Nest, axis: Axis) -> None:
        """The innermost loop, in pieces within which conditions on its axis are known."""
        if self.is_blocked(axis):
            self.run(nest, axis, self.block_start, f"e{self.block_start}")
            return
        for start, end in self.pieces(nest.value, axis):
            if start is not None and end is not None:
                self.ranges[axis] = (start, end)
            self.run(nest, axis, str(start or 0), str(self.extent(axis) if end is None else end))
            self.ranges.pop(axis, None)

    def run(self, nest: Nest, axis: Axis, start: str, end: str) -> None:
        """A loop that writes what a nest computes, a run of halves at a time if there are halves."""
        stored = nest.target.dtype == "float16" and self.is_contiguous(nest.target, [*map(Index.of, nest.axes)], axis)
        length = self.extent(axis).constant if axis not in self.ranges else self.ranges[axis][1] - self.ranges[axis][0]
        short = length is not None and length < _SHORTEST_RUN
        if short or self.is_copy(nest) or not (stored or self.halves(self.stored(nest), axis)):
            with self.simd(axis, start, end):
                self.store(nest)
            return
        if self.converts(nest, axis):
            load = self.stored(nest)
            source = self.place_at(load.buffer, load.indices, axis, start)
            target = self.place_at(nest.target, [Index.of(own) for own in nest.axes], axis, start)
            self.put(f"hd::{'store' if stored else 'load'}_run(&{source}, {end} - {start}, &{target});")
            return
        first, number = f"b{next(self.fresh)}", f"n{next(self.fresh)}_"
        with self.braces(f"for (int64_t {first} = {start}; {first} < {end}; {first} += {_RUN})"):
            self.put(f"const int64_t {number} = {end} - {first} < {_RUN} ? {end} - {first} : {_RUN};")
            with self.converted(nest.value, axis, first, number):
                result = f"h{next(self.fresh)}"
                if stored:
                    self.put(f"alignas(64) float {result}[{_RUN}];")
                with self.simd(axis, first, f"{first} + {number}"):
                    self.store(nest, f"{result}[{self.name(axis)} - {first}]" if stored else None)
            if stored:
                place = self.place_at(nest.target, [Index.of(own) for own in nest.axes], axis, first)
                self.put(f"hd::store_run({result}, {number}, &{place});")

    def converts(self, nest: Nest, axis: Axis) -> bool:
        """Whether a loop does nothing but turn halves that lie together into floats that do, or floats into halves."""
        value = self.stored(nest)
        kinds = {"float16", "float32"}
        return (
            isinstance(value, Load)
            and {value.buffer.dtype, nest.target.dtype} == kinds
            and self.is_contiguous(value.buffer, value.indices, axis)
            and self.is_contiguous(nest.target, [Index.of(own) for own in nest.axes], axis)
        )

    def place_at(self, buffer: Buffer, indices: Sequence[Index], axis: Axis, place: str) -> str:
        """An element where an axis is at ``place``."""
        own = self.name(axis)
        self.names[self.named(axis)] = place
        text = self.place(buffer, indices)
        self.names[self.named(axis)] = own
        return text

    def halves(self, value: Any, axis: Axis) -> list[Load]:
        """The halves that a value is always made of and that lie together along an axis."""
        found = [term for term in self.always(value) if isinstance(term, Load) and term.buffer.dtype == "float16"]
        return [load for load in found if self.is_contiguous(load.buffer, load.indices, axis)]

    def is_contiguous(self, buffer: Buffer, indices: Sequence[Index], axis: Axis) -> bool:
        in_memory = buffer in self.schedule.inputs or buffer is self.schedule.nests[-1].target
        axes = [own for own, origin in self.schedule.same.items() if origin is axis or own is axis] or [axis]
        steps = [buffer.flat(indices).step(own) for own in axes]
        return in_memory and None not in steps and [step for step in steps if step is not None and step.number] == [ONE]

    @contextmanager
    def converted(self, value: Any, axis: Axis, first: str, number: str) -> Iterator[None]:
        """Read the halves that a value is made of, ``number`` from ``first`` on along an axis, as floats."""
        loads = self.halves(value, axis)  # not those that are read already
        own = self.name(axis)
        places: dict[str, str] = {}
        for load in loads:
            place = self.place_at(load.buffer, load.indices, axis, first)
            if place not in places:
                places[place] = f"h{next(self.fresh)}"
                self.put(f"alignas(64) float {places[place]}[{_RUN}];")
                self.put(f"hd::load_run(&{place}, {number}, {places[place]});")
            self.results[load] = f"{places[place]}[{own} - {first}]"
        yield
        for load in loads:
            del self.results[load]

    @contextmanager
    def simd(self, axis: Axis, start: str, end: str) -> Iterator[None]:
        self.put("#pragma GCC ivdep")
        with self.braces(self.loop_head(axis, start, end)):
            yield

    def pieces(self, value: Any, axis: Axis) -> list[tuple[int | None, int | None]]:
        extent = self.extent(axis).constant
        if extent is None or axis in self.merged or self.extents.get(axis, axis.extent) != axis.extent:
            return [(None, None)]
        cuts = {0, extent}
        for term in walk(value):
            if not isinstance(term, Compare):
                continue
            difference = term.left - term.right
            step = difference.step(axis)
            fixed = difference - Index.of(axis).times(step) if step is not None else None
            offset = None if fixed is None else fixed.within(self.ranges)
            if step is None or step.constant in (None, 0) or offset is None or offset[0] != offset[1]:
                continue
            # step * i + offset changes its sign here.
            change = -(offset[0] // step.number) if step.number > 0 else offset[0] // -step.number
            cuts |= {cut for cut in (change, change + 1) if 0 < cut < extent}
        ends = sorted(cuts)
        if not 2 <= len(ends) <= _MOST_PIECES + 1:
            return [(None, None)]
        pieces = list(itertools.pairwise(ends))
        return self.joined(value, axis, pieces)

    def joined(self, value: Any, axis: Axis, pieces: list[tuple[int, int]]) -> list[tuple[int | None, int | None]]:
        """Neighbouring pieces in which all conditions are as one."""
        result: list[tuple[int | None, int | None]] = []
        before: list[bool | None] | None = None
        for start, end in pieces:
            self.ranges[axis] = (start, end)
            now = [self.known(term) for term in walk(value) if isinstance(term, Compare)]
            if result and now == before:
                result[-1] = (result[-1][0], end)
            else:
                result.append((start, end))
            before = now
        del self.ranges[axis]
        return result

    # Reductions

    def row_reduction(self, reduction: Any) -> None:
        """One number, from loops over what is reduced, the innermost of them in lanes."""
        result = f"s{next(self.fresh)}"
        if isinstance(reduction, ArgReduction):
            self.place_of_extreme(reduction, result)
            return
        axes = [axis for axis in reduction.axes if axis not in self.merged and self.extent(axis) != ONE]
        for axis in reduction.axes:
            if axis not in axes and axis not in self.merged:
                self.names[axis] = "0"
        lane = lane_axis(reduction, [])
        lane = axes[-1] if axes and (lane is None or lane not in axes) else lane
        operation = f"hd::{reduction.operation}"
        lanes = lane is not None and lane in axes and reduction.ctype != "bool"
        if lanes and lane is not None and (self.extent(lane).constant or LANES) >= _FEW_LANES:
            number = _FEW_LANES if (self.extent(lane).constant or _SHORT_ROW) < _SHORT_ROW else LANES
            self.put(f"{reduction.ctype} a{result}[{number}];")
            self.put(f"hd::start<{operation}>(a{result});")
            with self.loops([axis for axis in axes if axis is not lane]):
                self.in_lanes(reduction, lane, operation, f"a{result}", number)
            self.put(f"const {reduction.ctype} {result} = hd::finish<{operation}>(a{result});")
        else:
            self.put(f"{reduction.ctype} {result} = {operation}::identity();")
            with self.loops(axes):
                shared = self.name_shared(reduction.value)
                self.put(f"{result} = {operation}::combine({result}, ({reduction.ctype}){self.term(reduction.value)});")
                for term in shared:
                    del self.results[term]
        self.results[reduction] = result

    def in_lanes(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, number: int) -> None:
        start = f"b{next(self.fresh)}"
        extent = self.extent(lane)
        whole = None if extent.constant is None else extent.constant - extent.constant % number
        self.put(f"int64_t {start} = 0;")
        condition = f"{start} + {number} <= {extent}" if whole is None else f"{start} < {whole}"
        with self.braces(f"for (; {condition}; {start} += {number})"):
            self.lane_step(reduction, lane, operation, lanes, start, str(number))
        if whole is None or whole != extent.constant:
            self.lane_step(reduction, lane, operation, lanes, start, f"{extent} - {start}")

    def lane_step(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, start: str, number: str) -> None:
        with ExitStack() as stack:
            if self.halves(reduction.value, lane):
                stack.enter_context(self.braces(""))
                stack.enter_context(self.converted(reduction.value, lane, start, number))
            self.lane_loop(reduction, lane, operation, lanes, start, number)

    def lane_loop(self, reduction: Reduction, lane: Axis, operation: str, lanes: str, start: str, number: str) -> None:
        self.put("#pragma GCC ivdep")
        with self.braces(f"for (int64_t l = 0; l < {number}; ++l)"):
            self.put(f"const int64_t {self.name(lane)} = {start} + l;")
            shared = self.name_shared(reduction.value)
            value = f"({reduction.ctype}){self.term(reduction.value)}"
            self.put(f"{lanes}[l] = {operation}::combine({lanes}[l], {value});")
            for term in shared:
                del self.results[term]

    def place_of_extreme(self, reduction: ArgReduction, result: str) -> None:
        best = f"m{result}"
        axis = reduction.axis
        self.put(f"{reduction.ctype} {best} = {reduction.ctype}();")
        self.put(f"int64_t {result} = 0;")
        with self.loops([axis]):
            self.put(f"const {reduction.ctype} v = {self.term(reduction.value)};")
            # The first NaN is the extreme, as in PyTorch.
            better = f"v {reduction.operator} {best} || (v != v && {best} == {best})"
            with self.braces(f"if ({self.name(axis)} == 0 || {better})"):
                self.put(f"{best} = v;")
                self.put(f"{result} = {self.name(axis)};")
        self.results[reduction] = result

    def columns(self, nest: Nest, reductions: Sequence[Any], column: Axis) -> None:
        """Reductions of neighbouring columns side by side, a block of them at a time."""
        blocked = self.is_blocked(column)
        start = self.block_start if blocked else f"b{next(self.fresh)}"
        extent = self.extent(column)
        if not blocked:
            self.put(f"for (int64_t {start} = 0; {start} < {extent}; {start} += {BLOCK}) {{")
            self.depth += 1
            self.put_end(start, extent, BLOCK)
        accumulators = []
        for reduction in reductions:
            accumulators.append(self.column_reduction(reduction, column, start))
        with self.simd(column, start, f"e{start}"):
            for reduction, name in zip(reductions, accumulators, strict=True):
                self.results[reduction] = f"{name}[{self.name(column)} - {start}]"
            self.store(nest)
        if not blocked:
            self.depth -= 1
            self.put("}")

    def column_reduction(self, reduction: Any, column: Axis, start: str) -> str:
        name = f"c{next(self.fresh)}"
        position = f"{self.name(column)} - {start}"
        if isinstance(reduction, ArgReduction):
            self.put(f"int64_t {name}[{BLOCK}];")
            with self.braces(self.loop_head(column, start, f"e{start}")):
                self.place_of_extreme(reduction, f"s{name}")
                self.put(f"{name}[{position}] = s{name};")
            return name
        operation = f"hd::{reduction.operation}"
        self.put(f"alignas(64) {reduction.ctype} {name}[{BLOCK}];")
        self.put(f"for (int64_t l = 0; l < e{start} - {start}; ++l) {name}[l] = {operation}::identity();")
        axes = [axis for axis in reduction.axes if axis not in self.merged and self.extent(axis) != ONE]
        for axis in reduction.axes:
            if axis not in axes and axis not in self.merged:
                self.names[axis] = "0"
        steps = 1
        for axis in axes:
            steps *= self.extent(axis).constant or _MOST_UNROLLED + 1
        guarded = any(isinstance(term, Compare) for term in walk(reduction.value))
        if guarded and steps <= _MOST_UNROLLED:
            for places in itertools.product(*(range(self.extent(axis).number) for axis in axes)):
                for axis, place in zip(axes, places, strict=True):
                    self.names[axis] = str(place)
                    self.ranges[axis] = (place, place + 1)
                self.guarded_step(reduction, column, start, name)
            for axis in axes:
                del self.ranges[axis]
        else:
            with self.loops(axes):
                self.column_step(reduction, reduction.value, column, start, f"e{start}", name)
        return name

    def guarded_step(self, reduction: Reduction, column: Axis, start: str, name: str) -> None:
        """One step of a reduction, only where a condition holds if nothing is added elsewhere."""
        value = reduction.value
        extent = self.extent(column).constant
        if not (isinstance(value, Choice) and _is_identity(value.other, reduction) and extent is not None):
            self.column_step(reduction, value, column, start, f"e{start}", name)
            return
        loose = []
        low, high = 0, extent
        for condition in _conjuncts(value.condition):
            if self.known(condition) is False:
                return
            if self.known(condition) is True:
                continue
            bounds = self.bounds(condition, column)
            if bounds is not None:
                low, high = max(low, bounds[0]), min(high, bounds[1])
            else:
                loose.append(condition)
        outside = [c for c in loose if column not in axes_of(c)]
        if len(outside) < len(loose):
            self.column_step(reduction, value, column, start, f"e{start}", name)
            return
        head = " && ".join(self.term(condition) for condition in outside) or "true"
        with self.braces(f"if ({head})"):
            first, end = f"f{next(self.fresh)}", f"g{next(self.fresh)}"
            self.put(f"const int64_t {first} = {start} > {low} ? {start} : {low};")
            self.put(f"const int64_t {end} = e{start} < {high} ? e{start} : {high};")
            self.column_step(reduction, value.then, column, first, end, name, start)

    def bounds(self, condition: Any, axis: Axis) -> tuple[int, int] | None:
        """The range of an axis in which a condition on it alone holds."""
        if not isinstance(condition, Compare) or condition.operator not in ("<", "<="):
            return None
        difference = condition.left - condition.right
        step = difference.step(axis)
        if step is None or not step.constant:
            return None
        offset = (difference - Index.of(axis).times(step)).within(self.ranges)
        if offset is None or offset[0] != offset[1] or difference.axes - {axis} - set(self.ranges):
            return None
        limit = -offset[0] - (condition.operator == "<")  # step * i <= limit
        if step.number > 0:
            return -(2**62), limit // step.number + 1
        return -(limit // -step.number), 2**62

    def column_step(
        self, reduction: Reduction, value: Any, column: Axis, first: str, end: str, name: str, base: str | None = None
    ) -> None:
        with ExitStack() as stack:
            if self.halves(value, column):
                stack.enter_context(self.braces(""))
                stack.enter_context(self.converted(value, column, first, f"{end} - {first}"))
            stack.enter_context(self.simd(column, first, end))
            shared = self.name_shared(value)
            place = f"{name}[{self.name(column)} - {base or first}]"
            self.put(f"{place} = hd::{reduction.operation}::combine({place}, ({reduction.ctype}){self.term(value)});")
            for term in shared:
                del self.results[term]


def _conjuncts(condition: Any) -> list[Any]:
    if isinstance(condition, Apply) and condition.text == "({} && {})":
        return [*_conjuncts(condition.arguments[0]), *_conjuncts(condition.arguments[1])]
    return [condition]


def _is_identity(term: Any, reduction: Reduction) -> bool:
    """Whether a term changes nothing when it is accumulated; the least number counts as nothing for a maximum."""
    if not isinstance(term, Apply) or term.arguments:
        return False
    name = reduction.operation.split("<")[0]
    literal = term.text
    if name == "Sum":
        return literal in ("((float)(0.0))", "((double)(0.0))")
    if name == "Max":
        return literal in ("((float)(-3.4028234663852886e+38))", "((float)(-INFINITY))", "((float)(-65504.0))")
    return False
