"""The check of whole graphs: random valid plans, partitioned and run for all ranks, against the whole graph.

The oracle runs them instead of compiled kernels, since a plan has many local operators. The check covers the plan and
its partition: the combination of choices, conversions, reduce functions and weight shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hidet.graph import FlowGraph, Tensor
from hidet.ir.expr import SymbolVar

from hidet_dist.machine import builtin
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import CollectiveOp, Program, partition_graph
from hidet_dist.partitioning.proof import with_conversions
from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.rule import NO_PARTS, OfferedParts, RuleTable
from hidet_dist.soundness.check import reduced, shape_of
from hidet_dist.soundness.oracle import evaluate, numpy_dtype
from hidet_dist.spec import DeviceMesh, OperatorPlan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.extents import extents_of
from hidet_dist.spec.parts import Parts
from hidet_dist.view import GraphView
from hidet_dist.weights import source_of
from hidet_dist.weights.states import initial_of, is_state, new_values, state_mark_of

Array = np.ndarray[Any, Any]
Rng = np.random.Generator


def random_spec(
    shape: Sequence[int], mesh: DeviceMesh, rng: Rng, padded: bool = False, offered: OfferedParts = NO_PARTS
) -> TensorShardSpec:
    """Draw a random spec that fits a tensor of ``shape`` on the mesh; with ``padded``, perhaps with padding.

    Axes split in the mesh's shares, or in parts that are ``offered``.
    """
    options = []
    ways: list[list[tuple[int | None, Parts]]] = [
        [(None, ()), *((dim, parts) for dim, size in enumerate(shape) for parts in offered.of(axis, size))]
        for axis in range(mesh.ndim)
    ]
    for chosen in itertools.product(*ways):
        per_dim: list[list[int]] = [[] for _ in shape]
        for axis, (dim, _) in enumerate(chosen):
            if dim is not None:
                per_dim[dim].append(axis)
        spec = TensorShardSpec(tuple(map(tuple, per_dim)), tuple(pair for _, pairs in chosen for pair in pairs))
        if spec.fits(shape, mesh, padded):
            options.append(spec)
    return options[int(rng.integers(len(options)))]


def random_stage(
    view: GraphView, mesh: DeviceMesh, table: RuleTable, rng: Rng, other: StagePlan | None = None
) -> StagePlan:
    """Draw a random choice for every operator, weight, input and output; the plan's seconds are all 0.

    With another plan of the graph, weights and states have the specs of that one.
    """

    def tensor(name: str, padded: bool = False) -> TensorPlan:
        shape = view.shape(name)
        spec = random_spec(view.pieces(name)[0], mesh, rng, padded, table.offered)
        dtype, written = view.tensors[name].dtype.name, view.written(name)
        return TensorPlan(name, shape, dtype, view.nbytes(name), spec, written=written)

    operators = []
    for number, op in enumerate(view.operators):
        _, choices = table(op)
        choice = choices[int(rng.integers(len(choices)))]
        operators.append(OperatorPlan(number, op.name, choice.spec, 0.0, 0.0))
    weights = tuple(tensor(name, padded=True) for name in view.weights) if other is None else other.weights
    inputs, outputs = (tuple(map(tensor, names)) for names in (view.inputs, view.outputs))
    states = tuple(map(tensor, view.states)) if other is None else other.states
    stage = StagePlan(
        mesh, view.fingerprint(), tuple(operators), weights, inputs, outputs, (), view.symbols, states=states
    )
    stage = _in_place(view, stage, table, rng, other is not None)
    return with_conversions(view, stage, builtin("cpu", mesh))


def _in_place(view: GraphView, stage: StagePlan, table: RuleTable, rng: Rng, keeps_states: bool) -> StagePlan:
    """Draw one spec for each state that is updated, unless it is to keep its own, and updates that have it."""
    operators, states = list(stage.operators), list(stage.states)
    for place, name in enumerate(view.states):
        updates = [number for number, state in view.updates.items() if state == name]
        if not updates:
            continue
        offered = [
            {
                choice.spec.in_specs[0]: choice.spec
                for choice in table(view.operators[number])[1]
                if choice.spec.in_specs[0] == choice.spec.out_specs[0] and not choice.spec.reduce_fns[0]
            }
            for number in updates
        ]
        spec, shape = states[place].spec, view.pieces(name)[0]
        if not keeps_states:
            every = [s for s in offered[0] if all(s in of_one for of_one in offered)]
            common = [s for s in every if s.fits(shape, stage.mesh, False)]
            spec = common[int(rng.integers(len(common)))]
        states[place] = replace(states[place], spec=spec)
        for number, of_one in zip(updates, offered, strict=True):
            operators[number] = replace(operators[number], spec=of_one[spec])
    return replace(stage, operators=tuple(operators), states=tuple(states))


def evaluate_graph(
    graph: FlowGraph, inputs: Sequence[Array], states: MutableMapping[str, Array] | None = None
) -> list[Array]:
    """Evaluate a whole graph by the oracle; return its outputs without new values of states.

    ``states`` are the values that the call finds, by name, and then those that it leaves. A state that is missing has
    its initial values.
    """
    sizes = {
        extent.name: size
        for x, value_of_input in zip(graph.inputs, inputs, strict=True)
        for extent, size in zip(extents_of(x), value_of_input.shape, strict=True)
        if isinstance(extent, SymbolVar)
    }
    values: dict[Tensor, Array] = dict(zip(graph.inputs, inputs, strict=True))
    kept: MutableMapping[str, Array] = {} if states is None else states

    def value(x: Tensor) -> Array:
        mark = state_mark_of(x)
        if mark is not None:
            return kept.setdefault(mark.name, initial_values(x))
        if x not in values:
            values[x] = _array(source_of(x).read([slice(0, size) for size in shape_of(x)]), numpy_dtype(x.dtype))
        return values[x]

    for op in graph.nodes:
        results = evaluate(definition_of(op), [value(x) for x in op.inputs], sizes)
        values.update(zip(op.outputs, results, strict=True))
    new = new_values(graph.outputs)
    made = set(new.values())
    outputs = [value(y) for y in graph.outputs if y not in made and not is_state(y)]
    for old, y in new.items():
        mark = state_mark_of(old)
        assert mark is not None
        kept[mark.name] = value(y)
    return outputs


def initial_values(state: Tensor) -> Array:
    """Return the values of a whole state before the first call, in the oracle's dtype."""
    source, dtype = initial_of(state), numpy_dtype(state.dtype)
    if source is None:
        return np.zeros(shape_of(state), dtype)
    return _array(source.read([slice(0, size) for size in shape_of(state)]), dtype)


