"""The check of whole graphs: random valid plans, partitioned and run for all ranks, against the whole graph.

The oracle runs them instead of compiled kernels, since a plan has many local operators. The check covers the plan and
its partition: the combination of choices, conversions, reduce functions and weight shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hidet.graph import FlowGraph, Tensor
from hidet.ir.expr import SymbolVar

from hidet_dist.machine import builtin
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import CommunicationOp, Program, partition_graph
from hidet_dist.partitioning.proof import with_conversions
from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.rule import RuleTable
from hidet_dist.soundness.check import reduced, shape_of
from hidet_dist.soundness.oracle import evaluate, numpy_dtype
from hidet_dist.spec import DeviceMesh, OperatorPlan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.extents import extents_of
from hidet_dist.view import GraphView
from hidet_dist.weights import source_of

Array = np.ndarray[Any, Any]
Rng = np.random.Generator


def random_spec(shape: Sequence[int], mesh: DeviceMesh, rng: Rng, padded: bool = False) -> TensorShardSpec:
    """Draw a random spec that fits a tensor of ``shape`` on the mesh; with ``padded``, perhaps with padding."""
    options = []
    for dims in itertools.product((None, *range(len(shape))), repeat=mesh.ndim):
        per_dim: list[list[int]] = [[] for _ in shape]
        for axis, dim in enumerate(dims):
            if dim is not None:
                per_dim[dim].append(axis)
        spec = TensorShardSpec(tuple(map(tuple, per_dim)))
        if spec.fits(shape, mesh, padded):
            options.append(spec)
    return options[int(rng.integers(len(options)))]


def random_stage(view: GraphView, mesh: DeviceMesh, table: RuleTable, rng: Rng) -> StagePlan:
    """Draw a random choice for every operator, weight, input and output; the plan's seconds are all 0."""

    def tensor(name: str) -> TensorPlan:
        shape = view.shape(name)
        spec = random_spec(view.pieces(name)[0], mesh, rng, padded=name in view.weights)
        dtype, written = view.tensors[name].dtype.name, view.written(name)
        return TensorPlan(name, shape, dtype, view.nbytes(name), spec, written=written)

    operators = []
    for number, op in enumerate(view.operators):
        _, choices = table(op)
        choice = choices[int(rng.integers(len(choices)))]
        operators.append(OperatorPlan(number, op.name, choice.spec, 0.0, 0.0))
    weights, inputs, outputs = (tuple(map(tensor, names)) for names in (view.weights, view.inputs, view.outputs))
    stage = StagePlan(mesh, view.fingerprint(), tuple(operators), weights, inputs, outputs, (), view.symbols)
    return with_conversions(view, stage, builtin("cpu", mesh))


def evaluate_graph(graph: FlowGraph, inputs: Sequence[Array]) -> list[Array]:
    """Evaluate a whole graph by the oracle."""
    sizes = {
        extent.name: size
        for x, value_of_input in zip(graph.inputs, inputs, strict=True)
        for extent, size in zip(extents_of(x), value_of_input.shape, strict=True)
        if isinstance(extent, SymbolVar)
    }
    values: dict[Tensor, Array] = dict(zip(graph.inputs, inputs, strict=True))

    def value(x: Tensor) -> Array:
        if x not in values:
            data = source_of(x).read([slice(0, size) for size in shape_of(x)])
            values[x] = data.double().numpy() if x.dtype.is_float() else data.numpy().astype(numpy_dtype(x.dtype))
        return values[x]

    for op in graph.nodes:
        results = evaluate(definition_of(op), [value(x) for x in op.inputs], sizes)
        values.update(zip(op.outputs, results, strict=True))
    return [value(y) for y in graph.outputs]


def evaluate_program(program: Program, inputs: Sequence[Array]) -> list[list[Array]]:
    """Evaluate a program by the oracle, operator by operator for all ranks; return each rank's outputs."""
    mesh = program.mesh
    sizes = program.sizes([whole.shape for whole in inputs])
    shards = [
        [
            whole[plan.spec.slices(whole.shape, mesh, mesh.coordinate(rank))]
            for whole, plan in zip(inputs, program.inputs, strict=True)
        ]
        for rank in range(mesh.size)
    ]
    return evaluate_shards(program, shards, sizes)


