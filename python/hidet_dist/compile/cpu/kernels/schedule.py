"""Schedules: the loop nests of a computation, the values kept between them, and the loop around all of them.

A computation is a chain of definitions: of a softmax, the maximum of each row, the exponentials, their sum and the
quotients. The values of definitions with a reduction, and of costly ones that are read more than once, are kept in
buffers; all others are computed where they are read. The loops that all kept definitions have in common are the
outermost, so that a buffer holds a number or a row, and stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hidet.ir import expr as ir
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput, TensorNode
from hidet.ir.expr import Expr
from hidet.ir.tools import collect

from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Size, SplitNeeded
from hidet_dist.compile.cpu.kernels.lowering import Lowering, Types, UnsupportedComputationError, shape_of
from hidet_dist.compile.cpu.kernels.terms import (
    SHORT_FLOATS,
    AnyReduction,
    ArgReduction,
    KernelBuffer,
    Load,
    Operation,
    Reduction,
    Term,
    free_axes,
    is_costly,
    reads_conditionally,
    walk,
)

_MOST_SPLITS = 64
KEPT_BYTES = 2**18  # limit of the buffers: half of a core's second-level cache of 512 KiB
BLOCK = 256  # columns that are reduced at a time
COSTLY_WORK = 16  # work of an elementary function, in additions
USUAL_SIZE = 64  # assumed size of a symbolic dim
_SHORTEST_LANE = 8  # a shorter loop is not worth lanes


@dataclass(frozen=True, eq=False)
class Nest:
    """A definition as loops over ``axes``, which write ``value`` to the element of ``target`` at these axes."""

    target: KernelBuffer
    axes: tuple[Axis, ...]
    value: Term

    def reductions(self) -> list[AnyReduction]:
        """The reductions in the value, in the order in which they are computed."""
        return [term for term in reversed(walk(self.value)) if isinstance(term, Reduction | ArgReduction)]


@dataclass
class LoopSchedule:
    """A computation as nests of loops, the last of which writes the output.

    Attributes
    ----------
    inputs, nests: the buffers that are read, and the loop nests in execution order.
    outer: the loops around all nests, of the last nest's axes.
    block: the axis of the last nest whose blocks are a loop around all nests, if any.
    same: for each axis of the other nests, the axis of the last nest that it aliases; None if there is none.
    symbols: the variables of sizes.
    """

    inputs: list[KernelBuffer]
    nests: list[Nest]
    outer: list[Axis]
    block: Axis | None
    same: dict[Axis, Axis | None]
    symbols: dict[str, Expr]

    @cached_property
    def conditional(self) -> bool:
        """Whether an element is read only where a condition holds."""
        return any(reads_conditionally(nest.value) for nest in self.nests)

    def inner(self, nest: Nest) -> list[Axis]:
        """List the axes of a nest that have loops within the outer loops."""
        return [axis for axis in nest.axes if self.same.get(axis) not in self.outer]

    def kept_bytes(self) -> int | None:
        """The bytes of the buffers; None if they depend on symbolic sizes."""
        total = 0
        for nest in self.nests[:-1]:
            number = 1
            for axis in self.inner(nest):
                extent = BLOCK if self.same[axis] is self.block and self.block is not None else axis.extent.constant
                if extent is None:
                    return None
                number *= extent
            total += 8 * number
        return total


def schedule(inputs: Sequence[TensorInput], output: TensorNode, types: Types) -> LoopSchedule:
    """Schedule a computation; ``types`` caches the types of expressions that several computations share.

    Raises
    ------
    UnsupportedComputationError
        When the kernels do not support it.
    """
    if not isinstance(output, GridCompute):
        raise UnsupportedComputationError("an output that is not computed")
    grids = _grids(output)
    reduced = [grid for grid in grids[:-1] if _has_reduction(grid)]
    twice = _read_twice(grids)
    if reduced or _has_reduction(output):
        # Values that several loops read are computed once if they are rows, but not if they are the whole tensor.
        kept = [grid for grid in grids[:-1] if grid in reduced or grid in twice]
        arranged = _arranged(inputs, [*kept, output], types)
        if len(kept) == len(reduced) or (arranged.outer and (arranged.kept_bytes() or 0) <= KEPT_BYTES):
            return arranged
    return _arranged(inputs, [*reduced, output], types)


def _grids(output: GridCompute) -> list[GridCompute]:
    """List all definitions that an output depends on, each after those that it reads; the output is last."""
    order: dict[int, GridCompute] = {}

    def visit(grid: GridCompute) -> None:
        for read in collect(grid.value, GridCompute, stop_when_found=True):
            if id(read) not in order:
                visit(read)
        order[id(grid)] = grid

    visit(output)
    return list(order.values())


def _has_reduction(grid: GridCompute) -> bool:
    reductions = collect(grid.value, (ReduceCompute, ArgReduceCompute, GridCompute), stop_when_found=True)
    return any(isinstance(node, ReduceCompute | ArgReduceCompute) for node in reductions)


def _read_twice(grids: Sequence[GridCompute]) -> list[GridCompute]:
    """List definitions without a reduction that compute something and are read in more than one loop."""
    reads = [{id(x) for x in collect(grid.value, GridCompute, stop_when_found=True)} for grid in grids]
    reduces = [_has_reduction(grid) for grid in grids]
    loops = [0] * len(grids)
    for number in reversed(range(len(grids))):
        loops[number] = sum(
            1 if reader == len(grids) - 1 or reduces[reader] or _computes(grids[reader]) else loops[reader]
            for reader in range(len(grids))
            if reader != number and id(grids[number]) in reads[reader]
        )
    return [
        grid for number, grid in enumerate(grids[:-1]) if loops[number] > 1 and _computes(grid) and not reduces[number]
    ]


def _computes(grid: GridCompute) -> bool:
    return not isinstance(grid.value, ir.TensorElement)


def work(arranged: LoopSchedule) -> int:
    """Count the additions and reads of a schedule: each term once per iteration of the loops that it depends on."""
    total = 0
    for nest in arranged.nests:
        total += math.prod(_length(axis) for axis in nest.axes)
        for term in dict.fromkeys(walk(nest.value)):
            if isinstance(term, Load | Operation):
                times = math.prod(_length(axis) for axis in free_axes(term))
                total += times * (COSTLY_WORK if is_costly(term) else 1)
    return total


def _length(axis: Axis) -> int:
    return axis.extent.number * USUAL_SIZE ** len(axis.extent.symbols)


def _arranged(inputs: Sequence[TensorInput], kept: Sequence[GridCompute], types: Types) -> LoopSchedule:
    splits: dict[Any, list[Size]] = {}
    for _ in range(_MOST_SPLITS):
        symbols: dict[str, Expr] = {}
        lowering = Lowering({}, splits, symbols, types)
        try:
            buffers, nests = _lowered(lowering, inputs, kept)
        except SplitNeeded as needed:
            key, stride = lowering.origin[needed.axis]
            _add(splits, key, stride * needed.factor)
            continue
        wanted = _splits_of_reads(nests, kept)
        added = [_add(splits, key, stride) for key, stride in wanted]
        if not any(added):
            return _with_rows(buffers, nests, symbols)
    raise UnsupportedComputationError("a computation whose loops are split without an end")


def _add(splits: dict[Any, list[Size]], key: Any, stride: Size) -> bool:
    """Record a split; return whether it is new."""
    strides = splits.setdefault(key, [])
    if stride in strides:
        return False
    strides.append(stride)
    strides.sort(key=lambda size: (len(size.symbols), size.number, size.symbols))
    return True


def _lowered(
    lowering: Lowering, inputs: Sequence[TensorInput], kept: Sequence[GridCompute]
) -> tuple[list[KernelBuffer], list[Nest]]:
    buffers: dict[TensorNode, KernelBuffer] = {}
    for tensor in inputs:
        if tensor.type.layout is not None and not _is_row_major(tensor):
            raise UnsupportedComputationError("a tensor with a layout of its own")
        buffers[tensor] = KernelBuffer(tensor.type.dtype.name, tuple(lowering.size(n) for n in tensor.shape), tensor)
    read = list(buffers.values())
    lowering.buffers = buffers
    nests: list[Nest] = []
    for grid in kept:
        if grid.layout is not None:
            raise UnsupportedComputationError("a definition with a layout of its own")
        scope: dict[Any, Index] = {}
        axes: list[Axis] = []
        for dim, (axis, extent) in enumerate(zip(grid.axes, shape_of(grid), strict=True)):
            scope[axis], split = lowering.axis((id(grid), -1, dim), extent)
            axes += split
        value = lowering.term(grid.value, scope)
        dtype = lowering.types(grid.value).name
        if dtype in SHORT_FLOATS and grid is not kept[-1]:
            dtype = "float32"  # only the output is rounded
        target = KernelBuffer(dtype, tuple(axis.extent for axis in axes), grid)
        buffers[grid] = target
        nests.append(Nest(target, tuple(axes), value))
        if any(isinstance(x, Reduction | ArgReduction) for r in nests[-1].reductions() for x in walk(r.value)):
            raise UnsupportedComputationError("a reduction of reductions")
    return read, nests


def _is_row_major(tensor: TensorInput) -> bool:
    layout = tensor.type.layout
    return type(layout).__name__ == "RowMajorLayout" or (
        hasattr(layout, "strides") and list(map(str, layout.strides)) == list(map(str, _row_major(tensor)))
    )


def _row_major(tensor: TensorInput) -> list[Any]:
    strides: list[Any] = []
    stride: Any = 1
    for extent in reversed(tensor.shape):
        strides.insert(0, stride)
        stride = stride * extent
    return strides


def loads_of(nest: Nest) -> list[Load]:
    """List the loads of a nest."""
    return [term for term in walk(nest.value) if isinstance(term, Load)]


def _splits_of_reads(nests: Sequence[Nest], kept: Sequence[GridCompute]) -> list[tuple[Any, Size]]:
    """Find the splits of kept dims with which readers' indices are single axes."""
    wanted: list[tuple[Any, Size]] = []
    for nest in nests:
        for load in loads_of(nest):
            if load.buffer.node not in kept:
                continue
            grid = load.buffer.node
            if len(load.indices) != len(grid.axes):
                continue  # split already
            for dim, index in enumerate(load.indices):
                steps = [
                    Size(value, symbols) for (atom, symbols), value in index.terms.items() if isinstance(atom, Axis)
                ]
                if len(steps) == len(index.terms) > 1:
                    wanted += [((id(grid), -1, dim), step) for step in steps if step != ONE]
    return wanted


