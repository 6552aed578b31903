"""Plans that were changed by hand: checking that they are still plans of the graph, and predicting their time anew."""

from __future__ import annotations

from collections.abc import Iterator

from hidet.graph import FlowGraph

from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import ConfigError, PlanError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.reshard import PlannedSteps
from hidet_dist.rules.rule import Choice
from hidet_dist.search.labels import label_plan
from hidet_dist.search.solution import lay_out
from hidet_dist.spec import OpShardSpec, Plan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.symbolic.planning import planning_view, rule_table
from hidet_dist.view import GraphView

_SHOWN = 12  # specs that an error message lists


def recost(plan: Plan, graph: FlowGraph, cluster: Cluster, cost_model: CostModel | None = None) -> Plan:
    """The plan with the conversions that its specs need now, and with every cost predicted anew.

    Raises
    ------
    PlanError
        When the plan is of another graph or mesh, or a spec is not one that its operator or tensor can have.
    """
    stage = plan.stage
    view = _view(graph, stage)
    chosen, notes = _check(view, stage)
    if stage.mesh != cluster.mesh:
        raise PlanError(f"The plan is for the mesh {stage.mesh}; the machine has {cluster.mesh}.")
    model = PredictedCost(cluster) if cost_model is None else cost_model
    stored = {tensor.name: tensor.spec for tensor in (*stage.weights, *stage.inputs)}
    outputs = [tensor.spec for tensor in stage.outputs]
    names = {t.label: view.tensors[t.name] for t in (*stage.weights, *stage.inputs, *stage.outputs) if t.label}
    fused = model.fused(view)
    laid_out = lay_out(view, stage.mesh, model, chosen, stored, outputs, notes, fused)
    if cost_model is None and cluster.device.overlaps_communication:
        (new,) = laid_out.stages
        found = overlapped(PlannedTasks(view, cluster, fused), new, cluster.device.memory_bytes)
        laid_out = Plan((found.plan(new),))
    return label_plan(view, laid_out, names)


def validate(plan: Plan, graph: FlowGraph) -> None:
    """Check that a plan can be partitioned and computes the graph: each spec proven, each conversion in its place.

    Raises
    ------
    PlanError
        Naming the operator or the tensor, and what is wrong with it.
    """
    stage = plan.stage
    view = _view(graph, stage)
    _check(view, stage)
    steps = PlannedSteps(stage)
    listed = {
        (where, conversion.tensor, conversion.target)
        for where, conversions in (
            *((op.index, op.conversions) for op in stage.operators),
            (None, stage.output_conversions),
        )
        for conversion in conversions
    }
    anew = "After specs were changed, hidet_dist.search.recost writes the conversions anew."
    for where, name, source, target in _conversions(view, stage):
        place = "a graph output" if where is None else f"operator {where}, {view.operators[where].name},"
        if (where, name, target) not in listed:
            raise PlanError(f"The plan lists no conversion of {name} from {source} to {target} at {place}. {anew}")
        try:
            steps.take(name, *view.pieces(name), source, target)
        except PlanError as error:
            raise PlanError(f"At {place} {error} {anew}") from error
    try:
        steps.check_all_taken()
    except PlanError as error:
        raise PlanError(f"{error} {anew}") from error


def _view(graph: FlowGraph, stage: StagePlan) -> GraphView:
    declared = {symbol.name: SymbolSize(symbol.size, symbol.multiple_of) for symbol in stage.symbols}
    try:
        return planning_view(graph, declared, stage.mesh)
    except ConfigError as error:
        raise PlanError(f"The plan does not fit the graph: {error}") from error


