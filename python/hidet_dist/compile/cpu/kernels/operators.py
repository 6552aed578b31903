"""Operators whose kernels are generated C++; they are opaque to hidet."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hidet.graph import Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.utils import input_like, tensor_input
from hidet.ir.builders import FunctionBuilder
from hidet.ir.dtypes import int64
from hidet.ir.expr import Expr, Var
from hidet.ir.module import IRModule
from hidet.ir.stmt import BlackBoxStmt
from hidet.ir.type import void_p

from hidet_dist import native
from hidet_dist.compat.native_call import UnfusedTask

_FUNCTION = "hidet_dist_kernel"
_HEADER = "hidet_dist/kernels/functions.h"


@cache
def _header() -> str:
    return (native.include_dir() / _HEADER).read_text()


@dataclass(frozen=True)
class Kernel:
    """A kernel's text: a function of the inputs, the output, and ``values``, the int64 sizes of symbolic dims."""

    name: str
    text: str
    values: tuple[Expr, ...]

    @property
    def digest(self) -> str:
        """The digest of the text and of the headers that it includes."""
        return hashlib.sha256((_header() + self.text).encode()).hexdigest()[:16]


def function_name() -> str:
    """The name of the function in a kernel's text."""
    return _FUNCTION


class KernelTask(UnfusedTask):
    """The task of a kernel operator. hidet caches kernels by task name and shapes: the name has the text's digest."""

    def __init__(self, kernel: Kernel, inputs: Sequence[Tensor], shape: Sequence[int], dtype: str):
        self.kernel = kernel
        super().__init__(
            f"{kernel.name}_{kernel.digest}",
            [input_like(x, f"x{number}") for number, x in enumerate(inputs)],
            [tensor_input("y", dtype, list(shape))],
            attributes={"is_opaque": True},
        )

    def implement_cpu(self, working_dir: str) -> IRModule:
        """Make a launch function that calls the kernel, whose text is in a separate file."""
        folder = Path(working_dir).resolve()
        (folder / "kernel.h").write_text(self.kernel.text)
        parameters = [Var(tensor.name, void_p) for tensor in (*self.inputs, *self.outputs)]
        kinds = [*(f"const {_ctype(x)} *" for x in self.inputs), f"{_ctype(self.outputs[0])} *"]
        arguments = [*(f"({kind}){{}}" for kind in kinds), *("{}" for _ in self.kernel.values)]
        with FunctionBuilder("launch", kind="public") as builder:
            builder.extend_params(parameters)
            values = [int64(value) for value in self.kernel.values]
            builder.append(BlackBoxStmt(f"{_FUNCTION}({', '.join(arguments)});", *parameters, *values))
        module = IRModule(functions={"launch": builder.func})
        module.include_headers.extend([_HEADER, "kernel.h"])
        module.include_dirs.extend([str(native.include_dir()), str(folder)])
        return module


def _ctype(tensor: object) -> str:
    from hidet_dist.compile.cpu.kernels.terms import TYPES

    return TYPES[tensor.type.dtype.name]  # type: ignore[attr-defined]


class KernelOp(OpaqueOperator):
    """An operator with one output, computed by a kernel.

    Parameters
    ----------
    inputs: Tensor
        The kernel's inputs.
    kernel: Kernel
        The kernel.
    shape, dtype
        The output's shape and dtype.
    """

    def __init__(self, *inputs: Tensor, kernel: Kernel, shape: Sequence[int], dtype: str):
        attributes = {"kernel": kernel, "shape": list(shape), "dtype": dtype}
        Operator.__init__(
            self, inputs=list(inputs), attributes=attributes, task=KernelTask(kernel, inputs, shape, dtype)
        )
        self.name = kernel.name
