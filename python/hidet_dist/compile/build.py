"""Optimizing a program, building its kernels, and building the function that launches them all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import hidet
from hidet.backend.build import CompilationFailed
from hidet.drivers import build_task_batch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.tensor import symbol_like
from hidet.ir.task import Task

from hidet_dist.artifacts import StageManifest
from hidet_dist.artifacts.manifest import COORDINATE
from hidet_dist.compat.build_locks import is_built, locked_builds, task_folder
from hidet_dist.compat.passes import layered_passes
from hidet_dist.compat.quick import quick_hidet
from hidet_dist.compat.quiet import quiet_builds
from hidet_dist.compat.rewrites import sound_rewrites
from hidet_dist.compat.shared_tasks import shared_tasks
from hidet_dist.compile.backend import Backend, PackedWeight
from hidet_dist.compile.cache import mark_used, prune
from hidet_dist.compile.describe import description_of, layouts_of, stage_of
from hidet_dist.compile.duplicates import merge_duplicates
from hidet_dist.compile.index_checks import index_checks
from hidet_dist.compile.kept import check_kept
from hidet_dist.compile.launcher import Workspace, build_launcher
from hidet_dist.compile.ordering import order_for_memory
from hidet_dist.compile.permutations import cancel_permutations
from hidet_dist.compile.renamings import renamings_in_place
from hidet_dist.compile.states import run_before, updates_in_place
from hidet_dist.compile.targets import default_backend
from hidet_dist.cost.work import local_nbytes
from hidet_dist.errors import CompileError, OverBudgetError
from hidet_dist.files import parse_json, sha256
from hidet_dist.machine import Cluster
from hidet_dist.overlap.emit import overlap_graph
from hidet_dist.partitioning import Program
from hidet_dist.partitioning.program import unaliased
from hidet_dist.spec.parts import part_sizes
from hidet_dist.targets import KINDS_OF_MEMORY, targets_with
from hidet_dist.weights import StoredLayout
from hidet_dist.weights.panels import StoredPrecision

HeldOn = Callable[[Sequence[int] | None], int]
"""The bytes that the device at a coordinate holds for a program; without one, a device with the largest shards."""

_FAILURES = (RuntimeError, ValueError, OSError, CompilationFailed)  # of processes that compile kernels
_MOST_LINES = 3  # of a compiler's errors in a message


@dataclass
class CompiledProgram:
    """A program as libraries.

    Attributes
    ----------
    graph: the optimized graph.
    launcher: the library that launches the whole graph.
    kernels: the kernel libraries, in the order of the launcher's table; ``kernel_names`` name their computations,
        and ``kernel_of_node`` which of them computes each node of the graph.
    candidates: for each kernel, the number of candidates in its library; the serving process measures the fastest.
    cublas: for each kernel, whether the last of its candidates calls cuBLAS.
    data: the names of the weights (and the coordinate) in the order that the launcher's ``init`` takes them.
    constants: the constants that optimization computed, by name; the same for every rank.
    libraries: libraries that the kernels need besides the runtimes: ``openblas`` or none; the CUDA runtime for CUDA.
    workspace_bytes: the bytes for activations, by kind of memory; None if they depend on symbolic dims.
    stage: the stage's entry for a manifest, with an empty folder. The launcher contains the same description.
    layouts: the dtype and local shape of each name in ``data``; of a weight in panels, the shape of its panels.
    held_bytes: the bytes that a device holds: inputs, outputs, weights, states, constants and activations, at the
        sizes that the program is planned for.
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
    stage: StageManifest
    layouts: dict[str, StoredLayout]
    held_bytes: int

    @property
    def weight_layouts(self) -> dict[str, StoredLayout]:
        """The layouts of the weights and the coordinate: what ranks differ in."""
        return {name: layout for name, layout in self.layouts.items() if name not in self.constants}


@contextmanager
def _hidet_options(target: AbstractContextManager[None], frugal: bool = False) -> Iterator[None]:
    """Set hidet's options, and the target's, while a program is optimized and built, whatever the user has set."""
    # g++ looks for its linker in PATH. Others look in the default where there is none, as in an empty environment.
    os.environ.setdefault("PATH", os.defpath)
    with hidet.option.context(), quiet_builds(), sound_rewrites(), layered_passes(frugal), shared_tasks():
        hidet.option.save_lower_ir(False)
        hidet.option.debug_cache_tuning(False)
        with target:
            yield


