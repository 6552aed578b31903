"""Operators whose kernel is one C++ statement, opaque to hidet's fusion.

hidet 0.6.1 has opaque operators, which its fusion ignores, but their task references the operator and so the graph
before it. Kernels that are built in parallel are pickled with that graph, which is slow, and impossible once any of its
operators has been run. The task here holds only the statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.graph.ops.utils import Task, TensorInput, TensorNode, input_like, tensor_input
from hidet.ir.builders import FunctionBuilder
from hidet.ir.dtypes import float32, int64
from hidet.ir.expr import Expr, Var, call, cast
from hidet.ir.func import Function
from hidet.ir.module import IRModule
from hidet.ir.primitives import is_primitive_function
from hidet.ir.primitives.func import call_primitive_func, register_primitive_function
from hidet.ir.stmt import BlackBoxStmt
from hidet.ir.type import FuncType, void_p

from hidet_dist import native

STORE = "store"
"""A statement's name for the function that writes a tile of the output; see :class:`NativeCall`."""


def call_native(function: str, *arguments: Expr) -> Expr:
    """Build a call of a C++ function of float32, which a header must declare."""
    name = f"hidet_dist_{function.replace('::', '_')}_{len(arguments)}"
    if not is_primitive_function(name):
        floats = FuncType(["float32"] * len(arguments), "float32")
        register_primitive_function(name, floats, codegen_name=function)
    return call_primitive_func(name, list(arguments))


class Values:
    """The sizes in a statement: numbers are written out, expressions become variables."""

    def __init__(self) -> None:
        self.values: dict[str, int | Expr] = {}

    def __call__(self, value: int | Expr) -> str:
        """Write a size as C++."""
        if isinstance(value, int):
            return f"INT64_C({value})"
        for name, known in self.values.items():
            if known is value:
                return name
        name = f"v{len(self.values)}"
        self.values[name] = value
        return name

    def array(self, name: str, values: Sequence[int | Expr]) -> str:
        """Write the declaration of an array of sizes, with a trailing 0 so that it is not empty."""
        return f"const int64_t {name}[] = {{{{ {''.join(self(value) + ', ' for value in values)}0 }}}};"


@dataclass(frozen=True)
class NativeCall:
    """A C++ statement, and what it needs to compile.

    Attributes
    ----------
    statement: str
        The statement, with ``{}`` for the address of each input in turn and then of each output; trailing ones may be
        missing. Other braces are doubled.
    headers, include_dirs: sequence of str
        The headers to include, and their folders.
    library_dir, library: str, optional
        The library to link, and its folder.
    values: mapping of str to int or expression
        int64 variables that the statement may use, each with its value: an int, or an expression of symbolic dims.
    store: Function, optional
        Writes a tile of the output. Parameters: the float32 tile, its leading dimension, its first row, its rows, its
        first column, its columns (int64), then the output and the inputs behind the operands. The statement may call
        it as ``store(tile, ld, row, rows, column, columns)``.
    operands: int
        The number of the first inputs, which ``store`` does not read.
    """

    statement: str
    headers: tuple[str, ...]
    include_dirs: tuple[str, ...]
    library_dir: str | None = None
    library: str | None = None
    values: Mapping[str, int | Expr] = field(default_factory=dict)
    store: Function | None = None
    operands: int = 2

    @classmethod
    def of_library(
        cls, statement: str, headers: Sequence[str], values: Mapping[str, int | Expr] | None = None
    ) -> NativeCall:
        """Make a call of functions of the native library, which ``headers`` declare."""
        folders, library = (str(native.include_dir()),), str(native.library_dir())
        return cls(statement, tuple(headers), folders, library, native.LIBRARY_NAME, dict(values or {}))


