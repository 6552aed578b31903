"""The library that launches a whole graph: tables of its nodes, which a small interpreter in C++ walks.

The tables take the compiler as long for a hundred layers as for one; a statement for each node would not. hidet's own
generator (hidet 0.6.1, ``hidet.drivers.build_graph``) emits such statements, lowers them by passes whose time grows
faster than the graph, and frees memory too early where operators share a buffer. The interpreter is in
``hidet_dist/launcher.h``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import hidet
from hidet.graph import FlowGraph, Tensor
from hidet.ir import expr as ir
from hidet.ir.expr import Constant, Expr, SymbolVar

from hidet_dist import native
from hidet_dist.compat.cpu_build import LIBRARIES, compiler_version, content_of, gcc, without_paths
from hidet_dist.compile.buffers import ActivationBuffer, Buffers, activations
from hidet_dist.compile.placement import place_buffers, placed_nbytes
from hidet_dist.errors import CompileError
from hidet_dist.spec.extents import Extent, extents_of, factors_of, symbols_in

_LITERAL_LENGTH = 2000  # characters of a piece of a C string literal: compilers may limit one line
_LINE_LENGTH = 120
# For any x86-64 processor: the launcher only passes pointers on, and this machine may lack the kernels' features.
_FLAGS = ("-O2", "-std=c++11", "-m64", "-march=x86-64", "-fPIC", "-shared")
_OPERATIONS: dict[type[Expr], str] = {
    ir.Add: "+",
    ir.Sub: "-",
    ir.Multiply: "*",
    ir.Div: "/",
    ir.FloorDiv: "/",
    ir.Mod: "%",
    ir.LessThan: "<",
    ir.LessEqual: "<=",
}


class Workspace:
    """The activations of an optimized graph in memory.

    Parameters
    ----------
    graph: FlowGraph
        The graph, its nodes in the order in which they run.
    inputs, weights: sequence of Tensor
        The tensors that are given with each call, and those that are set once.
    sizes: mapping, optional
        The sizes of symbolic dims at which the workspace is to be small.
    """

    def __init__(
        self,
        graph: FlowGraph,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        sizes: Mapping[str, int] = MappingProxyType({}),
    ):
        self.inputs, self.weights = inputs, weights
        self._nodes, self._outputs = graph.nodes, graph.outputs
        self.buffers = Buffers(graph, inputs, weights)
        self.activations = self._activations_at(sizes)
        self.placement = place_buffers(list(self.activations.values()))

    @property
    def nbytes(self) -> int:
        """The bytes for activations, at the given sizes."""
        return self.placement.nbytes

    def nbytes_at(self, sizes: Mapping[str, int]) -> int:
        """Compute the bytes for activations at other sizes of symbolic dims."""
        return placed_nbytes(list(self._activations_at(sizes).values()), self.placement)

    def _activations_at(self, sizes: Mapping[str, int]) -> dict[int, ActivationBuffer]:
        return activations(self._nodes, self._outputs, self.buffers, sizes)


def launcher_source(graph: FlowGraph, workspace: Workspace, kernel_of_node: Sequence[int], description: str) -> str:
    """Write the source of a graph's launcher; the arguments are those of :func:`build_launcher`."""
    inputs, weights, buffers = workspace.inputs, workspace.weights, workspace.buffers
    local, placement = workspace.activations, workspace.placement
    renumbered = {number: n for n, number in enumerate(local)}
    byte_counts: dict[str, int] = {}
    size_of_local = [byte_counts.setdefault(_bytes_of(one.made), len(byte_counts)) for one in local.values()]
    placing = [n for one in placement.order for n in (one, len(placement.before[one]), *placement.before[one])]
    code = []
    counts: set[int] = set()

    parts: dict[tuple[int, int], int] = {}

    def slot(x: Tensor) -> int:
        number, start = buffers.number[x], buffers.start_bytes.get(x, 0)
        whole = buffers.first_local + renumbered[number] if buffers.is_local(number) else number
        return -1 - parts.setdefault((whole, start), len(parts)) if start else whole

    for node, kernel in zip(graph.nodes, kernel_of_node, strict=True):
        arguments = [slot(x) for x in (*node.inputs, *node.outputs)]
        counts.add(len(arguments))
        code += [kernel, len(arguments), *arguments]
    symbols = symbols_in([extent for y in (*buffers.locals, *graph.outputs) for extent in extents_of(y)])
    parameters = [
        *(f"void *input{i}" for i in range(len(inputs))),
        *(f"void *output{i}" for i in range(len(graph.outputs))),
    ]
    addresses = [parameter.removeprefix("void *") for parameter in parameters]
    lines = [
        "#include <stdint.h>",
        "#include <hidet_dist/symbols.h>",
        "",
        f"static const int kInputs = {len(inputs)}, kOutputs = {len(graph.outputs)}, kWeights = {len(weights)};",
        f"static const int kLocals = {len(local)}, kSizes = {len(byte_counts)};",
        f"static const int kMostArguments = {max(counts, default=0)};",
        *_table("size_of_local", size_of_local),
        *_table("memory_of_local", [one.memory for one in local.values()]),
        *_table("placing", [*placing, -1]),
        *_table("whole_of_part", [whole for whole, _ in parts]),
        *_table("start_of_part", [start for _, start in parts], "int64_t"),
        *_table("code", [*code, -1]),
        *_symbols(symbols),
        "static void sizes(int64_t *bytes) {",
        *(f"  bytes[{number}] = {text};" for text, number in byte_counts.items()),
        "}",
        "static void call(void *kernel, void **a, int count) {",
        "  switch (count) {",
        *(_call(count) for count in sorted(counts)),
        "  }",
        "}",
        "",
        "#include <hidet_dist/launcher.h>",
        "",
        "DLL void hidet_get_output_shape(int32_t index, int32_t *dims) {",
        *_output_shapes(graph.outputs),
        "}",
        f"DLL void hidet_launch({', '.join([*parameters, 'void **kernels'])}) {{",
        *(f"  addresses[{number}] = {name};" for number, name in enumerate(addresses)),
        "  run(kernels);",
        "}",
        "DLL void hidet_describe(int64_t *address) {",
        "  static const char description[] =",
        *_literals(description),
        "  *address = reinterpret_cast<int64_t>(description);",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, numbers: Sequence[int], kind: str = "int32_t") -> list[str]:
    """Write an array of numbers; an empty one has an entry that is never read."""
    lines, line = [], ""
    for number in numbers or [0]:
        if len(line) + 32 > _LINE_LENGTH:
            lines.append(line)
            line = ""
        line += f"{number}," if kind == "int32_t" else f"INT64_C({number}),"
    return [f"static const {kind} {name}[] = {{", *lines, line, "};"]