@contextmanager
def _compile_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds, of a kernel that does not compile, as CompileError with the compiler's reason."""
    try:
        yield
    except kinds as error:
        lines = [line.strip() for line in str(error).splitlines()]
        said = [line for line in lines if "error:" in line or "No space left" in line]
        raise CompileError(f"A kernel does not compile: {' '.join(said[:_MOST_LINES] or lines)}") from error


@quick_hidet()
def optimize_program(
    program: Program,
    target: Backend | None = None,
    precisions: Mapping[str, StoredPrecision] = MappingProxyType({}),
    frugal: bool = False,
) -> FlowGraph:
    """Fuse a program's operators, for the default target if none is given.

    ``precisions`` are the lower ones in which weights may be stored, by name. If ``frugal``, operators stay apart whose
    kernel would hold more memory than they do one after the other.

    Raises
    ------
    CompileError
        When a pass loses or changes a communication operator, so that the program would compute another result, or
        computes a product twice; when a kernel that computes a constant does not compile; when a state would have to be
        copied, or the target cannot keep states.
    """
    target = target or default_backend()
    if program.states and not target.record.keeps_states:
        labels = ", ".join(state.label or state.name for state in program.states)
        raise CompileError(
            f"The graph has states ({labels}), which the target {target.record.name} cannot keep: build for one of "
            f"{targets_with('keeps_states')}."
        )
    program = updates_in_place(program)
    program = replace(program, graph=cancel_permutations(program.graph))
    with _hidet_options(target.optimizing(), frugal):
        rewritten = target.before_fusion(program, precisions, frugal)
        with _compile_errors(CompilationFailed):  # constants are computed
            fused = hidet.graph.optimize(rewritten)
    check_kept(rewritten, fused)
    with hidet.option.context(), shared_tasks():
        hidet.option.execution_mode("symbolic")  # a copy of a constant would be computed at once
        once = fused if frugal else merge_duplicates(fused)  # what is merged is held for longer
        graph = target.after_fusion(_with_own_outputs(renamings_in_place(once), len(program.outputs)), frugal)
    check_kept(once, graph)
    return graph


def _with_own_outputs(graph: FlowGraph, count: int) -> FlowGraph:
    """Copy those of the first ``count`` outputs that rewriting left without a kernel that writes them.

    They are constants, or have the elements of an input in their order.
    """
    outputs = [*unaliased(graph.outputs[:count]), *graph.outputs[count:]]
    if all(own is y for own, y in zip(outputs, graph.outputs, strict=True)):
        return graph
    result = FlowGraph(outputs, graph.inputs)
    result.update_nodes()
    return result


def _kernels_of(graph: FlowGraph, build_target: str) -> tuple[list[Operator], list[int]]:
    """List an operator for each kernel of a graph, and the number of each operator's kernel: equal ones have one.

    Raises CompileError for an operator of another target.
    """
    tasks: dict[str, tuple[int, Operator]] = {}
    kernel_of_node = []
    texts: dict[Task, str] = {}
    for node in graph.nodes:
        if node.build_target != build_target:
            raise CompileError(f"The operator {node.name} is for {node.build_target}, not for {build_target}.")
        text = texts.get(node.task) or texts.setdefault(node.task, str(node.task))
        kernel_of_node.append(tasks.setdefault(text, (len(tasks), node))[0])
    return [node for _, node in tasks.values()], kernel_of_node


def _build(tasks: Sequence[Task], target: Backend, advance: Callable[[], None], other_work: _Once) -> None:
    """Compile kernels, and begin other work when the first of them is done. Raises CompileError."""
    if not tasks:
        return
    target.before_build()

    def one_built() -> None:
        advance()
        other_work.begin()

    # All processes that compile are started before the first kernel is done.
    with _compile_errors(*_FAILURES), quiet_builds(one_built), locked_builds():
        build_task_batch([(task, target.record.memory) for task in tasks])


