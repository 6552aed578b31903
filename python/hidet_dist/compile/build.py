"""Optimizing a program, building its kernels, and building the function that launches them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hidet
from hidet.drivers import build_task_batch
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.compat.graph_module import build_launcher
from hidet_dist.compat.quiet import quiet_builds
from hidet_dist.compat.rewrites import sound_rewrites
from hidet_dist.compile.cpu.blas import BlasMatmulOp, blas_matmuls
from hidet_dist.compile.cpu.kernels.lower import lower_to_kernels
from hidet_dist.errors import CompileError
from hidet_dist.partition import Program
from hidet_dist.partition.program import COORDINATE, communication_operators
from hidet_dist.runtime import native, openblas


@dataclass
class CompiledProgram:
    """A program as libraries.

    Attributes
    ----------
    graph: the optimized graph.
    launcher: the library that launches the whole graph.
    kernels: the kernel libraries, in the order of the table that the launcher gets; ``kernel_names`` say what they do.
    data: the names of the weights (and the coordinate) in the order that the launcher's ``init`` takes them.
    constants: constants that optimizing the program made, by name; the same for every rank.
    libraries: what the kernels need besides the runtimes: ``openblas`` or nothing.
    """

    graph: FlowGraph
    launcher: Path
    kernels: list[Path]
    kernel_names: list[str]
    data: list[str]
    constants: dict[str, Tensor]
    libraries: tuple[str, ...]


def optimize_program(program: Program) -> FlowGraph:
    """Fuse a program's operators.

    Raises
    ------
    CompileError
        When hidet's passes lose or change a communication operator: a program without it would compute something else.
    """
    with quiet_builds(), sound_rewrites(), blas_matmuls():
        graph = lower_to_kernels(hidet.graph.optimize(program.graph))
    graph.update_nodes()
    if _needs_openblas(graph):
        openblas.load_openblas()  # or the kernels cannot be loaded
    before, after = (
        Counter((op.task.name, tuple(map(str, op.inputs[0].shape))) for op in communication_operators(g))
        for g in (program.graph, graph)
    )
    if before != after:
        raise CompileError(
            f"Optimizing the program changed its communication: lost {dict(before - after)}, "
            f"added {dict(after - before)}."
        )
    return graph


def _needs_openblas(graph: FlowGraph) -> bool:
    return any(isinstance(node, BlasMatmulOp) for node in graph.nodes)


def compile_program(
    program: Program,
    target: str,
    total: Callable[[int], None] = lambda _: None,
    advance: Callable[[], None] = lambda: None,
) -> CompiledProgram:
    """Compile a program for ``target`` (``cpu``).

    Parameters
    ----------
    program: Program
        The program.
    target: str
        hidet's build target.
    total, advance: callable, optional
        Progress: called with the number of kernels, and once for each that is built.

    Raises
    ------
    CompileError
        When a kernel or the launch function does not compile.
    """
    graph = optimize_program(program)
    native.library()  # kernels that communicate link against it
    tasks: dict[str, tuple[int, Operator]] = {}
    kernel_of_node = []
    for node in graph.nodes:
        if node.build_target != target:
            raise CompileError(f"The operator {node.name} is for {node.build_target}, not for {target}.")
        kernel_of_node.append(tasks.setdefault(str(node.task), (len(tasks), node))[0])
    total(len(tasks))
    try:
        with quiet_builds(advance):
            build_task_batch([(node.task, target) for _, node in tasks.values()])
            compiled = [node.task.build(target=target) for _, node in tasks.values()]
    except (RuntimeError, ValueError, OSError) as error:
        raise CompileError(f"A kernel does not compile: {error}") from error
    for task in compiled:
        if len(task.candidates) != 1:
            raise CompileError(
                f"The kernel {task.meta_data.name} has {len(task.candidates)} candidates; one is expected."
            )

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
        with quiet_builds():
            launcher = build_launcher(graph, inputs, [*data.values(), *constants.values()], kernel_of_node)
    except (RuntimeError, ValueError, OSError) as error:
        raise CompileError(f"The launch function does not compile: {error}") from error
    kernels = [Path(task.task_dir) / "lib.so" for task in compiled]
    return CompiledProgram(
        graph,
        launcher,
        kernels,
        [node.name for _, node in tasks.values()],
        [*data, *constants],
        constants,
        (openblas.NAME,) if _needs_openblas(graph) else (),
    )