def _with_rows(inputs: list[KernelBuffer], nests: list[Nest], symbols: dict[str, Expr]) -> LoopSchedule:
    output = nests[-1]
    same: dict[Axis, Axis | None] = {axis: axis for axis in output.axes}
    for nest in reversed(nests[:-1]):
        reads = [load for reader in nests for load in loads_of(reader) if load.buffer is nest.target]
        for dim, axis in enumerate(nest.axes):
            rows = {_row_axis(load.indices[dim], same) for load in reads}
            same[axis] = rows.pop() if len(rows) == 1 else None
    outer = [
        axis for axis in output.axes if all([same[each] for each in nest.axes].count(axis) == 1 for nest in nests[:-1])
    ]
    result = LoopSchedule(inputs, nests, outer, None, same, symbols)
    block = _column_axis(result)
    if block is None and len(nests) == 1 and not output.reductions():
        result.outer = outer[:-1]  # without reductions, the last loop runs along the output's contiguous dim
    elif block is not None and block in result.outer:
        result.outer.remove(block)
        result.block = block
    return result


def _row_axis(index: Index, same: dict[Axis, Axis | None]) -> Axis | None:
    axis = index.lone_axis()
    return None if axis is None else same.get(axis)


def lane_axis(reduction: AnyReduction, candidates: Sequence[Axis]) -> Axis | None:
    """Choose the axis to vectorise a reduction over: a reduced one, one of ``candidates`` around it, or none."""
    loads = [term for term in walk(reduction.value) if isinstance(term, Load)]
    if isinstance(reduction, ArgReduction):
        return reduction.axes[-1]
    long_axes = [axis for axis in reduction.axes if (axis.extent.constant or _SHORTEST_LANE) >= _SHORTEST_LANE]
    if not long_axes and len(reduction.axes) > 1 and _one_run(loads, *reduction.axes[-2:]):
        long_axes = [reduction.axes[-1]]
    best, best_score = None, 0.0
    for number, axis in enumerate([*long_axes, *candidates]):
        score = sum(_preference(load.buffer.flat(load.indices).step(axis)) for load in loads) + (
            0.01 if axis in long_axes else 0
        )
        if best is None or score >= best_score + (0 if number and axis in long_axes else 1e-9):
            best, best_score = axis, score
    return best


def _one_run(loads: Sequence[Load], first: Axis, second: Axis) -> bool:
    """Whether two short axes are contiguous in memory together."""
    for load in loads:
        place = load.buffer.flat(load.indices)
        steps = place.step(first), place.step(second)
        if steps[0] is None or steps[1] is None or steps[0] != steps[1] * second.extent:
            return False
    return True


def _preference(step: Size | None) -> float:
    if step is None or step.constant is None:
        return -1.0
    number = abs(step.constant)
    return 0.0 if number == 0 else 1.0 if number == 1 else -1.0 + 1.0 / number


def _column_axis(result: LoopSchedule) -> Axis | None:
    """Find the outer axis along which reads are contiguous while the reduced axes are not: columns are reduced."""
    for nest in result.nests:
        around = [axis for axis in nest.axes if axis.extent != ONE]
        for reduction in nest.reductions():
            axis = lane_axis(reduction, around)
            if axis in around and result.same[axis] is not None:
                return result.same[axis]
    return None