@quick_hidet()
def compile_program(
    program: Program,
    target: Backend | None = None,
    total: Callable[[int], None] = lambda _: None,
    advance: Callable[[], None] = lambda: None,
    overlap: Cluster | None = None,
    room: int | None = None,
    meanwhile: Callable[[Mapping[str, StoredLayout]], None] = lambda _: None,
    fits: Callable[[HeldOn], None] = lambda _: None,
    fused: Callable[[FlowGraph], None] = lambda _: None,
    in_rows: Collection[str] = (),
) -> CompiledProgram:
    """Compile a program. No kernel is loaded, so the machine need not be able to run them.

    Parameters
    ----------
    program: Program
        The program, on the target's device.
    target: Backend, optional
        The target to compile for; the default target if none is given.
    total, advance: callable, optional
        Progress: called with the number of kernels, and once for each that is built.
    overlap: Cluster, optional
        The machine whose predicted times decide where collectives start and where the program waits for them, so that
        they overlap computation (:mod:`hidet_dist.overlap.emit`). Without it, the program waits for each one at once.
    room: int, optional
        The bytes of activations up to which overlap may raise the program's peak.
    meanwhile: callable, optional
        Called once, with the layouts of the data of a rank, while other processes compile kernels: when the first
        kernel is done. If there is nothing to compile, it is called all the same. Its errors are raised unchanged.
    fits: callable, optional
        Called before kernels are compiled, with a function of the bytes that a device at a coordinate holds. Its errors
        are raised unchanged. After an OverBudgetError fewer operators are fused, where the program then holds less, and
        it is called with that.
    fused: callable, optional
        Called before that with the program's graph, whose operators are fused to kernels.
    in_rows: collection of str, optional
        The names of weights that lie row by row, even if the target's kernels would read them in another layout.

    Raises
    ------
    CompileError
        When a kernel or the launch function does not compile, or there is no compiler for the target.
    """
    target = target or default_backend()
    build_target = target.record.memory

    def laid_out(frugal: bool) -> _LaidOut:
        return _lay_out(program, target, frugal, overlap, room, in_rows)

    laid = laid_out(frugal=False)
    try:
        fits(laid.held_on)
    except OverBudgetError:
        other = laid_out(frugal=True)
        if other.held_bytes >= laid.held_bytes:
            raise
        fits(other.held_on)
        laid = other
    fused(laid.optimized)
    graph, packed, data, initial, constants = laid.graph, laid.packed, laid.data, laid.initial, laid.constants
    nodes, kernel_of_node = _kernels_of(graph, build_target)
    total(len(nodes))
    names = [*data, *initial, *constants]
    panels = {name: packed[name].panels for name in names if name in packed}
    layouts = layouts_of(program, names, constants, panels)
    other_work = _Once(lambda: meanwhile({name: layouts[name] for name in (*data, *initial)}))
    with _hidet_options(target.building()):
        folders = [task_folder(node.task, build_target) for node in nodes]
        missing = [node.task for node, folder in zip(nodes, folders, strict=True) if not is_built(folder)]
        for _ in range(len(nodes) - len(missing)):
            advance()
        _build(missing, target, advance, other_work)
    other_work.finish()

    kernel_names = [node.name for node in nodes]
    candidates = [int(parse_json((folder / "meta.json").read_text())["num_candidates"]) for folder in folders]
    cublas = [target.calls_cublas(node) for node in nodes]
    libraries = target.libraries(graph)
    stage = stage_of(
        program,
        graph,
        target,
        kernel_names,
        [sha256(folder / "lib.so") for folder in folders],
        kernel_of_node,
        candidates,
        cublas,
        names,
        list(constants),
        libraries,
        index_checks(program)[0],
        panels,
    )
    description = description_of(stage, layouts, target)
    launcher = build_launcher(graph, laid.workspace, kernel_of_node, description)
    mark_used([launcher, *(folder / "lib.so" for folder in folders)])
    if missing:
        prune(Path(hidet.option.get_cache_dir()))
    # Loaded here, to compute the memory that it needs.
    by_kind = None if program.symbols or program.parts else _workspace_bytes(launcher)
    return CompiledProgram(
        graph,
        launcher,
        [folder / "lib.so" for folder in folders],
        kernel_names,
        kernel_of_node,
        candidates,
        cublas,
        names,
        constants,
        libraries,
        by_kind,
        replace(stage, workspace_bytes=by_kind),
        layouts,
        laid.held_bytes,
    )


