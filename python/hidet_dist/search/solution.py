"""Writing a solution down as a plan, and checking the plan from scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hidet_dist.errors import VerificationError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice
from hidet_dist.search.cost import CostModel, compute_seconds, reduction_seconds, split_seconds
from hidet_dist.search.ilp import evaluate
from hidet_dist.search.memory import live_bytes
from hidet_dist.search.statement import Statement
from hidet_dist.spec import OperatorPlan, Plan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.plan import ConnectionPlan
from hidet_dist.view import GraphView


def write_plan(view: GraphView, cluster: Cluster, model: CostModel, statement: Statement, picks: Sequence[int]) -> Plan:
    """The plan that a choice for every entity makes, checked.

    Raises
    ------
    VerificationError
        When the plan, costed and measured anew on the unfolded graph, is not what the solver took it for.
    """
    chosen = [statement.choices[i][picks[i]] for i in range(len(view.operators))]
    weight_specs = [specs[picks[e]] for e, specs in zip(statement.weights, statement.weight_specs, strict=True)]
    plan = Plan(
        (lay_out(view, cluster, model, chosen, weight_specs, statement.inputs, statement.outputs, statement.notes),)
    )
    # The plan's own sum and the solver's objective are two ways to the same figure.
    solved = evaluate(statement.problem, picks)
    if not math.isclose(plan.seconds, solved, rel_tol=1e-9, abs_tol=1e-12):
        raise VerificationError(f"The plan costs {plan.seconds} s, but the search took it for {solved} s.")
    most = max(live_bytes(view, plan.stage))
    if most > statement.problem.budget:
        raise VerificationError(
            f"The plan holds {most} bytes on a device, more than the {statement.problem.budget} it was made for."
        )
    return plan


def lay_out(
    view: GraphView,
    cluster: Cluster,
    model: CostModel,
    chosen: Sequence[Choice],
    weight_specs: Sequence[TensorShardSpec],
    inputs: Sequence[TensorShardSpec],
    outputs: Sequence[TensorShardSpec],
    notes: Sequence[str],
) -> StagePlan:
    """A stage with its costs, from a choice an operator and a spec a weight, graph input and graph output.

    Costs are those of the graph's operators and tensors one by one; nothing is taken from a search.
    """

    def tensor(name: str, spec: TensorShardSpec) -> TensorPlan:
        return TensorPlan(name, view.shape(name), view.tensors[name].dtype.name, view.nbytes(name), spec)

    lies: dict[str, TensorShardSpec] = dict(zip(view.inputs, inputs, strict=True))
    lies.update(zip(view.weights, weight_specs, strict=True))
    reduced: set[str] = set()
    for op, choice in zip(view.operators, chosen, strict=True):
        for y, spec, fns in zip(op.outputs, choice.spec.out_specs, choice.spec.reduce_fns, strict=True):
            lies[view.names[y]] = spec
            if fns:
                reduced.add(view.names[y])

    fused = model.fused(view)
    split_by = {own.tensor: number for number, own in fused.items()}
    seconds = [compute_seconds(model, view, i, choice, fused.get(i), cluster.mesh) for i, choice in enumerate(chosen)]
    paid: set[tuple[str, TensorShardSpec]] = set()
    at: dict[int | None, list[ConnectionPlan]] = {}
    for name, use in view.uses():
        target = outputs[use.position] if use.operator is None else chosen[use.operator].spec.in_specs[use.position]
        if (name, target) in paid:
            continue
        paid.add((name, target))
        shape, itemsize = view.shape(name), view.itemsize(name)
        if name in split_by:
            own = split_by[name]
            source = lies[name], name in reduced
            seconds[own] += split_seconds(model, shape, itemsize, fused[own], source, target, cluster.mesh)
        if target != lies[name]:
            found = model.connect(shape, itemsize, lies[name], target)
            steps = tuple(map(str, found.steps))
            at.setdefault(use.operator, []).append(ConnectionPlan(name, lies[name], target, steps, found.seconds))
    operators = []
    for i, (op, choice) in enumerate(zip(view.operators, chosen, strict=True)):
        reduce, connections = reduction_seconds(model, op, choice), tuple(at.get(i, ()))
        operators.append(OperatorPlan(i, op.name, choice.spec, seconds[i], reduce, connections, notes[i]))
    return StagePlan(
        cluster.mesh,
        view.fingerprint(),
        tuple(operators),
        tuple(map(tensor, view.weights, weight_specs)),
        tuple(map(tensor, view.inputs, inputs)),
        tuple(map(tensor, view.outputs, outputs)),
        tuple(at.get(None, ())),
    )
