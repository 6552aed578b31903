"""The search proper: states the problem for a graph on a cluster, solves it, and writes the plan down."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hidet.graph import FlowGraph, Operator

from hidet_dist.connect import connect, connect_all, reduce_seconds
from hidet_dist.errors import ConfigError, InfeasibleError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.search.ilp import Edge, Problem, evaluate
from hidet_dist.search.optimum import optimize
from hidet_dist.spec import OperatorPlan, OpShardSpec, Plan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.plan import ConnectionPlan
from hidet_dist.view import GraphView


def search(
    graph: FlowGraph,
    cluster: Cluster,
    mem_budget: int | None = None,
    input_specs: Sequence[TensorShardSpec | None] | None = None,
    output_specs: Sequence[TensorShardSpec | None] | None = None,
    solver: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-3,
) -> Plan:
    """Find the plan of least predicted time.

    Parameters
    ----------
    graph: FlowGraph
        The graph as traced, before ``hidet.graph.optimize``.
    cluster: Cluster
        The machine, with the mesh to plan for.
    mem_budget: int, optional
        Bytes of weights that each device may hold; the device's memory when not given.
    input_specs, output_specs: sequence of TensorShardSpec or None, optional
        How graph inputs arrive and outputs are wanted; None stands for replicated.
    solver, time_limit_seconds, gap:
        The ILP solver (``highs`` or ``cbc``), its time limit, and the relative gap to stop at.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget; it states the least budget that would do.
    ConfigError, SpecError
        When the input or output specs do not fit the graph.
    SolverError
        When the solver fails or finds nothing in time.
    """
    return find(graph, cluster, mem_budget, input_specs, output_specs, solver, time_limit_seconds, gap).plan


@dataclass(frozen=True)
class Found:
    """A plan, how far it can be from the best one, and the seconds below which there is none.

    ``gap`` is relative: ``(plan.seconds - bound_seconds) / plan.seconds``.
    """

    plan: Plan
    gap: float
    bound_seconds: float


Allow = Callable[[Operator, OpShardSpec], bool]


def find(
    graph: FlowGraph,
    cluster: Cluster,
    mem_budget: int | None = None,
    input_specs: Sequence[TensorShardSpec | None] | None = None,
    output_specs: Sequence[TensorShardSpec | None] | None = None,
    solver: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-3,
    weight_specs: Mapping[str, TensorShardSpec] | None = None,
    allow: Allow | None = None,
) -> Found:
    """As :func:`search`, with the bound that proves the plan, and with less to choose from.

    Parameters
    ----------
    weight_specs: mapping, optional
        How weights lie, by name (``w0``, ...); the others are free.
    allow: callable, optional
        Says of an operator and a spec whether the spec may be chosen for it. An operator of which nothing is allowed
        keeps all its choices.
    """
    view = GraphView(graph)
    budget = cluster.device.memory_bytes if mem_budget is None else mem_budget
    with _collector_paused():
        return _found(
            view,
            cluster,
            _state(view, cluster, budget, input_specs, output_specs, weight_specs or {}, allow),
            budget,
            solver,
            time_limit_seconds,
            gap,
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A search makes millions of small tuples and no cycles: looking for cycles among them is time lost."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _found(
    view: GraphView,
    cluster: Cluster,
    statement: _Statement,
    budget: int,
    solver: str,
    time_limit_seconds: float | None,
    gap: float,
) -> Found:
    least = sum(min(statement.problem.memory[entity]) for entity in statement.weights)
    if least > budget:
        raise InfeasibleError(
            f"No plan fits mem_budget = {budget} bytes a device: with every weight split as far as it goes over "
            f"{cluster.mesh}, a device holds {least} bytes. Give at least {least} bytes, or more devices.",
            least,
        )
    solution = optimize(statement.problem, solver, time_limit_seconds, gap)
    plan = _plan(view, cluster, statement, solution.choices)
    return Found(plan, solution.gap, solution.seconds * (1 - solution.gap))


@dataclass
class _Statement:
    """The problem, and what its entities are: operators first, then weights, inputs, outputs."""

    problem: Problem
    choices: list[tuple[Choice, ...]]
    notes: list[str]
    weights: range
    weight_specs: list[list[TensorShardSpec]]
    inputs: list[TensorShardSpec]
    outputs: list[TensorShardSpec]


def _state(
    view: GraphView,
    cluster: Cluster,
    budget: int,
    input_specs: Sequence[TensorShardSpec | None] | None,
    output_specs: Sequence[TensorShardSpec | None] | None,
    pinned: Mapping[str, TensorShardSpec],
    allow: Allow | None,
) -> _Statement:
    mesh = cluster.mesh
    table = RuleTable(mesh)
    choices, notes, cost, memory = [], [], [], []
    costs_of: dict[int, list[float]] = {}  # twins have the very same choices
    for op in view.operators:
        rule, own = table(op)
        if allow is not None:
            own = tuple(choice for choice in own if allow(op, choice.spec)) or own
        choices.append(own)
        notes.append("" if rule.definition is not None else f"replicated: {rule.note}")
        dtype = op.outputs[0].dtype.name
        if id(own) not in costs_of:
            costs_of[id(own)] = [sum(_seconds(view, cluster, op.outputs, choice, dtype)) for choice in own]
        cost.append(costs_of[id(own)])
        memory.append([0] * len(own))
    weights = range(len(cost), len(cost) + len(view.weights))
    for name, spec in pinned.items():
        if name not in view.weights:
            raise ConfigError(f"The graph has no weight {name!r} whose spec could be fixed.")
        try:
            spec.validate(view.shape(name), mesh)
        except SpecError as error:
            raise ConfigError(f"The spec of the weight {name} does not fit: {error}") from error
    weight_specs = [
        [pinned[name]] if name in pinned else _weight_specs(view.shape(name), cluster) for name in view.weights
    ]
    for name, specs in zip(view.weights, weight_specs, strict=True):
        cost.append([0.0] * len(specs))
        memory.append([view.nbytes(name) // spec.num_shards(mesh) for spec in specs])
    inputs = _fixed(view, view.inputs, input_specs, cluster, "input")
    outputs = _fixed(view, view.outputs, output_specs, cluster, "output")
    cost += [[0.0]] * (len(inputs) + len(outputs))
    memory += [[0]] * (len(inputs) + len(outputs))

    # Who makes each tensor, and in which spec under each of its choices.
    made: dict[str, tuple[int, list[TensorShardSpec]]] = {}
    for i, op in enumerate(view.operators):
        for o, y in enumerate(op.outputs):
            made[view.names[y]] = (i, [choice.spec.out_specs[o] for choice in choices[i]])
    for i, name in enumerate(view.weights):
        made[name] = (weights[i], weight_specs[i])
    for i, name in enumerate(view.inputs):
        made[name] = (weights.stop + i, [inputs[i]])
    wanted: list[tuple[str, int, list[TensorShardSpec]]] = []
    for name, use in view.uses():
        if use.operator is None:
            wanted.append((name, weights.stop + len(inputs) + use.position, [outputs[use.position]]))
        else:
            specs = [choice.spec.in_specs[use.position] for choice in choices[use.operator]]
            wanted.append((name, use.operator, specs))

    numbering: dict[str, dict[TensorShardSpec, int]] = {}
    for name, (_, specs) in made.items():
        numbering[name] = {spec: n for n, spec in enumerate(dict.fromkeys(specs))}
    for name, _, specs in wanted:
        for spec in specs:
            numbering[name].setdefault(spec, len(numbering[name]))
    tensors = {name: n for n, name in enumerate(numbering)}
    prices: dict[tuple[object, ...], tuple[tuple[float, ...], ...]] = {}

    def price(name: str) -> tuple[tuple[float, ...], ...]:
        specs = tuple(numbering[name])
        key = (view.shape(name), view.itemsize(name), specs)
        if key not in prices:
            prices[key] = connect_all(key[0], view.tensors[name].dtype, specs, specs, cluster)
        return prices[key]

    edges = []
    for name, consumer, specs in wanted:
        producer, produced = made[name]
        numbers = numbering[name]
        edges.append(
            Edge(
                tensors[name],
                producer,
                consumer,
                tuple(numbers[spec] for spec in produced),
                tuple(numbers[spec] for spec in specs),
                price(name),
            )
        )
    return _Statement(Problem(cost, memory, budget, edges), choices, notes, weights, weight_specs, inputs, outputs)


def _seconds(
    view: GraphView, cluster: Cluster, outputs: Sequence[object], choice: Choice, dtype: str
) -> tuple[float, float]:
    """Predicted seconds of the local operator, and of its reduce functions."""
    moved = choice.read_bytes + choice.written_bytes
    compute = cluster.device.operator_seconds(choice.operations, moved, dtype) if moved else 0.0
    reduce = 0.0
    for o, fns in enumerate(choice.spec.reduce_fns):
        if fns:
            name = view.names[outputs[o]]
            partial = choice.spec.partial_spec(o)
            reduce += reduce_seconds(view.shape(name), view.tensors[name].dtype, partial, fns, cluster)
    return compute, reduce


def _weight_specs(shape: tuple[int, ...], cluster: Cluster) -> list[TensorShardSpec]:
    """Every way to lay out a weight: each mesh axis splits one dim that it divides, or none; replicated first."""
    specs: dict[TensorShardSpec, None] = {}
    for dims in itertools.product((None, *range(len(shape))), repeat=cluster.mesh.ndim):
        per_dim: list[list[int]] = [[] for _ in shape]
        for axis, dim in enumerate(dims):
            if dim is not None and cluster.mesh.shape[axis] > 1:
                per_dim[dim].append(axis)
        spec = TensorShardSpec(tuple(tuple(axes) for axes in per_dim))
        if spec.fits(shape, cluster.mesh):
            specs.setdefault(spec)
    return list(specs)


def _fixed(
    view: GraphView, names: Sequence[str], specs: Sequence[TensorShardSpec | None] | None, cluster: Cluster, what: str
) -> list[TensorShardSpec]:
    if specs is not None and len(specs) != len(names):
        raise ConfigError(f"The graph has {len(names)} {what}s but {len(specs)} {what} specs are given.")
    result = []
    for number, name in enumerate(names):
        spec = (specs[number] if specs else None) or TensorShardSpec.replicated(len(view.shape(name)))
        try:
            spec.validate(view.shape(name), cluster.mesh)
        except SpecError as error:
            raise ConfigError(f"The spec of {what} {number} does not fit: {error}") from error
        result.append(spec)
    return result


def _plan(view: GraphView, cluster: Cluster, statement: _Statement, picks: Sequence[int]) -> Plan:
    def tensor(name: str, spec: TensorShardSpec) -> TensorPlan:
        return TensorPlan(name, view.shape(name), view.tensors[name].dtype.name, view.nbytes(name), spec)

    weight_specs = [specs[picks[e]] for e, specs in zip(statement.weights, statement.weight_specs, strict=True)]
    lies: dict[str, TensorShardSpec] = dict(zip(view.inputs, statement.inputs, strict=True))
    lies.update(zip(view.weights, weight_specs, strict=True))
    chosen = [statement.choices[i][picks[i]] for i in range(len(view.operators))]
    for op, choice in zip(view.operators, chosen, strict=True):
        lies.update(zip((view.names[y] for y in op.outputs), choice.spec.out_specs, strict=True))

    paid: set[tuple[str, TensorShardSpec]] = set()
    at: dict[int | None, list[ConnectionPlan]] = {}
    for name, use in view.uses():
        target = (
            statement.outputs[use.position]
            if use.operator is None
            else chosen[use.operator].spec.in_specs[use.position]
        )
        if target != lies[name] and (name, target) not in paid:
            paid.add((name, target))
            found = connect(view.shape(name), view.tensors[name].dtype, lies[name], target, cluster)
            steps = tuple(map(str, found.steps))
            at.setdefault(use.operator, []).append(ConnectionPlan(name, lies[name], target, steps, found.seconds))
    operators = []
    for i, (op, choice) in enumerate(zip(view.operators, chosen, strict=True)):
        compute, reduce = _seconds(view, cluster, op.outputs, choice, op.outputs[0].dtype.name)
        connections = tuple(at.get(i, ()))
        operators.append(OperatorPlan(i, op.name, choice.spec, compute, reduce, connections, statement.notes[i]))
    stage = StagePlan(
        cluster.mesh,
        view.fingerprint(),
        tuple(operators),
        tuple(map(tensor, view.weights, weight_specs)),
        tuple(map(tensor, view.inputs, statement.inputs)),
        tuple(map(tensor, view.outputs, statement.outputs)),
        tuple(at.get(None, ())),
    )
    plan = Plan((stage,))
    # The plan's own sum and the solver's objective are two ways to the same figure.
    assert math.isclose(plan.seconds, evaluate(statement.problem, picks), rel_tol=1e-9, abs_tol=1e-12)
    return plan