def launch_module(native_call: NativeCall, tensors: Sequence[TensorNode], typed: bool = False) -> IRModule:
    """Build the host's launch function with the statement, for the inputs and the outputs of a task.

    Its parameters are pointers of the tensors' dtypes if ``typed``, as those of candidates must be.
    """
    module = IRModule()
    parameters = [Var(tensor.name, ~tensor.type.dtype if typed else void_p) for tensor in tensors]
    names = list(native_call.values)
    # In a scope of their own: the symbolic dims that they are computed from are variables, maybe of the same names.
    text = "".join(f"const int64_t native_{name} = {{}}; " for name in names)
    text += "{{ " + "".join(f"const int64_t {name} = native_{name}; " for name in names)
    values: list[Expr] = [int64(native_call.values[name]) for name in names]
    if native_call.store is not None:
        module.functions[STORE] = native_call.store
        tile = [Var("tile", ~float32), *(Var(f"at{number}", int64) for number in range(5))]
        others = [parameters[-1], *parameters[native_call.operands : -1]]
        types = [parameter.type for parameter in native_call.store.params[len(tile) :]]
        arguments = [*tile, *(cast(p, dtype) for p, dtype in zip(others, types, strict=True))]
        text += f"auto {STORE} = [&](float *{{}}{', int64_t {}' * 5}) {{{{ {{}} ; }}}}; "
        values += [*tile, call(module.lookup_var(STORE), arguments)]
    used = parameters[: native_call.statement.replace("{{", "").replace("}}", "").count("{}")]
    with FunctionBuilder("launch", kind="public") as builder:
        builder.extend_params(parameters)
        builder.append(BlackBoxStmt(f"{text}{native_call.statement} }}}}", *values, *used))
    module.functions["launch"] = builder.func
    module.include_headers.extend(native_call.headers)
    module.include_dirs.extend(native_call.include_dirs)
    if native_call.library_dir is not None:
        module.linking_dirs.append(native_call.library_dir)
    if native_call.library is not None:
        module.linking_libs.append(native_call.library)
    return module


class UnfusedTask(Task):
    """A task whose kernel is fixed, and reads and writes memory: nothing is fused with it."""

    def allow_prologue(self) -> bool:
        """No operator before it is part of its kernel."""
        return False

    def allow_epilogue(self) -> bool:
        """No operator behind it is part of its kernel."""
        return False


class NativeCallTask(UnfusedTask):
    """The task of such an operator. hidet caches kernels by task name and shapes, so the name identifies the call."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorInput],
        outputs: Sequence[TensorInput],
        call: NativeCall,
        share_map: dict[int, int] | None = None,
    ):
        self.call = call
        super().__init__(name, list(inputs), list(outputs), attributes={"is_opaque": True}, share_map=share_map)

    def implement_cpu(self, working_dir: str) -> IRModule:
        """Build the launch function with the statement."""
        return launch_module(self.call, [*self.inputs, *self.outputs])

    def implement_cuda(self, working_dir: str) -> IRModule:
        """Build the same function, for the host: it gets addresses of the device's memory."""
        return launch_module(self.call, [*self.inputs, *self.outputs])


class NativeCallOp(OpaqueOperator):
    """An operator with one output, on its first input's device, computed by a native call.

    The output has the first input's dtype unless ``dtype`` is given. With ``share_map={0: 0}`` it shares the memory of
    the first input. There are as many outputs more, of the same dtype, as ``further`` has shapes.
    """

    def __init__(
        self,
        name: str,
        inputs: dict[str, Tensor],
        shape: Sequence[int | Expr],
        call: NativeCall,
        attributes: dict[str, Any],
        dtype: str | None = None,
        share_map: dict[int, int] | None = None,
        further: Sequence[Sequence[int | Expr]] = (),
    ):
        tensors = list(inputs.values())
        names = ["result", *(f"result{number}" for number in range(1, 1 + len(further)))]
        outputs = [
            tensor_input(own, dtype or tensors[0].dtype, list(extents))
            for own, extents in zip(names, (shape, *further), strict=True)
        ]
        task = NativeCallTask(
            name, [input_like(x, parameter) for parameter, x in inputs.items()], outputs, call, share_map
        )
        Operator.__init__(self, inputs=tensors, attributes=attributes, task=task)
