"""The statement of a problem: from a graph, its rules and a cost model to the entities and edges of the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hidet.graph import Operator

from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.search.cost import CostModel, operator_seconds
from hidet_dist.search.ilp import Edge, Problem
from hidet_dist.spec import OpShardSpec, TensorShardSpec
from hidet_dist.view import GraphView

Allow = Callable[[Operator, OpShardSpec], bool]


@dataclass
class Statement:
    """The problem, and what its entities are: operators first, then weights, inputs, outputs."""

    problem: Problem
    choices: list[tuple[Choice, ...]]
    notes: list[str]
    weights: range
    weight_specs: list[list[TensorShardSpec]]
    inputs: list[TensorShardSpec]
    outputs: list[TensorShardSpec]


def state(
    view: GraphView,
    cluster: Cluster,
    model: CostModel,
    budget: int,
    input_specs: Sequence[TensorShardSpec | None] | None,
    output_specs: Sequence[TensorShardSpec | None] | None,
    pinned: Mapping[str, TensorShardSpec],
    allow: Allow | None,
    table: RuleTable,
) -> Statement:
    """The problem of planning a graph: every operator's choices, every weight's layouts, what joins them."""
    mesh = cluster.mesh
    choices, notes, cost, memory = [], [], [], []
    costs_of: dict[int, list[float]] = {}  # twins have the very same choices
    for op in view.operators:
        rule, own = table(op)
        if allow is not None:
            own = tuple(choice for choice in own if allow(op, choice.spec)) or own
        choices.append(own)
        notes.append("" if rule.definition is not None else f"replicated: {rule.note}")
        if id(own) not in costs_of:
            costs_of[id(own)] = [sum(operator_seconds(model, op, choice)) for choice in own]
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
    prices: dict[tuple[tuple[int, ...], int, tuple[TensorShardSpec, ...]], tuple[tuple[float, ...], ...]] = {}

    def price(name: str) -> tuple[tuple[float, ...], ...]:
        specs = tuple(numbering[name])
        key = (view.shape(name), view.itemsize(name), specs)
        if key not in prices:
            prices[key] = model.conversions(*key)
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
    return Statement(Problem(cost, memory, budget, edges), choices, notes, weights, weight_specs, inputs, outputs)


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
