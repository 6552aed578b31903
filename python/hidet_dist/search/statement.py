"""The statement of a problem: from a graph, its rules and a cost model to the entities and edges of the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from hidet.graph import Operator

from hidet_dist.cost.fusion import Fused
from hidet_dist.cost.model import CostModel, compute_seconds, reduction_seconds, split_seconds
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice
from hidet_dist.search.limits import Limits
from hidet_dist.search.memory import (
    MOMENTS,
    REDUCE,
    RUN,
    Lifetimes,
    conversion_nbytes,
    reduction_nbytes,
)
from hidet_dist.search.pins import Pin, Pins
from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem
from hidet_dist.spec import DeviceMesh, OpShardSpec, SpecPattern, TensorShardSpec
from hidet_dist.symbolic.planning import rule_table
from hidet_dist.view import GraphView

Allow = Callable[[Operator, OpShardSpec], bool]
_Layout = tuple[TensorShardSpec, bool]  # a spec, and whether the tensor is reduced to it


@dataclass
class Statement:
    """The problem, and what its entities are: operators first, then weights, inputs, outputs.

    ``layouts`` are the specs of each tensor by the numbers that edges have for them; tensors are in the order of their
    numbers.
    """

    problem: Problem
    fused: Mapping[int, Fused]
    choices: list[tuple[Choice, ...]]
    notes: list[str]
    weights: range
    weight_specs: list[list[TensorShardSpec]]
    inputs: list[list[TensorShardSpec]]
    outputs: list[list[TensorShardSpec]]
    pins: Pins
    layouts: dict[str, list[TensorShardSpec]]


def state(
    view: GraphView,
    cluster: Cluster,
    model: CostModel,
    budget: int,
    input_specs: Sequence[TensorShardSpec | None] | None,
    output_specs: Sequence[TensorShardSpec | None] | None,
    pinned: Pins,
    allow: Allow | None = None,
    limits: Limits | None = None,
) -> Statement:
    """The problem of planning a graph: every operator's choices, every weight's layouts, what joins them.

    Raises
    ------
    ConfigError
        When specs or pins do not fit the graph or the mesh, or contradict each other.
    OutOfTimeError
        When the time limit is reached.
    """
    limits = Limits() if limits is None else limits
    mesh = cluster.mesh
    weight_specs = [
        _layouts(pinned, pinned.tensors.get(name, []), name, f"the weight {name}", padded=True) for name in view.weights
    ]
    inputs = _ends(pinned, view.inputs, [pinned.tensors.get(name, []) for name in view.inputs], input_specs, "input")
    output_pins = [pinned.outputs.get(i, []) for i in range(len(view.outputs))]
    outputs = _ends(pinned, view.outputs, output_pins, output_specs, "output")
    table = rule_table(view, mesh)
    fused = model.fused(view)
    choices, notes, cost, memory = [], [], [], []
    costs_of: dict[tuple[int, bool, bool], list[float]] = {}  # twins have the very same choices
    for i, op in enumerate(view.operators):
        limits.check()
        rule, own = table(op)
        if allow is not None:
            own = tuple(choice for choice in own if allow(op, choice.spec)) or own
        if i in pinned.operators:
            own = tuple(own[k] for k in pinned.choices(i, [choice.spec for choice in own]))
        choices.append(own)
        notes.append("" if rule.definition is not None else f"replicated: {rule.note}")
        key = id(own), i in fused, i in fused and fused[i].prologue
        if key not in costs_of:
            costs_of[key] = [
                compute_seconds(model, view, i, choice, fused.get(i), mesh) + reduction_seconds(model, op, choice)
                for choice in own
            ]
        cost.append(costs_of[key])
        memory.append([0] * len(own))
    weights = range(len(cost), len(cost) + len(view.weights))
    entities = (*zip(view.weights, weight_specs, strict=True), *zip(view.inputs, inputs, strict=True))
    for name, specs in (*entities, *zip(view.outputs, outputs, strict=True)):
        cost.append([0.0] * len(specs))
        memory.append([spec.local_nbytes(view.shape(name), view.itemsize(name), mesh) for spec in specs])

    # Who makes each tensor, and in which spec under each of its choices; whether it is reduced matters if it is fused.
    split = {tensor.tensor: tensor for tensor in fused.values()}
    made: dict[str, tuple[int, list[_Layout]]] = {}
    for i, op in enumerate(view.operators):
        for o, y in enumerate(op.outputs):
            name = view.names[y]
            specs_ = [(c.spec.out_specs[o], name in split and bool(c.spec.reduce_fns[o])) for c in choices[i]]
            made[name] = (i, specs_)
    for i, name in enumerate(view.weights):
        made[name] = (weights[i], [(spec, False) for spec in weight_specs[i]])
    for i, name in enumerate(view.inputs):
        made[name] = (weights.stop + i, [(spec, False) for spec in inputs[i]])
    lifetimes = Lifetimes(view)
    wanted: list[tuple[str, int, list[_Layout], tuple[int, int]]] = []
    for name, use in view.uses():
        if use.operator is None:
            entity = weights.stop + len(inputs) + use.position
            ends = [(spec, False) for spec in outputs[use.position]]
            wanted.append((name, entity, ends, lifetimes.wanted(name, None, False)))
        else:
            own_specs = [(choice.spec.in_specs[use.position], False) for choice in choices[use.operator]]
            shares = use.position in view.operators[use.operator].task.share_map.values()
            wanted.append((name, use.operator, own_specs, lifetimes.wanted(name, use.operator, shares)))

    numbering: dict[str, dict[_Layout, int]] = {}
    for name, (_, layouts) in made.items():
        numbering[name] = {layout: n for n, layout in enumerate(dict.fromkeys(layouts))}
    for name, _, layouts, _ in wanted:
        for layout in layouts:
            numbering[name].setdefault(layout, len(numbering[name]))
    tensors = {name: n for n, name in enumerate(numbering)}
    prices: dict[Hashable, tuple[tuple[float, ...], ...]] = {}

    def price(name: str) -> tuple[tuple[float, ...], ...]:
        layouts = tuple(numbering[name])
        (shape, dtype), own = view.pieces(name), split.get(name)
        key = shape, dtype, layouts, own is None or own.prologue, own is None
        if key not in prices:
            limits.check()
            seconds = model.conversions(shape, dtype, [spec for spec, _ in layouts])
            if own is not None:
                whole = view.shape(name), view.itemsize(name)
                seconds = tuple(
                    tuple(
                        cost + split_seconds(model, *whole, own, source, target, mesh)
                        for cost, (target, _) in zip(line, layouts, strict=True)
                    )
                    for line, source in zip(seconds, layouts, strict=True)
                )
            prices[key] = seconds
        return prices[key]

    edges = []
    for name, consumer, layouts, (begin, end) in wanted:
        producer, produced = made[name]
        numbers = numbering[name]
        edges.append(
            Edge(
                tensors[name],
                producer,
                consumer,
                tuple(numbers[layout] for layout in produced),
                tuple(numbers[layout] for layout in layouts),
                price(name),
                begin,
                end,
            )
        )
    activations = _activations(view, model, mesh, lifetimes, choices, outputs, numbering)
    problem = Problem(cost, memory, budget, edges, activations)
    by_number = {name: [spec for spec, _ in numbers] for name, numbers in numbering.items()}
    return Statement(problem, fused, choices, notes, weights, weight_specs, inputs, outputs, pinned, by_number)


def _activations(
    view: GraphView,
    model: CostModel,
    mesh: DeviceMesh,
    lifetimes: Lifetimes,
    choices: Sequence[tuple[Choice, ...]],
    outputs: Sequence[Sequence[TensorShardSpec]],
    numbering: Mapping[str, Mapping[_Layout, int]],
) -> Activations:
    """What :func:`hidet_dist.search.memory.moment_bytes` says of a plan, for all plans."""
    # An output of which the spec is open may or may not be where the operator writes; it is taken for another buffer.
    resident = {(name, specs[0]) for name, specs in zip(view.outputs, outputs, strict=True) if len(specs) == 1}
    written = set(view.outputs)
    sizes: dict[Hashable, int] = {}

    def size(name: str, spec: TensorShardSpec) -> int:
        shape, itemsize = view.shape(name), view.itemsize(name)
        key = shape, itemsize, spec
        if key not in sizes:
            sizes[key] = spec.local_nbytes(shape, itemsize, mesh)
        return sizes[key]

    holds: list[LiveInterval] = []
    found: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {}
    for i, op in enumerate(view.operators):
        at = MOMENTS * i
        for o, y in enumerate(op.outputs):
            name = view.names[y]
            twin = id(choices[i]), o, name if name in written else ""
            if twin not in found:
                kept, run, reduce = [], [], []
                for choice in choices[i]:
                    spec, fns = choice.spec.out_specs[o], choice.spec.reduce_fns[o]
                    kept.append(0 if (name, spec) in resident else size(name, spec))
                    if fns:
                        partial = choice.spec.partial_spec(o)
                        run.append(size(name, partial))
                        reduce.append(reduction_nbytes(view.shape(name), view.itemsize(name), partial, fns, mesh))
                    else:
                        run.append(kept[-1])
                        reduce.append(kept[-1])
                found[twin] = tuple(kept), tuple(run), tuple(reduce), run == kept == reduce
            kept_, run_, reduce_, plain = found[twin]
            begin, end = lifetimes.after(i, name)
            if name in lifetimes.viewed:
                if begin <= end:
                    holds.append(LiveInterval(i, begin, end, kept_))
            elif plain:
                holds.append(LiveInterval(i, at + RUN, max(at + REDUCE, end), kept_))
            else:
                holds += [LiveInterval(i, at + RUN, at + RUN, run_), LiveInterval(i, at + REDUCE, at + REDUCE, reduce_)]
                if begin <= end:
                    holds.append(LiveInterval(i, begin, end, kept_))

    def converted(name: str) -> ConvertedTensor:
        shape, itemsize = view.shape(name), view.itemsize(name)
        specs = [spec for spec, _ in numbering[name]]
        working: dict[tuple[int, int], int] = {}

        def working_nbytes(s: int, d: int) -> int:
            if (s, d) not in working:
                steps = model.conversion(*view.pieces(name), specs[s], specs[d]).steps
                working[s, d] = conversion_nbytes(shape, itemsize, specs[s], steps, mesh)
            return working[s, d]

        layout = tuple(specs.index(spec) for spec in specs)
        nbytes = tuple(0 if (name, spec) in resident else size(name, spec) for spec in specs)
        return ConvertedTensor(layout, nbytes, working_nbytes)

    alike: dict[Hashable, ConvertedTensor] = {}
    tensors = {}
    for number, name in enumerate(numbering):
        key = view.shape(name), view.itemsize(name), tuple(numbering[name]), name if name in written else ""
        if key not in alike:
            alike[key] = converted(name)
        tensors[number] = alike[key]
    return Activations(lifetimes.count, tuple(holds), tensors)


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
