"""hidet 0.6.1's generator of a graph's launch function, with two corrections and two additions.

* It expects weights that are constants with storage. Here weights are placeholders that every rank fills with its
  shards. The generator needs no storage for weights, but makes each graph input a parameter of the launch function, so
  the placeholders are removed from the inputs while it runs.
* It frees memory too early. An operator that only renames its input's memory (a reshape) makes two tensors of one
  buffer, whose uses it counts separately: the buffer is freed as soon as the reshaped tensor has one use left.
* The library has no description of its program. Here it has one, which is compared with that of an artifact folder.
* It does not measure kernels. Here the launch function records when each kernel begins and ends: see launch.h.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hidet.drivers.build_graph import Tensor2VarMap
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.ir.builders import FunctionBuilder
from hidet.ir.dtypes import int64
from hidet.ir.expr import Var
from hidet.ir.func import Function
from hidet.ir.functors import IRRewriter
from hidet.ir.module import IRModule
from hidet.ir.stmt import BlackBoxStmt, LetStmt, SeqStmt, Stmt
from hidet.ir.type import FuncType
from hidet.lang.script import ScriptModuleContext

from hidet_dist.runtime import native

_LITERAL_LENGTH = 2000  # characters of a piece of a C string literal: compilers may limit one line

_generator: Any = importlib.import_module("hidet.drivers.build_graph")


class SharedCounts(Tensor2VarMap):
    """hidet's table of a graph's buffers, with one count of uses for all tensors of a buffer."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # The arguments before are four pairs of tensors and variables: inputs, outputs, weights, intermediates.
        self._uses: dict[Tensor, int] = dict(arguments[8])
        self._left: dict[Any, int] | None = None

    def process_share_map(self, graph_nodes: list[Operator]) -> None:
        """Give tensors that share memory one variable, as hidet does, and one count of uses."""
        super().process_share_map(graph_nodes)
        self._left = {}
        for tensor, uses in self._uses.items():
            variable = self.get_var(tensor)
            self._left[variable] = self._left.get(variable, 0) + uses

    def dec_usage_count(self, x: Tensor) -> None:
        """Count one use of a tensor's buffer."""
        if self._left is None:
            super().dec_usage_count(x)
        else:
            self._left[self.get_var(x)] -= 1

    def get_usage_count(self, x: Tensor) -> int:
        """The remaining uses of a tensor's buffer."""
        return super().get_usage_count(x) if self._left is None else self._left[self.get_var(x)]


class _Marks(IRRewriter):
    """Inserts a mark before and after each call of a kernel, at the statement that binds the kernel's pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def visit_LetStmt(self, let: LetStmt) -> Stmt:
        """Surround the generator's binding of a kernel with marks."""
        if not isinstance(let.bind_vars[0].type, FuncType):
            return super().visit_LetStmt(let)
        before, after = (BlackBoxStmt(f"hidet_dist_mark({2 * self.kernels + end});") for end in (0, 1))
        self.kernels += 1
        return SeqStmt([before, let, after])


def _describing(text: str) -> Function:
    """Build the function ``describe``, which returns the address of an ASCII text."""
    pieces = (text[begin : begin + _LITERAL_LENGTH] for begin in range(0, len(text), _LITERAL_LENGTH))
    # Braces in octal: a pair of them is a placeholder in hidet's black box statements.
    codes = str.maketrans({"\\": "\\\\", '"': '\\"', "{": "\\173", "}": "\\175"})
    escaped = (piece.translate(codes) for piece in pieces)
    literal = "\n".join(f'"{piece}"' for piece in escaped)
    with FunctionBuilder("describe", kind="public") as builder:
        address = Var("address", ~int64)
        builder.extend_params([address])
        builder.append(BlackBoxStmt(f"static const char description[] = {literal};"))
        builder.append(BlackBoxStmt("*{} = reinterpret_cast<int64_t>(description);", address))
    return builder.func


def _marked(module: IRModule, kernels: int, description: str) -> IRModule:
    marks = _Marks()
    module.functions["launch"] = marks(module.functions["launch"])
    if marks.kernels != kernels:
        raise RuntimeError(f"The launch function calls {marks.kernels} kernels, not the graph's {kernels}.")
    describe = _describing(description)
    module.functions[describe.name] = describe
    module.include_headers.append("hidet_dist/launch.h")
    module.include_dirs.append(str(native.include_dir()))
    return module


def build_launcher(
    graph: FlowGraph,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    kernel_of_node: list[int],
    description: str,
) -> Path:
    """Build the library that launches a whole graph; ``inputs`` are call arguments, ``weights`` are set once.

    ``description`` is the ASCII text that the library returns about itself. ``kernel_of_node[i]`` is the index of node
    i's kernel in the table that the launch function gets. Returns the path of the library in hidet's cache. Its
    functions are ``hidet_init``, ``hidet_get_workspace_size`` (which writes three int64: hidet's own binding passes
    two), ``hidet_set_workspace``, ``hidet_launch``, ``hidet_describe`` (which writes the address of the description)
    and ``hidet_dist_record``.
    """
    all_inputs = graph.inputs
    nodes = graph.nodes  # analysed with all inputs; the analysis is kept while they are hidden
    build = ScriptModuleContext.build
    try:
        _generator.Tensor2VarMap = SharedCounts
        ScriptModuleContext.build = lambda context: _marked(context.ir_module(), len(nodes), description).build()
        graph.inputs = list(inputs)
        assert graph.nodes is nodes
        module = _generator.build_graph_module(graph, list(weights), kernel_of_node)
    finally:
        ScriptModuleContext.build = build
        _generator.Tensor2VarMap = Tensor2VarMap
        graph.inputs = all_inputs
    return Path(module.shared_library.lib_path)