def _array(data: torch.Tensor, dtype: np.dtype[Any]) -> Array:
    """Convert stored data to an array of the oracle's ``dtype``. NumPy lacks bfloat16."""
    return np.asarray((data.double() if data.is_floating_point() else data).numpy()).astype(dtype)


def evaluate_program(
    program: Program, inputs: Sequence[Array], states: Sequence[Mapping[str, Array]] = ()
) -> list[list[Array]]:
    """Evaluate a program by the oracle, operator by operator for all ranks; return each rank's outputs.

    ``states`` are each rank's shards of the states, by their names in the plan. Behind a rank's outputs are its shards
    of ``program.new_values``.
    """
    mesh = program.mesh
    sizes = program.sizes([whole.shape for whole in inputs])
    shards = [
        [
            whole[plan.spec.slices(whole.shape, mesh, mesh.coordinate(rank))]
            for whole, plan in zip(inputs, program.inputs, strict=True)
        ]
        for rank in range(mesh.size)
    ]
    return evaluate_shards(program, shards, sizes, states)


def evaluate_shards(
    program: Program,
    inputs: Sequence[Sequence[Array]],
    sizes: Mapping[str, int] | None = None,
    states: Sequence[Mapping[str, Array]] = (),
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
            rank_values[placeholder] = _array(data[name], numpy_dtype(placeholder.dtype))
        if program.coordinate is not None:
            rank_values[program.coordinate] = np.array(mesh.coordinate(rank), np.int32)
        for name, placeholder in program.state_placeholders.items():
            rank_values[placeholder] = states[rank][name]
        values.append(rank_values)
    parts = [program.part_sizes(rank) for rank in range(mesh.size)]
    same = _Same()
    for rank_values in values:
        rank_values.update({x: same(value) for x, value in rank_values.items()})
    for node in program.graph.nodes:
        if isinstance(node, CollectiveOp):
            given = [[rank_values[x] for x in node.inputs] for rank_values in values]
            results = [[same(y)] for y in _communicate(mesh, node, given)]
        else:
            task = definition_of(node)
            # Ranks with the same inputs and parts compute the same.
            done: dict[tuple[int, ...], list[Array]] = {}
            results = []
            for rank_values, own in zip(values, parts, strict=True):
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


def _communicate(mesh: DeviceMesh, op: CollectiveOp, inputs: Sequence[Sequence[Array]]) -> list[Array]:
    received = []
    for rank in range(mesh.size):
        peers = mesh.peers(rank, op.mesh_axes)
        y = op.result([inputs[peer] for peer in peers], peers.index(rank), lambda parts: reduced(op.reduce_op, parts))
        received.append(np.asarray(y).astype(inputs[rank][0].dtype))
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
    program = partition_graph(graph, stage, rules=rules)
    return _difference(stage, evaluate_program(program, inputs, initial_shards(graph, stage)), whole)


def initial_shards(graph: NormalGraph, stage: StagePlan) -> list[dict[str, Array]]:
    """Return each rank's shards of the states before the first call, by their names in the plan."""
    view = GraphView(graph, stage.symbols)
    return _shards(stage, {state.name: initial_values(view.tensors[state.name]) for state in stage.states})


def _shards(stage: StagePlan, whole: Mapping[str, Array]) -> list[dict[str, Array]]:
    mesh = stage.mesh
    return [
        {
            state.name: whole[state.name][state.spec.slices(state.shape, mesh, mesh.coordinate(rank))]
            for state in stage.states
        }
        for rank in range(mesh.size)
    ]


def check_calls(
    graph: NormalGraph,
    stages: Sequence[StagePlan],
    calls: Sequence[Sequence[Array]],
    rules: RuleTable | None = None,
) -> str:
    """Describe the first wrong output or state of plans over several calls; empty if all are right.

    The plans have the same weights and states, in the same specs. They run in turn. ``calls`` are the inputs of each
    call. The functional graph is applied as often. Rules are shared with the table ``rules``.
    """
    programs = [partition_graph(graph, stage, rules=rules) for stage in stages]
    shards = initial_shards(graph, stages[0])
    states: dict[str, Array] = {}
    view = GraphView(graph, stages[0].symbols)
    names = {state.name: mark.name for state in stages[0].states if (mark := state_mark_of(view.tensors[state.name]))}
    for number, inputs in enumerate(calls):
        stage, program = stages[number % len(stages)], programs[number % len(stages)]
        whole = evaluate_graph(graph, inputs, states)
        results = evaluate_program(program, inputs, shards)
        count = len(stage.outputs)
        difference = _difference(stage, results, whole)
        for rank, result in enumerate(results):
            shards[rank].update(zip(program.new_values, result[count:], strict=True))
        for rank, expected in enumerate(_shards(stage, {name: states[label] for name, label in names.items()})):
            for name, want in expected.items():
                if not difference and not np.allclose(shards[rank][name], want, rtol=1e-6, atol=1e-7):
                    difference = f"the state {names[name]} of rank {rank} differs"
        if difference:
            return f"in call {number}, {difference}"
    return ""


def _difference(stage: StagePlan, results: Sequence[Sequence[Array]], whole: Sequence[Array]) -> str:
    """Describe the first wrong output of each rank's outputs; empty if all are right."""
    mesh = stage.mesh
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
