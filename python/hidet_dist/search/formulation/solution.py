"""Solutions written down as plans of a stage, and those plans checked from scratch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from hidet.graph import Operator

from hidet_dist.cost.fusion import Fusions, tensors_between
from hidet_dist.cost.model import CostModel, compute_seconds, reduction_seconds, split_seconds
from hidet_dist.cost.work import classification_note
from hidet_dist.errors import VerificationError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice
from hidet_dist.search.formulation.devices import DeviceHeld
from hidet_dist.search.formulation.formulate import Formulation, place_in_kernel
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.problem import evaluate, held_bytes, readers
from hidet_dist.spec import DeviceMesh, OperatorPlan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.plan import ConversionPlan
from hidet_dist.view import GraphView
from hidet_dist.weights.storage import storage_of


def write_stage(
    costs: StageCosts, cluster: Cluster, formulation: Formulation, picks: Sequence[int], stage: StagePlan | None = None
) -> tuple[StagePlan, DeviceHeld]:
    """Write down the plan of a choice for every entity, and check it; return it with what it holds.

    That is on the device that exceeds its budget most, or has the least room left.

    ``stage`` is the plan, if :func:`stage_of` has made it.

    Raises
    ------
    VerificationError
        When its cost or its memory, computed anew from the graph, contradicts the search's figures.
    """
    stage = stage_of(costs, formulation, picks) if stage is None else stage
    # The sum over the plan and the solver's objective are computed in two ways, and must agree.
    solved = evaluate(formulation.problem, picks)
    if not math.isclose(stage.seconds, solved, rel_tol=1e-9, abs_tol=1e-12):
        raise VerificationError(f"The plan costs {stage.seconds} s, but the search computed {solved} s.")
    problem = formulation.problem
    nbytes, points = held_bytes(problem, readers(problem), picks), formulation.devices[0].activations.points
    every = []
    for number, device in enumerate(formulation.limiting):
        counted = max(nbytes[number * points : (number + 1) * points]) - (problem.budget - device.nbytes)
        live = live_bytes(costs.view, stage, cluster.device.places_shards, device.coordinate)
        every.append(DeviceHeld(device, live))
        if max(live) > counted:
            raise VerificationError(f"The plan holds {every[-1]}, but the search computed {counted}.")
    return stage, max(every, key=lambda held: held.excess)


def stage_of(costs: StageCosts, formulation: Formulation, picks: Sequence[int]) -> StagePlan:
    """Write down the plan of a choice for every entity, without checking it."""
    view = costs.view
    chosen = [formulation.choices[i][picks[i]] for i in range(len(view.operators))]
    stored = [*formulation.weight_specs, *formulation.inputs]
    specs = [options[picks[formulation.weights.start + n]] for n, options in enumerate(stored)]
    outputs = [options[picks[len(chosen) + len(stored) + n]] for n, options in enumerate(formulation.outputs)]
    spec_of = dict(zip((*view.weights, *view.inputs), specs, strict=True))
    spec_of.update(
        (name, options[picks[entity]])
        for name, options, entity in zip(view.states, formulation.states, formulation.state_entities, strict=True)
    )
    return lay_out(costs, chosen, spec_of, outputs, formulation.notes)


def lay_out(
    costs: StageCosts,
    chosen: Sequence[Choice],
    stored: Mapping[str, TensorShardSpec],
    outputs: Sequence[TensorShardSpec],
    notes: Sequence[str],
) -> StagePlan:
    """Write down the plan of given choices, with the conversions between them, and all costs.

    ``chosen`` and ``notes`` have an entry for each operator. ``stored`` are the specs of weights, graph inputs and
    states by name, and ``outputs`` those in which graph outputs are delivered.
    """
    view = costs.view

    def tensor(name: str, spec: TensorShardSpec) -> TensorPlan:
        dtype, written = view.tensors[name].dtype.name, view.written(name)
        storage = storage_of(view.tensors[name])
        return TensorPlan(name, view.shape(name), dtype, view.nbytes(name), spec, written=written, storage=storage)

    spec_of = dict(stored)
    reduced: set[str] = set()
    for op, choice in zip(view.operators, chosen, strict=True):
        for y, spec, fns in zip(op.outputs, choice.spec.out_specs, choice.spec.reduce_fns, strict=True):
            spec_of[view.names[y]] = spec
            if fns:
                reduced.add(view.names[y])

    compute = [costs.compute(i, choice) for i, choice in enumerate(chosen)]

    paid: set[tuple[str, TensorShardSpec]] = set()
    conversions_of: dict[int | None, list[ConversionPlan]] = {}
    for name, use in view.uses():
        target = outputs[use.position] if use.operator is None else chosen[use.operator].spec.in_specs[use.position]
        if (name, target) in paid:
            continue
        paid.add((name, target))
        if name in costs.between:
            splitter, _ = costs.between[name]
            compute[splitter] += costs.split(name, spec_of[name], name in reduced, target)
        if target != spec_of[name]:
            steps, taken = costs.conversion(name, spec_of[name], target)
            conversions_of.setdefault(use.operator, []).append(
                ConversionPlan(name, spec_of[name], target, steps, taken)
            )
    operators = []
    for i, (op, choice) in enumerate(zip(view.operators, chosen, strict=True)):
        reduce, conversions = costs.reduction(op, choice), tuple(conversions_of.get(i, ()))
        note = "; ".join(filter(None, (notes[i], classification_note(op))))
        operators.append(OperatorPlan(i, op.name, choice.spec, compute[i], reduce, conversions, note))
    return StagePlan(
        costs.mesh,
        view.fingerprint(),
        tuple(operators),
        tuple(tensor(name, stored[name]) for name in view.weights),
        tuple(tensor(name, stored[name]) for name in view.inputs),
        tuple(map(tensor, view.outputs, outputs)),
        tuple(conversions_of.get(None, ())),
        view.symbols,
        states=tuple(tensor(name, stored[name]) for name in view.states),
    )


class StageCosts:
    """The predicted seconds of the parts of a graph's plans; those of equal parts are predicted once, for all plans.

    Attributes
    ----------
    view, mesh: the graph, and the mesh that it is planned for.
    between: the tensors between operators of one kernel (:func:`tensors_between`).
    """

    def __init__(self, view: GraphView, mesh: DeviceMesh, model: CostModel, fused: Fusions):
        self.view, self.mesh, self._model, self._fused = view, mesh, model, fused
        self.between = tensors_between(view, fused)
        # By operator and identity of its choice, which is kept, so that no other one gets that identity.
        self._chosen: dict[tuple[int, int], tuple[Choice, float]] = {}
        self._compute: dict[Hashable, float] = {}
        self._reduction: dict[Hashable, float] = {}
        self._conversion: dict[Hashable, tuple[tuple[str, ...], float]] = {}
        self._split: dict[Hashable, float] = {}

    def compute(self, number: int, choice: Choice) -> float:
        """Predict the seconds of an operator's computation. Equal operators share their choices."""
        chosen = number, id(choice)
        if chosen not in self._chosen:
            view, op, entry = self.view, self.view.operators[number], self._fused.get(number)
            shapes = tuple(view.shape_of(x) for x in (*op.inputs, *op.outputs))
            key = type(op), shapes, id(choice), place_in_kernel(view, number, entry)
            if key not in self._compute:
                self._compute[key] = compute_seconds(self._model, view, number, choice, entry, self.mesh)
            self._chosen[chosen] = choice, self._compute[key]
        return self._chosen[chosen][1]

    def reduction(self, op: Operator, choice: Choice) -> float:
        """Predict the seconds of all reduce functions of an operator."""
        if not any(choice.spec.reduce_fns):
            return 0.0
        outputs = [self.view.names[y] for y in op.outputs]
        key = id(choice), tuple((self.view.shape(name), self.view.pieces(name)) for name in outputs)
        if key not in self._reduction:
            self._reduction[key] = reduction_seconds(self._model, op, choice)
        return self._reduction[key]

    def conversion(self, name: str, source: TensorShardSpec, target: TensorShardSpec) -> tuple[tuple[str, ...], float]:
        """Find the cheapest conversion of a tensor; return its steps as text, and their seconds."""
        shape, dtype = self.view.pieces(name)
        key = shape, dtype, source, target
        if key not in self._conversion:
            found = self._model.conversion(shape, dtype, source, target)
            self._conversion[key] = tuple(map(str, found.steps)), found.seconds
        return self._conversion[key]

    def split(self, name: str, spec: TensorShardSpec, is_reduced: bool, target: TensorShardSpec) -> float:
        """Predict the seconds of splitting a kernel at a tensor that is produced in one spec and required in another.

        ``is_reduced``: whether a reduction makes the tensor.
        """
        _, between = self.between[name]
        nbytes = self.view.shape(name), self.view.itemsize(name), self.mesh
        key = between, nbytes[:2], spec, is_reduced, target
        if key not in self._split:
            split = split_seconds(
                between, [(spec, is_reduced)], [target], lambda one: self._model.split(one.local_nbytes(*nbytes))
            )
            self._split[key] = float(split[0, 0])
        return self._split[key]
