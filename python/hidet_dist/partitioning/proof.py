"""The proof that a plan computes its graph, by the same rules from which the search chooses.

Every plan, whoever made it, is proven before anything is built from it:

* each operator's spec, reduce functions included, is one that its rule derives on the mesh;
* each conversion that the specs need is listed at the first use of the converted tensor, with steps that lead from the
  produced spec to the required one;
* the plan's weights, inputs, outputs and symbolic dims agree with the graph's.

Predicted seconds are not checked: they depend on a machine, which a plan does not name. ``recost`` predicts them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import ConfigError, PlanError, SpecError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.reshard import PlannedSteps, cheapest_conversion
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.spec import OpShardSpec, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.plan import ConversionPlan
from hidet_dist.symbolic.planning import planning_view, rule_table
from hidet_dist.view import GraphView

_SHOWN = 12  # specs that an error message lists
_MOST_ASSIGNMENTS = 4096  # assignments of mesh axes to factors, at most, that are tried for an error message
_ANEW = "After a change of specs, hidet.distributed.recost derives the conversions anew."


@dataclass(frozen=True)
class PlannedConversion:
    """A tensor's conversion from ``source`` to ``target`` at the operator of its first use; None for graph outputs."""

    operator: int | None
    tensor: str
    source: TensorShardSpec
    target: TensorShardSpec


@dataclass(frozen=True)
class ProvenStage:
    """A stage that is proven to compute its graph.

    Attributes
    ----------
    view: the graph that is planned.
    stage: the stage.
    choices: the choice with the spec of each operator.
    notes: for each operator the reason why it is only replicated; else empty.
    rules: the rules by which it is proven.
    """

    view: GraphView
    stage: StagePlan
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    rules: RuleTable


def prove(stage: StagePlan, graph: NormalGraph, rules: RuleTable | None = None) -> ProvenStage:
    """Prove that a stage computes ``graph``. Rules and their proofs are shared with the table ``rules``.

    Raises
    ------
    PlanError
        Naming the operator or the tensor, and what is wrong with it.
    """
    proven = prove_specs(stage, graph, rules)
    check_conversions(proven)
    return proven


def check_conversions(proven: ProvenStage) -> None:
    """Check the conversions of a stage whose specs are proven, and its schedule of collectives. Raises PlanError."""
    view, stage = proven.view, proven.stage
    steps = PlannedSteps(stage)
    listed = {
        (operator, conversion.tensor, conversion.target)
        for operator, conversions in (
            *((op.index, op.conversions) for op in stage.operators),
            (None, stage.output_conversions),
        )
        for conversion in conversions
    }
    for conversion in needed_conversions(view, stage):
        operator = conversion.operator
        place = "a graph output" if operator is None else f"operator {operator}, {view.operators[operator].name},"
        if (operator, conversion.tensor, conversion.target) not in listed:
            raise PlanError(
                f"The plan lists no conversion of {conversion.tensor} from {conversion.source} to "
                f"{conversion.target} at {place}. {_ANEW}"
            )
        try:
            steps.take(conversion.tensor, view.pieces(conversion.tensor)[0], conversion.source, conversion.target)
        except PlanError as error:
            raise PlanError(f"At {place} {error} {_ANEW}") from error
    try:
        steps.check_all_taken()
    except PlanError as error:
        raise PlanError(f"{error} {_ANEW}") from error
    _check_overlap(view, stage)


