"""The simulator of one program: it runs the program for all ranks in one process, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import reduce as fold
from types import MappingProxyType
from typing import Any

import hidet
import numpy as np
import torch
from hidet.ffi import runtime_api
from hidet.graph import FlowGraph, Tensor

from hidet_dist.artifacts.manifest import COORDINATE
from hidet_dist.compat.cpu_build import precompile_headers
from hidet_dist.compile.blocks import BlockOp
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.errors import InputError, PartitionError
from hidet_dist.partitioning import CollectiveOp, Program, WaitOp
from hidet_dist.spec import DeviceMesh, TensorPlan

_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


def simulate(
    program: Program,
    inputs: Sequence[Any],
    graph: FlowGraph | None = None,
    states: MutableMapping[str, np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Run a program on the CPU for all ranks and assemble its whole outputs.

    Parameters
    ----------
    program: Program
        The program. Each operator's compiled CPU kernel runs once per rank.
    inputs: sequence of arrays
        The whole graph inputs, of NumPy or PyTorch; each rank receives its shards. NumPy has no bfloat16: arrays of
        float32 are rounded to it.
    graph: FlowGraph, optional
        An optimized form of ``program.graph``, with the same inputs and outputs, to run instead.
    states: mutable mapping of names to arrays, optional
        The whole states that the call finds, by the users' names; it is given those that the call leaves. A state that
        is missing has its initial values. Give one mapping to call after call. Values of bfloat16 are float32 here.

    Returns
    -------
    The whole graph outputs; those of bfloat16 as float32.

    Raises
    ------
    InputError
        When the inputs or the states do not fit the program.
    PartitionError
        When two ranks disagree on a piece of an output or of a state that both hold.
    """
    mesh = program.mesh
    kept: MutableMapping[str, np.ndarray] = {} if states is None else states
    old = {state.name: _old_value(program, state, kept) for state in program.states}
    arrays = checked_inputs("program", inputs, [[(plan.dtype, plan.written or plan.shape)] for plan in program.inputs])
    sizes = program.sizes([x.shape for x in arrays])
    for name, size in sizes.items():
        runtime_api.set_symbol_value(name, size)
    shards = [split(plan, mesh, x) for x, plan in zip(arrays, program.inputs, strict=True)]
    of_states = {state.name: split(state, mesh, old[state.name]) for state in program.states}
    results = simulate_shards(program, shards, graph, of_states)
    outputs, new = results[: len(program.outputs)], results[len(program.outputs) :]
    updated = dict(zip(program.new_values, new, strict=True))
    for state in program.states:
        whole = assemble(state, mesh, updated[state.name]) if state.name in updated else old[state.name]
        kept[state.label or state.name] = whole
    return [assemble(plan, mesh, parts) for plan, parts in zip(program.outputs, outputs, strict=True)]