def evaluate_shards(
    program: Program, inputs: Sequence[Sequence[Array]], sizes: Mapping[str, int] | None = None
) -> list[list[Array]]:
    """Evaluate a program as :func:`evaluate_program` does, from each rank's shards of the inputs.

    ``sizes`` are the sizes of the local symbolic dims.
    """
    mesh, sizes = program.mesh, sizes or {}
    values: list[dict[Tensor, Array]] = []
    for rank in range(mesh.size):
        rank_values: dict[Tensor, Array] = dict(zip(program.graph.inputs, inputs[rank], strict=False))
        data = program.data_of(rank)
        for name, placeholder in program.weight_placeholders.items():
            rank_values[placeholder] = data[name].numpy().astype(numpy_dtype(placeholder.dtype))
        if program.coordinate is not None:
            rank_values[program.coordinate] = np.array(mesh.coordinate(rank), np.int32)
        values.append(rank_values)
    shares = [program.share_sizes(rank) for rank in range(mesh.size)]
    same = _Same()
    for rank_values in values:
        rank_values.update({x: same(value) for x, value in rank_values.items()})
    for node in program.graph.nodes:
        if isinstance(node, CommunicationOp):
            results = [
                [same(y)] for y in _communicate(mesh, node, [rank_values[node.inputs[0]] for rank_values in values])
            ]
        else:
            task = definition_of(node)
            # Ranks with the same inputs and shares compute the same.
            done: dict[tuple[int, ...], list[Array]] = {}
            results = []
            for rank_values, own in zip(values, shares, strict=True):
                arguments = [rank_values[x] for x in node.inputs]
                key = (*own.values(), *map(id, arguments))
                if key not in done:
                    done[key] = [same(y) for y in evaluate(task, arguments, {**sizes, **own})]
                results.append(done[key])
        for rank_values, result in zip(values, results, strict=True):
            rank_values.update(zip(node.outputs, result, strict=True))
    return [[rank_values[y] for y in program.graph.outputs] for rank_values in values]


class _Same:
    """A map from arrays of equal content to one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], str, bytes], Array] = {}

    def __call__(self, x: Array) -> Array:
        return self._known.setdefault((x.shape, x.dtype.str, x.tobytes()), x)


def _communicate(mesh: DeviceMesh, op: CommunicationOp, sent: list[Array]) -> list[Array]:
    received = []
    for rank in range(mesh.size):
        peers = mesh.peers(rank, op.mesh_axes)
        parts = [sent[peer] for peer in peers]
        y = op.collective.result(parts, peers.index(rank), lambda parts: reduced(op.reduce_op, parts), list, np.stack)
        received.append(np.asarray(y).astype(sent[rank].dtype))
    return received


def check_stage(
    graph: NormalGraph,
    stage: StagePlan,
    inputs: Sequence[Array],
    whole: Sequence[Array],
    rules: RuleTable | None = None,
) -> str:
    """Describe the first wrong output of a plan; empty if every rank has its shard of every output.

    Rules are shared with the table ``rules``.
    """
    mesh = stage.mesh
    results = evaluate_program(partition_graph(graph, stage, rules=rules), inputs)
    for number, (want, tensor) in enumerate(zip(whole, stage.outputs, strict=True)):
        for rank, result in enumerate(results):
            expected = want[tensor.spec.slices(want.shape, mesh, mesh.coordinate(rank))]
            if result[number].shape != expected.shape:
                return f"output {number} of rank {rank} has the shape {result[number].shape}, not {expected.shape}"
            if not np.allclose(result[number], expected, rtol=1e-6, atol=1e-7):
                return f"output {number} of rank {rank} differs"
    return ""


def graph_inputs(graph: FlowGraph, rng: Rng) -> list[Array]:
    """Draw random inputs of a graph; integers are small and not negative, so that they index any table."""
    inputs: list[Array] = []
    for x in graph.inputs:
        integer = x.dtype.is_integer()
        value = rng.integers(0, 3, shape_of(x)) if integer else rng.uniform(-1, 1, shape_of(x))
        inputs.append(np.asarray(value).astype(numpy_dtype(x.dtype)))
    return inputs
