"""The manifest's entry of a stage, and the layouts of its data, from a program and its kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import hidet
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.ir.expr import SymbolVar

from hidet_dist import native
from hidet_dist.artifacts import KernelLaunch, StageManifest, TensorSignature
from hidet_dist.artifacts.coherence import describe
from hidet_dist.artifacts.manifest import COORDINATE, IndexCheck, StateSignature
from hidet_dist.compile.backend import Backend
from hidet_dist.cost.work import local_nbytes
from hidet_dist.partitioning import Program
from hidet_dist.partitioning.collective_op import CollectiveOp
from hidet_dist.partitioning.program import communication_operators
from hidet_dist.spec import TensorPlan
from hidet_dist.spec.extents import Extent, extents_of, factors_of
from hidet_dist.weights import StoredLayout
from hidet_dist.weights.panels import PanelLayout, Panels


def stage_of(
    program: Program,
    graph: FlowGraph,
    target: Backend,
    kernel_names: Sequence[str],
    objects: Sequence[str],
    kernel_of_node: Sequence[int],
    candidates: Sequence[int],
    cublas: Sequence[bool],
    data: Sequence[str],
    constants: Sequence[str],
    libraries: tuple[str, ...],
    index_checks: tuple[IndexCheck, ...],
    panels: Mapping[str, Panels],
) -> StageManifest:
    """Make the manifest's entry of a stage, without its folder and the bytes for activations.

    ``graph`` is the optimized graph of ``program``, ``objects`` are the SHA-256 of its kernels' libraries, and
    ``panels`` are the arrangements of its weights in panels; the other arguments are those of
    :class:`hidet_dist.compile.CompiledProgram`.
    """
    sizes = program.planned_sizes()
    dtypes = {weight.name: weight.dtype for weight in program.weights}
    weight_bytes = sum(
        PanelLayout.of(dtypes[name], panels[name]).at(sizes).nbytes if name in panels else local_nbytes(tensor, sizes)
        for name, tensor in program.weight_placeholders.items()
        if name in data
    )
    return StageManifest(
        "",
        program.mesh.shape,
        program.mesh.axis_names,
        tuple(map(_signature, program.inputs, program.graph.inputs)),
        tuple(map(_signature, program.outputs, program.graph.outputs)),
        tuple(kernel_names),
        tuple(data),
        tuple(constants),
        tuple(map(_launch, graph.nodes, kernel_of_node)),
        libraries,
        program.symbols,
        program.local_symbols,
        tuple(candidates),
        None,
        weight_bytes,
        target.cuda_graph and all(op.can_be_captured for op in communication_operators(program.graph)),
        tuple(cublas),
        index_checks,
        program.interface,
        program.mesh.shares,
        panels,
        tuple(_state(program, state) for state in program.states),
        tuple(program.parts),
        tuple(objects),
    )


def layouts_of(
    program: Program, data: Sequence[str], constants: Mapping[str, Tensor], panels: Mapping[str, Panels]
) -> dict[str, StoredLayout]:
    """Map the names of weights and initial states in ``data``, the coordinate and constants to dtypes and shapes.

    The shape of a weight that has ``panels`` is that of its panels.
    """
    layouts: dict[str, StoredLayout] = {}
    for weight in program.weights:
        shape = extents_of(program.weight_placeholders[weight.name])
        if weight.name in panels:
            layouts[weight.name] = PanelLayout.of(weight.dtype, panels[weight.name])
        else:
            layouts[weight.name] = _layout(weight.dtype, shape)
    for state in program.states:
        if state.name in program.initial:
            local = extents_of(program.state_placeholders[state.name])
            layouts[program.initial_name(state.name)] = _layout(state.dtype, local)
    layouts[COORDINATE] = StoredLayout("int32", (program.mesh.ndim,))
    layouts.update({name: StoredLayout(x.dtype.name, tuple(int(n) for n in x.shape)) for name, x in constants.items()})
    return {name: layouts[name] for name in data}


def description_of(stage: StageManifest, layouts: Mapping[str, StoredLayout], target: Backend) -> str:
    """Make the description that is compiled into the stage's launcher."""
    return describe(
        stage,
        layouts,
        {
            "target": target.record.name,
            "arch": target.arch,
            "gpu": target.gpu_name,
            "cpu_features": target.cpu_features,
            "hidet_version": hidet.__version__,
            "abi_version": native.ABI_VERSION,
        },
    )


def _signature(tensor: TensorPlan, local: Tensor) -> TensorSignature:
    return TensorSignature(tensor.dtype, _written(local), tensor.written or tensor.shape, str(tensor.spec))


def _state(program: Program, state: TensorPlan) -> StateSignature:
    shape = _written(program.state_placeholders[state.name])
    initial = program.initial_name(state.name) if state.name in program.initial else ""
    return StateSignature(state.label or state.name, state.dtype, shape, state.shape, str(state.spec), initial)


def _written(local: Tensor) -> tuple[int | str, ...]:
    return tuple(extent if isinstance(extent, int) else str(extent) for extent in extents_of(local))


def _launch(node: Operator, kernel: int) -> KernelLaunch:
    outputs = (f"{y.dtype.name}[{', '.join(map(str, extents_of(y)))}]" for y in node.outputs)
    return KernelLaunch(kernel, ", ".join(outputs), node.description if isinstance(node, CollectiveOp) else "")


def _layout(dtype: str, shape: Sequence[Extent]) -> StoredLayout:
    """Make the layout of a shard, whose extents are products of a number and of the symbols of unequal parts."""
    products = [factors_of(extent) for extent in shape]
    numbers = tuple(math.prod(factor for factor in product if isinstance(factor, int)) for product in products)
    factors = ((dim, f.name) for dim, product in enumerate(products) for f in product if isinstance(f, SymbolVar))
    return StoredLayout(dtype, numbers, factors=tuple(factors))
