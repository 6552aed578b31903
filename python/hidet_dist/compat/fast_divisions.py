"""hidet 0.6.1 makes divisions by a symbolic size faster in one kernel, and breaks modules that have several kernels.

A division by a size is replaced by a multiplication with numbers that depend on it. They are computed in the launch
functions, and become parameters of the kernel that is launched last; but all launches pass them, so that those of other
kernels have too many arguments, and do not compile. Modules with several kernels keep their divisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hidet.ir.module import IRModule
from hidet.transforms.convert_div_to_fastintdiv import ConvertDivToFastIntDivPass

from hidet_dist.compat.replacing import replaced


@contextmanager
def fast_divisions() -> Iterator[None]:
    """While the block runs, divisions are made faster in modules of one kernel only."""
    convert = ConvertDivToFastIntDivPass.process_module

    def process_module(self: ConvertDivToFastIntDivPass, ir_module: IRModule) -> IRModule:
        kernels = [function for function in ir_module.functions.values() if function.kind == "cuda_kernel"]
        return ir_module if len(kernels) > 1 else convert(self, ir_module)

    with replaced(ConvertDivToFastIntDivPass, {"process_module": process_module}):
        yield
