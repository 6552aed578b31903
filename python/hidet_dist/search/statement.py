"""The statement of a problem: from a graph, its rules and a cost model to the entities and edges of the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hidet.graph import Operator

from hidet_dist.connect import Element
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice
from hidet_dist.search.cost import CostModel, operator_seconds
from hidet_dist.search.ilp import Edge, Problem
from hidet_dist.search.pins import Pin, Pins
from hidet_dist.spec import DeviceMesh, OpShardSpec, SpecPattern, TensorShardSpec
from hidet_dist.symbolic.planning import rule_table
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
    inputs: list[list[TensorShardSpec]]
    outputs: list[list[TensorShardSpec]]
    pins: Pins


def state(
    view: GraphView,
    cluster: Cluster,
    model: CostModel,
    budget: int,
    input_specs: Sequence[TensorShardSpec | None] | None,
    output_specs: Sequence[TensorShardSpec | None] | None,
    pinned: Pins,
    allow: Allow | None = None,
) -> Statement:
    """The problem of planning a graph: every operator's choices, every weight's layouts, what joins them.

    Raises
    ------
    ConfigError
        When specs or pins do not fit the graph or the mesh, or contradict each other.
    """
    mesh = cluster.mesh
    weight_specs = [
        _layouts(pinned, pinned.tensors.get(name, []), name, f"the weight {name}", padded=True) for name in view.weights
    ]
    inputs = _ends(pinned, view.inputs, [pinned.tensors.get(name, []) for name in view.inputs], input_specs, "input")
    output_pins = [pinned.outputs.get(i, []) for i in range(len(view.outputs))]
    outputs = _ends(pinned, view.outputs, output_pins, output_specs, "output")
    table = rule_table(view, mesh)
    choices, notes, cost, memory = [], [], [], []
    costs_of: dict[int, list[float]] = {}  # twins have the very same choices
    for number, op in enumerate(view.operators):
        rule, own = table(op)
        if allow is not None:
            own = tuple(choice for choice in own if allow(op, choice.spec)) or own
        if number in pinned.operators:
            own = tuple(own[k] for k in pinned.choices(number, [choice.spec for choice in own]))
        choices.append(own)
        notes.append("" if rule.definition is not None else f"replicated: {rule.note}")
        if id(own) not in costs_of:
            costs_of[id(own)] = [sum(operator_seconds(model, op, choice)) for choice in own]
        cost.append(costs_of[id(own)])
        memory.append([0] * len(own))
    weights = range(len(cost), len(cost) + len(view.weights))
    for name, specs in zip(view.weights, weight_specs, strict=True):
        cost.append([0.0] * len(specs))
        memory.append([spec.local_nbytes(view.shape(name), view.itemsize(name), mesh) for spec in specs])
    for specs in (*inputs, *outputs):
        cost.append([0.0] * len(specs))
        memory.append([0] * len(specs))

    # Who makes each tensor, and in which spec under each of its choices.
    made: dict[str, tuple[int, list[TensorShardSpec]]] = {}
    for i, op in enumerate(view.operators):
        for o, y in enumerate(op.outputs):
            made[view.names[y]] = (i, [choice.spec.out_specs[o] for choice in choices[i]])
    for i, name in enumerate(view.weights):
        made[name] = (weights[i], weight_specs[i])
    for i, name in enumerate(view.inputs):
        made[name] = (weights.stop + i, inputs[i])
    wanted: list[tuple[str, int, list[TensorShardSpec]]] = []
    for name, use in view.uses():
        if use.operator is None:
            wanted.append((name, weights.stop + len(inputs) + use.position, outputs[use.position]))
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
    prices: dict[tuple[tuple[int, ...], Element, tuple[TensorShardSpec, ...]], tuple[tuple[float, ...], ...]] = {}

    def price(name: str) -> tuple[tuple[float, ...], ...]:
        specs = tuple(numbering[name])
        key = (*view.pieces(name), specs)
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
    return Statement(
        Problem(cost, memory, budget, edges), choices, notes, weights, weight_specs, inputs, outputs, pinned
    )


def _stored_specs(shape: tuple[int, ...], mesh: DeviceMesh, padded: bool) -> list[TensorShardSpec]:
    """Every way to store a tensor: each mesh axis splits one dim that it divides, or none; replicated first.

    With ``padded`` also dims that do not divide are split, with padding.
    """
    specs: dict[TensorShardSpec, None] = {}
    for dims in itertools.product((None, *range(len(shape))), repeat=mesh.ndim):
        per_dim: list[list[int]] = [[] for _ in shape]
        for axis, dim in enumerate(dims):
            if dim is not None and mesh.shape[axis] > 1:
                per_dim[dim].append(axis)
        spec = TensorShardSpec(tuple(tuple(axes) for axes in per_dim))
        if spec.fits(shape, mesh, padded):
            specs.setdefault(spec)
    return list(specs)


def _layouts(pinned: Pins, own: Sequence[Pin], name: str, what: str, padded: bool = False) -> list[TensorShardSpec]:
    """The specs that a stored tensor may have, of those its pins allow."""
    shape, _ = pinned.view.pieces(name)
    return pinned.layouts(own, what, shape, _stored_specs(shape, pinned.mesh, padded), padded)


def _ends(
    pinned: Pins,
    tensors: Sequence[str],
    pins: Sequence[list[Pin]],
    specs: Sequence[TensorShardSpec | None] | None,
    what: str,
) -> list[list[TensorShardSpec]]:
    """The specs that graph inputs or outputs may have: replicated, unless something is given or pinned."""
    if specs is not None and len(specs) != len(tensors):
        raise ConfigError(f"The graph has {len(tensors)} {what}s but {len(specs)} {what} specs are given.")
    result = []
    for number, (name, own) in enumerate(zip(tensors, pins, strict=True)):
        given = specs[number] if specs else None
        wanted = own
        if given is not None:
            try:
                given.validate(pinned.view.pieces(name)[0], pinned.mesh)
            except SpecError as error:
                raise ConfigError(f"The spec of {what} {number} does not fit: {error}") from error
            wanted = [Pin(f"{what}_specs[{number}]", SpecPattern.of(given)), *own]
        if wanted:
            result.append(_layouts(pinned, wanted, name, f"{what} {number}"))
        else:
            result.append([TensorShardSpec.replicated(len(pinned.view.shape(name)))])
    return result
