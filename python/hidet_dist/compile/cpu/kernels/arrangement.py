"""The arrangement of a schedule's loops for memory: merged loops, tiles, and chunks for threads."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Size
from hidet_dist.compile.cpu.kernels.schedule import COSTLY_WORK, LoopSchedule, Nest, loads_of
from hidet_dist.compile.cpu.kernels.space import LoopSpace
from hidet_dist.compile.cpu.kernels.terms import Compare, Load, Reduction, Value, walk

PARALLEL_WORK = 2**15  # elements: some ten microseconds, more than it takes to wake a thread and wait for it
_CHUNK = 4096  # elements of one long loop that a thread takes at a time


def coalesce(space: LoopSpace) -> None:
    """Merge neighbouring loops that together access memory contiguously."""
    schedule = space.schedule
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
            if _mergeable(space, axis, runs[0]):
                _merge(space, axis, runs[0])
            else:
                runs.insert(0, axis)


def _merge(space: LoopSpace, first: Axis, second: Axis) -> None:
    """Let the loop over the second axis run over both axes; the first one gets no loop."""
    # Indices have a step for each axis. The outer step is dropped; the inner axis runs beyond its extent instead.
    space.extents[second] = space.extent(first) * space.extent(second)
    space.extents[first] = ONE
    space.names[first] = "0"
    space.merged.add(first)


def _mergeable(space: LoopSpace, first: Axis, second: Axis) -> bool:
    """Whether all memory accesses are contiguous along both axes, so that one loop can run over both."""
    schedule = space.schedule
    if schedule.block in (first, second):
        return False
    size = space.extent(second)

    def aliases(axis: Axis) -> tuple[Axis, ...]:
        return (axis, *(other for other, origin in schedule.same.items() if origin is axis and other is not axis))

    ones, twos = aliases(first), aliases(second)
    for nest in schedule.nests:
        places = _places(schedule, nest, {*ones, *twos})
        if places is None:
            return False
        for place in places:
            outer, inner = _step(place, ones), _step(place, twos)
            if outer is None or inner is None or outer != inner * size:
                return False
    return True


def _places(schedule: LoopSchedule, nest: Nest, axes: set[Axis]) -> list[Index] | None:
    """List the places in memory that a nest accesses; None if it uses any of these axes in another way."""
    places = []
    if nest is schedule.nests[-1]:
        places.append(nest.target.flat([Index.of(axis) for axis in nest.axes]))
    elif set(schedule.inner(nest)) & axes:
        return None
    for term in walk(nest.value):
        if isinstance(term, Load):
            kept = next((n for n in schedule.nests[:-1] if n.target is term.buffer), None)
            if kept is None:
                places.append(term.buffer.flat(term.indices))
                continue
            own_loops = schedule.inner(kept)
            for axis, index in zip(kept.axes, term.indices, strict=True):
                if axis in own_loops and index.axes & axes:
                    return None
        elif (isinstance(term, Value) and term.index.axes & axes) or (
            isinstance(term, Compare) and (term.left.axes | term.right.axes) & axes
        ):
            return None
    return places


def _step(place: Index, aliases: Sequence[Axis]) -> Size | None:
    """Return the elements that a step of an axis moves a place by; None if it is no fixed number, or no single one."""
    steps = [place.step(axis) for axis in aliases]
    if None in steps:
        return None
    moving = [step for step in steps if step is not None and step.number]
    if len(moving) > 1:
        return None
    return moving[0] if moving else Size(0)


def arrange_elements(space: LoopSpace, output: Nest) -> None:
    """Arrange the loops of a nest without reductions: in tiles if it transposes, in chunks if it has one loop."""
    loops = [axis for axis in output.axes if space.extent(axis) != ONE]
    if not loops:
        return
    space.schedule.outer = loops[:-1]
    across = _transposed(space, output, loops[-1])
    if across is not None:
        space.across = across
        space.schedule.outer.remove(across)
    elif len(loops) == 1 and (space.extent(loops[0]).constant or PARALLEL_WORK) >= PARALLEL_WORK // COSTLY_WORK:
        space.schedule.block = loops[0]
        space.chunk = _CHUNK


def _transposed(space: LoopSpace, nest: Nest, last: Axis) -> Axis | None:
    """Find the axis along which a read is contiguous, if it is not contiguous along the last axis."""
    for load in loads_of(nest):
        if load.buffer not in space.schedule.inputs:
            continue
        place = load.buffer.flat(load.indices)
        step = place.step(last)
        if step is None or step.constant in (0, 1):
            continue
        for axis in nest.axes:
            if axis is not last and axis not in space.merged and place.step(axis) == ONE:
                return axis if (space.extent(axis).constant or 4) >= 4 else None
    return None