def _symbols(names: Sequence[str]) -> list[str]:
    """Define a function for each symbolic dim that returns its present value."""
    return [
        f'static int64_t symbol{number}() {{ return get_symbol_value("{name}"); }} /* {name} */\n'
        f"#define SYMBOL_{name} symbol{number}()"
        for number, name in enumerate(names)
    ]


def _call(count: int) -> str:
    types = ", ".join(["void *"] * count)
    values = ", ".join(f"a[{i}]" for i in range(count))
    return f"    case {count}: reinterpret_cast<void (*)({types})>(kernel)({values}); break;"


def _output_shapes(outputs: Sequence[Tensor]) -> list[str]:
    return [
        f"  if (index == {number}) {{ "
        + " ".join(f"dims[{d}] = static_cast<int32_t>({_text(extent)});" for d, extent in enumerate(extents_of(y)))
        + " }"
        for number, y in enumerate(outputs)
    ]


def _bytes_of(x: Tensor) -> str:
    extents = extents_of(x)
    number = x.dtype.nbytes
    symbolic = []
    for factor in (factor for extent in extents for factor in factors_of(extent)):
        if isinstance(factor, int):
            number *= factor
        else:
            symbolic.append(_text(factor))
    return " * ".join([f"INT64_C({number})", *symbolic])


def _text(extent: Extent) -> str:
    """Write an extent in C++, computed in int64.

    Raises
    ------
    CompileError
        When it is anything but arithmetic of symbolic dims.
    """
    if isinstance(extent, int | Constant):
        return f"INT64_C({int(extent)})"
    if isinstance(extent, SymbolVar):
        return f"SYMBOL_{extent.name}"
    if isinstance(extent, ir.Cast):
        return _text(extent.expr)
    if isinstance(extent, ir.IfThenElse):
        return f"({_text(extent.cond)} ? {_text(extent.then_expr)} : {_text(extent.else_expr)})"
    if type(extent) in _OPERATIONS:
        return f"({_text(extent.a)} {_OPERATIONS[type(extent)]} {_text(extent.b)})"
    raise CompileError(f"The size {extent} of a tensor is not arithmetic of symbolic dims.")


def _literals(text: str) -> list[str]:
    """Write an ASCII text as pieces of a C string literal."""
    pieces = (text[begin : begin + _LITERAL_LENGTH] for begin in range(0, max(1, len(text)), _LITERAL_LENGTH))
    codes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "?": "\\?"})
    quoted = [f'      "{piece.translate(codes)}"' for piece in pieces]
    return [*quoted[:-1], f"{quoted[-1]};"]


def build_launcher(graph: FlowGraph, workspace: Workspace, kernel_of_node: Sequence[int], description: str) -> Path:
    """Build the library that launches a whole graph, unless the cache has it; return its path.

    Its functions are ``hidet_init``, ``hidet_get_workspace_size`` (which writes three int64), ``hidet_set_workspace``,
    ``hidet_launch``, ``hidet_get_output_shape``, ``hidet_describe`` (which writes the address of the description),
    ``hidet_dist_record`` and ``hidet_dist_record_events``.

    Parameters
    ----------
    graph: FlowGraph
        The optimized graph.
    workspace: Workspace
        The tensors that are given with each call, those that are set once, and the places of all others.
    kernel_of_node: sequence of int
        For each node, the index of its kernel in the table that ``hidet_launch`` gets.
    description: str
        The ASCII text that the library returns about itself.

    Raises
    ------
    CompileError
        When the library does not compile, or a size is not arithmetic of symbolic dims.
    """
    source = launcher_source(graph, workspace, kernel_of_node, description)
    directory, libraries = str(native.include_dir()), Path(hidet.__path__[0]) / "lib"
    command = [gcc(), *_FLAGS]
    parts = [source, compiler_version(gcc()), *_FLAGS, *LIBRARIES, content_of(directory)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(hidet.option.get_cache_dir()) / "launchers" / digest
    library = folder / "lib.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written, built = Path(scratch) / "launcher.cc", Path(scratch) / "lib.so"
        written.write_text(source, "ascii")
        command += [str(written), f"-I{directory}", f"-L{libraries}"]
        command += [*without_paths([directory, scratch]), *LIBRARIES, "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"The launch function does not compile: {done.stderr.strip() or done.returncode}")
        os.replace(written, folder / "launcher.cc")
        os.replace(built, library)
    return library
