"""The C++ function of a schedule."""

from __future__ import annotations

from hidet_dist.compile.cpu.kernels.arrangement import arrange_elements, coalesce
from hidet_dist.compile.cpu.kernels.code import Code
from hidet_dist.compile.cpu.kernels.expressions import Expressions
from hidet_dist.compile.cpu.kernels.index import ONE, Size
from hidet_dist.compile.cpu.kernels.loops import Loops
from hidet_dist.compile.cpu.kernels.reductions import Reductions
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, KEPT_BYTES, LoopSchedule, Nest
from hidet_dist.compile.cpu.kernels.space import LoopSpace
from hidet_dist.compile.cpu.kernels.terms import TYPES


def kernel_text(schedule: LoopSchedule, name: str) -> str:
    """Write a function ``name``; its arguments are the addresses of inputs and output, then the variable sizes."""
    return _Writer(schedule).function(name)


class _Writer:
    """Writes the function: its buffers, then its nests in order."""

    def __init__(self, schedule: LoopSchedule):
        self.code = Code()
        self.space = LoopSpace(schedule, self.code)
        self.expressions = Expressions(self.space, self.code)
        self.loops = Loops(self.space, self.code, self.expressions)
        self.reductions = Reductions(self.space, self.code, self.expressions, self.loops)

    def function(self, name: str) -> str:
        schedule = self.space.schedule
        output = schedule.nests[-1]
        parameters = [f"const {TYPES[b.dtype]} *__restrict__ {self.expressions.buffers[b]}" for b in schedule.inputs]
        parameters.append(f"{TYPES[output.target.dtype]} *__restrict__ y")
        parameters += [f"const int64_t {symbol}" for symbol in schedule.symbols]
        coalesce(self.space)
        if len(schedule.nests) == 1 and not output.reductions():
            arrange_elements(self.space, output)
        self.code.put(f"static __attribute__((noinline)) void {name}({', '.join(parameters)}) {{")
        self.code.depth += 1
        with self.loops.outer_loops():
            for number, nest in enumerate(schedule.nests):
                if nest is not output:
                    self.declare(nest, f"r{number}")
                self.nest(nest)
        self.code.depth -= 1
        self.code.put("}")
        return "\n".join(self.code.lines) + "\n"

    def declare(self, nest: Nest, name: str) -> None:
        """Declare the buffer of a nest's kept values."""
        self.expressions.buffers[nest.target] = name
        ctype = TYPES[nest.target.dtype]
        size = ONE
        inner = self.space.schedule.inner(nest)
        for axis in inner:
            size = size * (Size(BLOCK) if self.space.is_blocked(axis) else axis.extent)
        if not inner:
            self.code.put(f"{ctype} {name};")
        elif size.constant is not None and size.constant * 8 <= KEPT_BYTES:
            self.code.put(f"alignas(64) {ctype} {name}[{size.constant}];")
        else:
            self.code.put(f"std::unique_ptr<{ctype}[]> {name}_(new {ctype}[{size}]);")
            self.code.put(f"{ctype} *__restrict__ {name} = {name}_.get();")

    def nest(self, nest: Nest) -> None:
        inner = [axis for axis in self.space.schedule.inner(nest) if axis not in self.space.merged]
        for axis in inner:
            if self.space.extent(axis) == ONE and not self.space.is_blocked(axis):
                self.space.names[self.space.schedule.same.get(axis) or axis] = "0"
        inner = [axis for axis in inner if self.space.extent(axis) != ONE or self.space.is_blocked(axis)]
        reductions = nest.reductions()
        if not reductions:
            self.loops.element_wise(nest, inner)
            return
        column = self.reductions.column(reductions, inner)
        rest = [axis for axis in inner if axis is not column]
        with self.loops.loops(rest, written=True):
            if column is None:
                for reduction in reductions:
                    self.reductions.row_reduction(reduction)
                self.loops.store(nest)
            else:
                self.reductions.columns(nest, reductions, column)