def _check(view: GraphView, stage: StagePlan) -> tuple[list[Choice], list[str]]:
    """The choice of each operator and why it has no other, after checking everything but conversions."""
    if stage.fingerprint != view.fingerprint():
        raise PlanError(
            f"The plan was made for the graph {stage.fingerprint}, not this one ({view.fingerprint()}). Plan it anew."
        )
    for what, names, tensors in (
        ("weights", view.weights, stage.weights),
        ("inputs", view.inputs, stage.inputs),
        ("outputs", view.outputs, stage.outputs),
    ):
        if [tensor.name for tensor in tensors] != names:
            raise PlanError(f"The plan's {what} are {[t.name for t in tensors]}; the graph's are {names}.")
        for tensor in tensors:
            _check_tensor(view, stage, tensor)
    if [op.index for op in stage.operators] != list(range(len(view.operators))):
        raise PlanError(
            f"The plan must have the operators 0 to {len(view.operators) - 1} in order; it has "
            f"{[op.index for op in stage.operators]}."
        )
    table = rule_table(view, stage.mesh)
    chosen, notes = [], []
    for number, (op, own) in enumerate(zip(view.operators, stage.operators, strict=True)):
        if own.operator != op.name:
            raise PlanError(f"Operator {number} of the plan is {own.operator}; the graph has {op.name} there.")
        rule, choices = table(op)
        found = next((choice for choice in choices if choice.spec == own.spec), None)
        if found is None:
            raise PlanError(
                f"Operator {number}, {op.name}, cannot run as {own.spec}: {_why(view, stage, number, choices)}"
            )
        chosen.append(found)
        notes.append("" if rule.definition is not None else f"replicated: {rule.note}")
    return chosen, notes


def _check_tensor(view: GraphView, stage: StagePlan, tensor: TensorPlan) -> None:
    name = tensor.name
    real = (view.shape(name), view.tensors[name].dtype.name, view.nbytes(name))
    if (tensor.shape, tensor.dtype, tensor.nbytes) != real:
        raise PlanError(
            f"The plan has {name} as {tensor.dtype}{list(tensor.shape)} of {tensor.nbytes} bytes; in the graph it is "
            f"{real[1]}{list(real[0])} of {real[2]} bytes."
        )
    try:
        tensor.spec.validate(view.pieces(name)[0], stage.mesh, padded=name in view.weights)
    except SpecError as error:
        raise PlanError(f"The plan's spec of {name} does not fit: {error}") from error


def _why(view: GraphView, stage: StagePlan, number: int, choices: tuple[Choice, ...]) -> str:
    """What is wrong with an operator's spec, as far as can be told, and what there is instead."""
    op, spec = view.operators[number], stage.operators[number].spec
    if (len(spec.in_specs), len(spec.out_specs)) != (len(op.inputs), len(op.outputs)):
        return f"it has {len(op.inputs)} inputs and {len(op.outputs)} outputs."
    for tensor, own in zip((*op.inputs, *op.outputs), (*spec.in_specs, *spec.out_specs), strict=True):
        try:
            own.validate(view.pieces(view.names[tensor])[0], stage.mesh, padded=True)
        except SpecError as error:
            return f"{view.names[tensor]} does not fit: {error}"

    def distance(other: OpShardSpec) -> int:
        return sum(
            a != b
            for x, y in zip((*spec.in_specs, *spec.out_specs), (*other.in_specs, *other.out_specs), strict=True)
            for a, b in zip(x.mesh_axes_per_dim, y.mesh_axes_per_dim, strict=True)
        )

    nearest = sorted((choice.spec for choice in choices), key=distance)[:_SHOWN]
    return f"its rule does not prove that right. It can run as {'; '.join(map(str, nearest))}."


def _conversions(
    view: GraphView, stage: StagePlan
) -> Iterator[tuple[int | None, str, TensorShardSpec, TensorShardSpec]]:
    """Each conversion that the specs need, where it is first needed: operator, tensor, source and target."""
    lies = {tensor.name: tensor.spec for tensor in (*stage.weights, *stage.inputs)}
    for op, own in zip(view.operators, stage.operators, strict=True):
        lies.update(zip((view.names[y] for y in op.outputs), own.spec.out_specs, strict=True))
    seen: set[tuple[str, TensorShardSpec]] = set()
    for name, use in view.uses():
        if use.operator is None:
            target = stage.outputs[use.position].spec
        else:
            target = stage.operators[use.operator].spec.in_specs[use.position]
        if target != lies[name] and (name, target) not in seen:
            seen.add((name, target))
            yield use.operator, name, lies[name], target