@quick_hidet()
def prove_specs(stage: StagePlan, graph: NormalGraph, rules: RuleTable | None = None) -> ProvenStage:
    """Prove everything except conversions, which ``recost`` derives anew. Raises PlanError."""
    stage.check()
    declared = {symbol.name: symbol.declared for symbol in stage.symbols}
    try:
        view = planning_view(graph, declared, stage.mesh)
    except ConfigError as error:
        raise PlanError(f"The plan does not fit the graph: {error}") from error
    if stage.fingerprint != view.fingerprint():
        raise PlanError(
            f"The plan was made for the graph {stage.fingerprint}, not this one ({view.fingerprint()}). Plan it anew."
        )
    if stage.symbols != view.symbols:
        raise PlanError(
            f"The plan has the symbolic dims {[symbol.name for symbol in stage.symbols]}; the graph has "
            f"{[symbol.name for symbol in view.symbols]}, in this order."
        )
    for what, names, tensors in (
        ("weights", view.weights, stage.weights),
        ("inputs", view.inputs, stage.inputs),
        ("outputs", view.outputs, stage.outputs),
        ("states", view.states, stage.states),
    ):
        if [tensor.name for tensor in tensors] != names:
            raise PlanError(f"The plan's {what} are {[t.name for t in tensors]}; the graph's are {names}.")
        for tensor in tensors:
            _check_tensor(view, stage, tensor, padded=what == "weights")
    if [op.index for op in stage.operators] != list(range(len(view.operators))):
        raise PlanError(
            f"The plan must have the operators 0 to {len(view.operators) - 1} in order; it has "
            f"{[op.index for op in stage.operators]}."
        )
    table = rule_table(view, stage.mesh, rules)
    choices, notes = [], []
    for number, (op, planned) in enumerate(zip(view.operators, stage.operators, strict=True)):
        if planned.operator != op.name:
            raise PlanError(f"Operator {number} of the plan is {planned.operator}; the graph has {op.name} there.")
        choice = table.choice(op, planned.spec)
        if choice is None:
            raise PlanError(
                f"Operator {number}, {op.name}, cannot run as {planned.spec}: {_why(view, stage, number, table)}"
            )
        choices.append(choice)
        notes.append(table.note(op))
    check_updates(view, stage)
    return ProvenStage(view, stage, tuple(choices), tuple(notes), table)


def check_updates(view: GraphView, stage: StagePlan) -> None:
    """Refuse a plan with which a state could not be updated in place: it must have one spec from end to end.

    Raises
    ------
    PlanError
        When an update takes or gives another spec than the state's, or partial results; the message names it.
    """
    spec_of = {tensor.name: tensor.spec for tensor in stage.states}
    labels = {tensor.name: tensor.label or tensor.name for tensor in stage.states}
    for number, state in sorted(view.updates.items()):
        spec, own = stage.operators[number].spec, spec_of[state]
        if spec.in_specs[0] != own or spec.out_specs[0] != own or spec.reduce_fns[0]:
            raise PlanError(
                f"Operator {number}, {view.operators[number].name}, cannot update the state {labels[state]} in place: "
                f"the state is stored as {own}, and the operator runs as {spec}. Give both the same spec."
            )


def needed_conversions(view: GraphView, stage: StagePlan) -> Iterator[PlannedConversion]:
    """Yield the conversions that the specs of a stage need, in the order of their first use."""
    spec_of = {tensor.name: tensor.spec for tensor in stage.stored}
    for op, planned in zip(view.operators, stage.operators, strict=True):
        spec_of.update(zip((view.names[y] for y in op.outputs), planned.spec.out_specs, strict=True))
    seen: set[tuple[str, TensorShardSpec]] = set()
    for name, use in view.uses():
        if use.operator is None:
            target = stage.outputs[use.position].spec
        else:
            target = stage.operators[use.operator].spec.in_specs[use.position]
        if target != spec_of[name] and (name, target) not in seen:
            seen.add((name, target))
            yield PlannedConversion(use.operator, name, spec_of[name], target)


