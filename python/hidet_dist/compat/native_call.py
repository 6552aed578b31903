"""Operators whose kernel is one statement of C, opaque to hidet's fusion.

hidet 0.6.1 has opaque operators, which its fusion leaves alone, but their task holds the operator and so the graph
before it. Kernels that are built in parallel are pickled, and the graph with them: slow, and impossible once any of its
operators has been run. The task here holds the statement only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.utils import Task, TensorInput, input_like, tensor_input
from hidet.ir.builders import FunctionBuilder
from hidet.ir.dtypes import int64
from hidet.ir.expr import Expr, Var
from hidet.ir.module import IRModule
from hidet.ir.stmt import BlackBoxStmt
from hidet.ir.type import void_p


@dataclass(frozen=True)
class NativeCall:
    """A statement of C++, with ``{}`` for the address of each input and of the output, and what it needs to compile.

    ``values`` are int64 variables that the statement may use, each with its value: an int, or an expression of symbolic
    dims.
    """

    statement: str
    header: str
    include_dir: str
    library_dir: str
    library: str
    values: Mapping[str, int | Expr] = field(default_factory=dict)


class NativeCallTask(Task):
    """The task of such an operator. hidet compiles one kernel for a name and shapes, so the name says the rest."""

    def __init__(self, name: str, inputs: Sequence[TensorInput], output: TensorInput, call: NativeCall):
        self.call = call
        super().__init__(name, list(inputs), [output], attributes={"is_opaque": True})

    def allow_prologue(self) -> bool:
        """Nothing is computed while inputs are read."""
        return False

    def allow_epilogue(self) -> bool:
        """Nothing is computed while the output is written."""
        return False

    def implement_cpu(self, working_dir: str) -> IRModule:
        """A launch function with the statement in it."""
        return self._launch()

    def implement_cuda(self, working_dir: str) -> IRModule:
        """The same: a function of the host, which gets the addresses of memory of the device."""
        return self._launch()

    def _launch(self) -> IRModule:
        parameters = [Var(tensor.name, void_p) for tensor in (*self.inputs, *self.outputs)]
        with FunctionBuilder("launch", kind="public") as builder:
            builder.extend_params(parameters)
            declarations = "".join(f"const int64_t {name} = {{}}; " for name in self.call.values)
            values = [int64(value) for value in self.call.values.values()]
            builder.append(BlackBoxStmt(declarations + self.call.statement, *values, *parameters))
        module = IRModule(functions={"launch": builder.func})
        module.include_headers.append(self.call.header)
        module.include_dirs.append(self.call.include_dir)
        module.linking_dirs.append(self.call.library_dir)
        module.linking_libs.append(self.call.library)
        return module


class NativeCallOp(OpaqueOperator):
    """An operator of one output, of its first input's dtype and device, computed by a native call."""

    def __init__(
        self, name: str, inputs: dict[str, Tensor], shape: Sequence[int], call: NativeCall, attributes: dict[str, Any]
    ):
        tensors = list(inputs.values())
        output = tensor_input("result", tensors[0].dtype, list(shape))
        task = NativeCallTask(name, [input_like(x, parameter) for parameter, x in inputs.items()], output, call)
        Operator.__init__(self, inputs=tensors, attributes=attributes, task=task)
