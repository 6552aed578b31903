"""Optimizing a program, building its kernels, and building the function that launches them all."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hidet
from hidet.drivers import build_task_batch
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.artifacts.manifest import IndexCheck
from hidet_dist.compat.build_locks import locked_builds
from hidet_dist.compat.cpu_build import precompile_headers
from hidet_dist.compat.cublas_products import product_of
from hidet_dist.compat.graph_module import build_launcher
from hidet_dist.compat.passes import bounded_fusion
from hidet_dist.compat.quiet import quiet_builds
from hidet_dist.compat.rewrites import sound_rewrites
from hidet_dist.compile.cpu import TiledOp, cpu_kernels
from hidet_dist.compile.cpu.arch import BASELINE, NATIVE, runs_here
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.compile.cpu.collectives import place_shards
from hidet_dist.compile.cpu.kernels.lower import lower_to_kernels
from hidet_dist.compile.cuda.build import cuda_target
from hidet_dist.compile.cuda.launches import fewer_launches
from hidet_dist.compile.guards import guard_graph
from hidet_dist.compile.index_checks import index_checks
from hidet_dist.compile.target import CPU, Target
from hidet_dist.errors import CompileError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.emit import overlap_graph
from hidet_dist.partitioning import Program
from hidet_dist.partitioning.program import COORDINATE, communication_operators
from hidet_dist.runtime import openblas
from hidet_dist.toolchain.cuda import find_toolkit

# Not by attribute: hidet.drivers re-exports a function of the same name.
_build_task: Any = importlib.import_module("hidet.drivers.build_task")
# The order in which a launcher names kinds of memory.
_MEMORIES = ("cpu", "cuda", "hip")


@dataclass
class CompiledProgram:
    """A program as libraries.

    Attributes
    ----------
    graph: the optimized graph.
    launcher: the library that launches the whole graph.
    kernels: the kernel libraries, in the order of the table that the launcher gets; ``kernel_names`` say what they do,
        and ``kernel_of_node`` which of them computes each node of the graph.
    candidates: for each kernel, how many candidates its library has; the fastest is found where the program runs.
    cublas: for each kernel, whether the last of its candidates calls cuBLAS.
    data: the names of the weights (and the coordinate) in the order that the launcher's ``init`` takes them.
    constants: constants that optimizing the program made, by name; the same for every rank.
    libraries: what the kernels need besides the runtimes: ``openblas`` or nothing, the CUDA runtime for CUDA.
    workspace_bytes: room for activations, by kind of memory; None where it depends on symbolic dims.
    index_checks: what inputs are to be checked for before the program runs.
    """

    graph: FlowGraph
    launcher: Path
    kernels: list[Path]
    kernel_names: list[str]
    kernel_of_node: list[int]
    candidates: list[int]
    cublas: list[bool]
    data: list[str]
    constants: dict[str, Tensor]
    libraries: tuple[str, ...]
    workspace_bytes: dict[str, int] | None
    index_checks: tuple[IndexCheck, ...]


def check_compiler(target: Target) -> None:
    """Refuse a target that there is no compiler for, before work starts.

    Raises
    ------
    CompileError
        It says how to get the compiler.
    """
    if target.kind == "cuda":
        find_toolkit()
    elif shutil.which("g++") is None:
        raise CompileError("Compiling for the CPU needs g++, which is not in PATH; install it (apt-get install g++).")


@contextmanager
def _building_for(target: Target) -> Iterator[None]:
    """What is in force while a program is optimized and built for ``target``."""
    with ExitStack() as stack:
        stack.enter_context(quiet_builds())
        stack.enter_context(sound_rewrites())
        stack.enter_context(bounded_fusion())
        if target.kind == "cuda":
            stack.enter_context(cuda_target(target))
        else:
            stack.enter_context(cpu_target(target.cpu))
            stack.enter_context(cpu_kernels())
        yield


def optimize_program(program: Program, target: Target = CPU) -> FlowGraph:
    """Fuse a program's operators.

    Raises
    ------
    CompileError
        When hidet's passes lose or change a communication operator: a program without it would compute something else.
    """
    # What does not depend on inputs is computed meanwhile, on the processor that there is.
    with _building_for(replace(target, cpu=NATIVE)):
        # Inputs that are on a GPU are not checked.
        checked = index_checks(program)[1] if target.kind == "cpu" else frozenset()
        guarded = guard_graph(program, checked)
        placed = place_shards(guarded) if target.kind == "cpu" else fewer_launches(guarded)
        graph = hidet.graph.optimize(placed)
    if target.kind == "cpu":
        graph = lower_to_kernels(graph)
    graph.update_nodes()
    if _needs_openblas(graph):
        openblas.load_openblas()  # or the kernels cannot be loaded
    before, after = (
        Counter((op.task.name, tuple(map(str, op.inputs[0].shape))) for op in communication_operators(g))
        for g in (placed if target.kind == "cpu" else program.graph, graph)
    )
    if before != after:
        raise CompileError(
            f"Optimizing the program changed its communication: lost {dict(before - after)}, "
            f"added {dict(after - before)}."
        )
    return graph


def _libraries(graph: FlowGraph, target: Target) -> tuple[str, ...]:
    """What the kernels need to be loaded besides the runtimes of hidet and hidet_dist."""
    if target.kind == "cuda":
        return (find_toolkit().runtime_name,)
    return (openblas.NAME,) if _needs_openblas(graph) else ()


def _needs_openblas(graph: FlowGraph) -> bool:
    return any(isinstance(node, TiledOp) for node in graph.nodes)


def compile_program(
    program: Program,
    target: Target = CPU,
    total: Callable[[int], None] = lambda _: None,
    advance: Callable[[], None] = lambda: None,
    overlap: Cluster | None = None,
    room: int | None = None,
) -> CompiledProgram:
    """Compile a program; nothing of it is loaded, so that it can be compiled where it cannot run.

    Parameters
    ----------
    program: Program
        The program, on the target's device.
    target: Target
        What to compile it for.
    total, advance: callable, optional
        Progress: called with the number of kernels, and once for each that is built.
    overlap: Cluster, optional
        The machine by whose predicted times collectives are started before they are waited for, so that they run
        beside computation (:mod:`hidet_dist.overlap.emit`); where it is not given, they are not.
    room: int, optional
        Bytes of activations that may then be held, if without overlap no more are.

    Raises
    ------
    CompileError
        When a kernel or the launch function does not compile, or there is no compiler for the target.
    """
    graph = optimize_program(program, target)
    if overlap is not None:
        sizes = {symbol.name: symbol.size for symbol in program.symbols}
        local = {own.name: sizes[own.symbol] // own.shards for own in program.local_symbols}
        overlap_graph(graph, overlap, {**sizes, **local}, room)
    tasks: dict[str, tuple[int, Operator]] = {}
    kernel_of_node = []
    for node in graph.nodes:
        if node.build_target != target.kind:
            raise CompileError(f"The operator {node.name} is for {node.build_target}, not for {target.kind}.")
        kernel_of_node.append(tasks.setdefault(str(node.task), (len(tasks), node))[0])
    total(len(tasks))
    nodes = [node for _, node in tasks.values()]
    with _building_for(target):
        folders = [_task_folder(node, target) for node in nodes]
        if target.kind == "cpu" and not all((folder / "lib.so").exists() for folder in folders):
            precompile_headers()
        try:
            with quiet_builds(advance), locked_builds():
                build_task_batch([(node.task, target.kind) for node in nodes])
        except (RuntimeError, ValueError, OSError) as error:
            raise CompileError(f"A kernel does not compile: {error}") from error

    # The launch function runs here, too, to tell how much memory it needs.
    with _building_for(target if runs_here(target.cpu) else replace(target, cpu=BASELINE)):
        inputs = graph.inputs[: len(program.inputs)]
        named = dict(program.weight_placeholders)
        if program.coordinate is not None:
            named[COORDINATE] = program.coordinate
        used = {x for node in graph.nodes for x in node.inputs}
        data = {name: tensor for name, tensor in named.items() if tensor in used}
        # In the order of their first use, so that the same program has the same names.
        made = dict.fromkeys(x for node in graph.nodes for x in node.inputs if x.storage is not None)
        constants = {f"c{number}": x for number, x in enumerate(made)}
        try:
            launcher = build_launcher(graph, inputs, [*data.values(), *constants.values()], kernel_of_node)
        except (RuntimeError, ValueError, OSError) as error:
            raise CompileError(f"The launch function does not compile: {error}") from error
    return CompiledProgram(
        graph,
        launcher,
        [folder / "lib.so" for folder in folders],
        [node.name for node in nodes],
        kernel_of_node,
        [int(json.loads((folder / "meta.json").read_text())["num_candidates"]) for folder in folders],
        [target.cublas and product_of(node.task) is not None for node in nodes],
        [*data, *constants],
        constants,
        _libraries(graph, target),
        None if program.symbols else _workspace_bytes(launcher),
        index_checks(program)[0],
    )


def _task_folder(node: Operator, target: Target) -> Path:
    """Where hidet has built an operator's kernel."""
    cache = os.path.join(hidet.option.get_cache_dir(), "ops")
    folder, _ = _build_task.prepare_cache_paths(cache, f"{target.kind}_space_{target.space}", node.task)
    return Path(folder)


def _workspace_bytes(launcher: Path) -> dict[str, int]:
    sizes = (ctypes.c_int64 * len(_MEMORIES))()
    ctypes.CDLL(str(launcher)).hidet_get_workspace_size(sizes)
    return {memory: size for memory, size in zip(_MEMORIES, sizes, strict=True) if size}
