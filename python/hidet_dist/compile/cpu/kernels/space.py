"""The state of a schedule's loops while they are written: names, extents, and current ranges."""

from __future__ import annotations

from hidet_dist.compile.cpu.kernels.code import Code
from hidet_dist.compile.cpu.kernels.index import Axis, Size
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, LoopSchedule


class LoopSpace:
    """The state of a schedule's loops.

    Attributes
    ----------
    schedule: the schedule.
    names, extents: the names and extents of loops, by axis of the last nest; other nests' axes alias these.
    ranges: the current range of each loop that runs over a part of its extent.
    block_start: the name of the variable at which the current block begins.
    merged: axes without a loop, over which the next inner loop runs as well.
    chunk: the number of elements in a block of the loop that runs in blocks.
    across: the loop that runs in tiles with the last one; None if there is none.
    """

    def __init__(self, schedule: LoopSchedule, code: Code):
        self.schedule = schedule
        self.code = code
        self.names: dict[Axis, str] = {}
        self.extents: dict[Axis, Size] = {}
        self.ranges: dict[Axis, tuple[int, int]] = {}
        self.block_start = "0"
        self.merged: set[Axis] = set()
        self.chunk = BLOCK
        self.across: Axis | None = None

    def named(self, axis: Axis) -> Axis:
        """The canonical axis that this one aliases."""
        return self.schedule.same.get(axis) or axis

    def name(self, axis: Axis) -> str:
        """Return the name of an axis's variable, made at its first use."""
        axis = self.named(axis)
        if axis not in self.names:
            self.names[axis] = f"i{next(self.code.fresh)}"
        return self.names[axis]

    def extent(self, axis: Axis) -> Size:
        """The extent of an axis's loop, merged axes included."""
        origin = self.schedule.same.get(axis)
        return self.extents.get(axis, self.extents.get(origin, axis.extent) if origin is not None else axis.extent)

    def is_blocked(self, axis: Axis) -> bool:
        """Whether the axis is the one that runs in blocks."""
        return self.schedule.block is not None and self.schedule.same.get(axis) is self.schedule.block