@dataclass(frozen=True)
class _LaidOut:
    """A program whose operators are fused, in the order in which they run, and its memory.

    Attributes
    ----------
    optimized, graph: the fused graph, without and with weights in the layouts that kernels read.
    packed: the weights in such layouts.
    data, initial, constants: the tensors of weights and the coordinate, of states' initial values, and of constants.
    workspace: the memory of its activations.
    held_on: computes the bytes that a device holds for it.
    """

    optimized: FlowGraph
    graph: FlowGraph
    packed: Mapping[str, PackedWeight]
    data: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    constants: dict[str, Tensor]
    workspace: Workspace
    held_on: HeldOn

    @property
    def held_bytes(self) -> int:
        """The bytes that a device with the largest shards holds for it."""
        return self.held_on(None)


def _lay_out(
    program: Program,
    target: Backend,
    frugal: bool,
    overlap: Cluster | None,
    room: int | None,
    in_rows: Collection[str],
) -> _LaidOut:
    """Fuse a program's operators, order them, and place its activations; arguments as of :func:`compile_program`."""
    precisions = {
        weight.name: StoredPrecision(weight.storage.precision, weight.storage.group)
        for weight in program.weights
        if weight.storage is not None and weight.name not in in_rows
    }
    optimized = optimize_program(program, target, precisions, frugal)
    graph, packed = target.pack(optimized, program.weight_placeholders, in_rows, precisions)
    check_kept(optimized, graph)
    graph.update_nodes()
    del graph.outputs[len(program.outputs) :]  # the new values of states are in their memory
    inputs, sizes = graph.inputs[: len(program.inputs)], program.planned_sizes()
    named = {**program.weight_placeholders, **{name: weight.placeholder for name, weight in packed.items()}}
    if program.coordinate is not None:
        named[COORDINATE] = program.coordinate
    used = {x for node in graph.nodes for x in node.inputs}
    data = {name: tensor for name, tensor in named.items() if tensor in used}
    # In the order of their first use, so that the same program has the same names.
    computed = dict.fromkeys(x for node in graph.nodes for x in node.inputs if x.storage is not None)
    constants = {f"c{number}": x for number, x in enumerate(computed)}
    states = program.state_placeholders
    # Initial values are read from the file once, but have their place among the data.
    initial = {program.initial_name(name): symbol_like(states[name]) for name in program.initial}
    weights = [*data.values(), *initial.values(), *constants.values(), *states.values()]
    earlier = run_before(graph)
    order_for_memory(graph, inputs, weights, sizes, earlier)
    if overlap is not None:
        overlap_graph(graph, overlap, sizes, room, earlier)
    workspace = Workspace(graph, inputs, weights, sizes)
    in_memory = {*inputs, *graph.outputs, *weights} - set(initial.values())

    def held_on(coordinate: Sequence[int] | None) -> int:
        own = sizes
        if coordinate is not None:
            own = {**sizes, **part_sizes(program.parts, program.mesh, coordinate)}
        activations = workspace.nbytes if own is sizes else workspace.nbytes_at(own)
        return activations + sum(local_nbytes(x, own) for x in in_memory)

    return _LaidOut(optimized, graph, packed, data, initial, constants, workspace, held_on)


class _Once:
    """Work that is done once. An error in it does not disturb the caller of :meth:`begin`."""

    def __init__(self, work: Callable[[], None]):
        self.work: Callable[[], None] | None = work
        self.error: Exception | None = None

    def begin(self) -> None:
        """Do the work, unless it is done already."""
        work, self.work = self.work, None
        try:
            if work is not None:
                work()
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Do the work, unless it is done already, and raise its error."""
        self.begin()
        if self.error is not None:
            raise self.error


def _workspace_bytes(launcher: Path) -> dict[str, int]:
    sizes = (ctypes.c_int64 * len(KINDS_OF_MEMORY))()
    ctypes.CDLL(str(launcher)).hidet_get_workspace_size(sizes)
    return {memory: size for memory, size in zip(KINDS_OF_MEMORY, sizes, strict=True) if size}