def with_conversions(view: GraphView, stage: StagePlan, cluster: Cluster) -> StagePlan:
    """Add the conversions that a stage's specs need, each by the steps of least predicted time on ``cluster``.

    Raises SpecError when a spec does not fit its tensor.
    """
    conversions_at: dict[int | None, list[ConversionPlan]] = {}
    for conversion in needed_conversions(view, stage):
        cheapest = cheapest_conversion(*view.pieces(conversion.tensor), conversion.source, conversion.target, cluster)
        plan = ConversionPlan(
            conversion.tensor, conversion.source, conversion.target, tuple(map(str, cheapest.steps)), cheapest.seconds
        )
        conversions_at.setdefault(conversion.operator, []).append(plan)
    operators = (replace(op, conversions=tuple(conversions_at.get(op.index, ()))) for op in stage.operators)
    return replace(stage, operators=tuple(operators), output_conversions=tuple(conversions_at.get(None, ())))


def _check_tensor(view: GraphView, stage: StagePlan, tensor: TensorPlan, padded: bool) -> None:
    name = tensor.name
    real = (view.shape(name), view.tensors[name].dtype.name, view.nbytes(name))
    if (tensor.shape, tensor.dtype, tensor.nbytes) != real:
        raise PlanError(
            f"The plan has {name} as {tensor.dtype}{list(tensor.shape)} of {tensor.nbytes} bytes; in the graph it is "
            f"{real[1]}{list(real[0])} of {real[2]} bytes."
        )
    if tensor.written != view.written(name):
        raise PlanError(
            f"The plan writes the shape of {name} as {list(tensor.written)}; in the graph it is "
            f"{list(view.written(name))}."
        )
    try:
        tensor.spec.validate(view.pieces(name)[0], stage.mesh, padded)
    except SpecError as error:
        raise PlanError(f"The plan's spec of {name} does not fit: {error}") from error


def _check_overlap(view: GraphView, stage: StagePlan) -> None:
    """Refuse a schedule with communication that the plan does not have."""
    if stage.overlap is None:
        return
    has = {
        (where, conversion.tensor, step)
        for where, conversions in (
            *((op.index, op.conversions) for op in stage.operators),
            (None, stage.output_conversions),
        )
        for conversion in conversions
        for step in conversion.steps
    }
    for op, planned in zip(view.operators, stage.operators, strict=True):
        for y, fns in zip(op.outputs, planned.spec.reduce_fns, strict=True):
            has.update((planned.index, view.names[y], str(fn)) for fn in fns)
    for communication in stage.overlap.communications:
        if (communication.operator, communication.tensor, communication.step) not in has:
            where = "the graph outputs" if communication.operator is None else f"operator {communication.operator}"
            raise PlanError(
                f"The plan's schedule has the collective {communication.step} of "
                f"{communication.tensor} at {where}, which the plan does "
                f"not have. {_ANEW}"
            )


def _why(view: GraphView, stage: StagePlan, number: int, table: RuleTable) -> str:
    """Explain why an operator's spec is refused, as far as possible, and list valid ones."""
    op, spec = view.operators[number], stage.operators[number].spec
    if (len(spec.in_specs), len(spec.out_specs)) != (len(op.inputs), len(op.outputs)):
        return f"it has {len(op.inputs)} inputs and {len(op.outputs)} outputs."
    for tensor, tensor_spec in zip((*op.inputs, *op.outputs), (*spec.in_specs, *spec.out_specs), strict=True):
        try:
            tensor_spec.validate(view.pieces(view.names[tensor])[0], stage.mesh, padded=True)
        except SpecError as error:
            return f"{view.names[tensor]} does not fit: {error}"

    def distance(other: OpShardSpec) -> int:
        return sum(
            a != b
            for x, y in zip((*spec.in_specs, *spec.out_specs), (*other.in_specs, *other.out_specs), strict=True)
            for a, b in zip(x.mesh_axes_per_dim, y.mesh_axes_per_dim, strict=True)
        )

    why = "its rule does not prove this spec."
    if (len(table.rule(op).factors) + 1) ** stage.mesh.ndim > _MOST_ASSIGNMENTS:
        return f"{why} Its rule is {table.rule(op).notation()}."
    nearest = sorted((choice.spec for choice in table(op)[1]), key=distance)[:_SHOWN]
    return f"{why} It can run as {'; '.join(map(str, nearest))}."