def _old_value(program: Program, state: TensorPlan, states: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the whole value of a state that a call finds. Raises InputError if it does not fit."""
    name = state.label or state.name
    dtype = "float32" if state.dtype == "bfloat16" else state.dtype
    if name in states:
        value = states[name]
        if value.shape != state.shape or str(value.dtype) != dtype:
            raise InputError(f"The state {name} is {dtype}{list(state.shape)}; got {value.dtype}{list(value.shape)}.")
        return value
    if state.name in program.initial:
        return _as_array(program.initial[state.name].read([slice(0, size) for size in state.shape]))
    return np.zeros(state.shape, dtype)


def checked_inputs(
    what: str, inputs: Sequence[Any], expected: Sequence[Sequence[tuple[str, Sequence[int | str]]]]
) -> list[np.ndarray]:
    """Check whole inputs against the dtypes and shapes that each of their readers requires; return them as arrays.

    Arrays of bfloat16, which NumPy lacks, are of float32 here.

    Parameters
    ----------
    what: str
        The name of what is run, for errors.
    inputs: sequence of arrays
        The inputs, of NumPy or PyTorch.
    expected: sequence of sequences
        For each input, the dtype and the shape by each reader. A symbolic dim, a string, may have any size.

    Raises
    ------
    InputError
        When the number of inputs, a dtype or a shape differs.
    """
    if len(inputs) != len(expected):
        raise InputError(f"The {what} has {len(expected)} inputs; {len(inputs)} were given.")
    for number, (x, readers) in enumerate(zip(inputs, expected, strict=True)):
        for dtype, shape in readers:
            fits = len(x.shape) == len(shape) and all(
                isinstance(extent, str) or extent == size for extent, size in zip(shape, x.shape, strict=True)
            )
            own = str(x.dtype).removeprefix("torch.")
            if not fits or (own != dtype and (own, dtype) != ("float32", "bfloat16")):
                text = ", ".join(map(str, shape))
                raise InputError(f"Input {number} is {own}{list(x.shape)}, not {dtype}[{text}].")
    return [_as_array(x) for x in inputs]


def _as_array(x: Any) -> np.ndarray:
    """Convert a tensor of any library to an array; bfloat16 becomes float32."""
    if isinstance(x, Tensor):
        x = x.torch() if x.dtype.name == "bfloat16" else x.numpy()
    if isinstance(x, torch.Tensor):
        x = (x.float() if x.dtype is torch.bfloat16 else x).detach().cpu().numpy()
    values: np.ndarray = x.astype(np.float32) if str(x.dtype) == "bfloat16" else x
    return values


def _as_tensor(values: np.ndarray, dtype: str) -> Tensor:
    """Convert an array to a tensor of a dtype; NumPy has no bfloat16, so that such values are float32 before."""
    return hidet.from_torch(torch.from_numpy(np.array(values, order="C")).to(getattr(torch, dtype)))


def simulate_shards(
    program: Program,
    inputs: Sequence[Sequence[np.ndarray]],
    graph: FlowGraph | None = None,
    states: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({}),
) -> list[list[np.ndarray]]:
    """Run a program as :func:`simulate` does, from the shards of each input, by rank, to those of each output.

    ``states`` are the shards of each state's old value, by its name in the plan. Behind the outputs are the new values
    of ``program.new_values``. The sizes of symbolic dims must have been set in hidet's runtime.
    """
    mesh = program.mesh
    graph = program.graph if graph is None else graph
    ranks = range(mesh.size)
    parts = [program.part_sizes(rank) for rank in ranks]
    values = [_given_values(program, rank, inputs, states) for rank in ranks]
    with cpu_target():  # hidet's own flags take it that nothing is infinite or NaN
        precompile_headers()
        graph._build_nodes()
        kernels = {node: node.compiled_task for node in graph.nodes if not isinstance(node, CollectiveOp | WaitOp)}
    for node in graph.nodes:
        arguments = [[x if x.storage is not None else values[r][x] for x in node.inputs] for r in ranks]
        if isinstance(node, CollectiveOp):
            results = [[y] for y in _communicate(mesh, node, [[_as_array(x) for x in own] for own in arguments])]
        elif isinstance(node, WaitOp):  # the simulated collective has ended already
            results = [a[:1] for a in arguments]
        else:
            results = []
            for rank, own in enumerate(arguments):
                for name, part in parts[rank].items():
                    runtime_api.set_symbol_value(name, part)
                results.append([node.block_of(*own)] if isinstance(node, BlockOp) else kernels[node].run_async(own))
        for r in ranks:
            values[r].update(zip(node.outputs, results[r], strict=True))
    return [[_as_array(values[r][y]) for r in ranks] for y in graph.outputs]


def _given_values(
    program: Program, rank: int, inputs: Sequence[Sequence[np.ndarray]], states: Mapping[str, Sequence[np.ndarray]]
) -> dict[Tensor, Tensor]:
    """Map what a rank's program reads and does not compute to tensors: inputs, states, weights, its coordinate."""
    data = program.data_of(rank)
    local: dict[Tensor, Tensor] = {}
    for x, shards in (
        *zip(program.graph.inputs, inputs, strict=False),
        *((program.state_placeholders[name], shards) for name, shards in states.items()),
    ):
        is_bfloat16 = x.dtype.name == "bfloat16"
        shard = shards[rank]
        local[x] = _as_tensor(shard, "bfloat16") if is_bfloat16 else hidet.asarray(np.ascontiguousarray(shard))
    for name, placeholder in program.weight_placeholders.items():
        local[placeholder] = hidet.from_torch(data[name])
    if program.coordinate is not None:
        local[program.coordinate] = hidet.from_torch(data[COORDINATE])
    return local


def _communicate(mesh: DeviceMesh, op: CollectiveOp, inputs: Sequence[Sequence[np.ndarray]]) -> list[Tensor]:
    """Compute what each rank receives, from the inputs of all ranks."""
    received = []
    for rank in range(mesh.size):
        peers = mesh.peers(rank, op.mesh_axes)
        y = op.result(
            [inputs[peer] for peer in peers], peers.index(rank), lambda parts: fold(_REDUCE[op.reduce_op], parts)
        )
        received.append(_as_tensor(y, op.outputs[0].dtype.name))
    return received


def split(plan: TensorPlan, mesh: DeviceMesh, whole: np.ndarray) -> list[np.ndarray]:
    """The shards of a whole input, by rank."""
    return [whole[plan.spec.slices(whole.shape, mesh, mesh.coordinate(rank))] for rank in range(mesh.size)]


def assemble(plan: TensorPlan, mesh: DeviceMesh, shards: Sequence[np.ndarray]) -> np.ndarray:
    """Assemble a whole output from its shards, by rank. Raises PartitionError where copies of a piece differ."""
    shape = tuple(
        size * mesh.group_size(axes) if plan.spec.is_even(dim, mesh) else plan.shape[dim]
        for dim, (size, axes) in enumerate(zip(shards[0].shape, plan.spec.mesh_axes_per_dim, strict=True))
    )
    whole = np.empty(shape, shards[0].dtype)
    written: dict[tuple[int, ...], np.ndarray] = {}
    for rank, shard in enumerate(shards):
        coordinate = mesh.coordinate(rank)
        offset = plan.spec.shard_offset(shape, mesh, coordinate)
        first = written.setdefault(offset, shard)
        if not np.allclose(first, shard, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise PartitionError(
                f"Rank {rank} has different values of {plan.name} than an earlier rank with the same piece of it."
            )
        whole[plan.spec.slices(shape, mesh, coordinate)] = shard
    return whole
