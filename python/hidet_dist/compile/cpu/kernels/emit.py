"""A schedule as a function of C++."""

from __future__ import annotations

from hidet_dist.compile.cpu.kernels.index import ONE, Size
from hidet_dist.compile.cpu.kernels.reductions import Reductions
from hidet_dist.compile.cpu.kernels.schedule import BLOCK, KEPT_BYTES, Nest, Schedule
from hidet_dist.compile.cpu.kernels.terms import TYPES


def kernel_text(schedule: Schedule, name: str) -> str:
    """A function ``name`` of the addresses of the inputs and of the output, then of the sizes that are variables."""
    return _Writer(schedule).function(name)


class _Writer(Reductions):
    """The function: what it keeps, and its nests one after the other."""

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
