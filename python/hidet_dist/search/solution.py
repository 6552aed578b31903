"""Writing a solution down as a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hidet_dist.machine import Cluster
from hidet_dist.search.cost import CostModel, operator_seconds
from hidet_dist.search.ilp import evaluate
from hidet_dist.search.statement import Statement
from hidet_dist.spec import OperatorPlan, Plan, StagePlan, TensorPlan, TensorShardSpec
from hidet_dist.spec.plan import ConnectionPlan
from hidet_dist.view import GraphView


def write_plan(view: GraphView, cluster: Cluster, model: CostModel, statement: Statement, picks: Sequence[int]) -> Plan:
    """The plan that a choice for every entity makes."""

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
            found = model.connect(view.shape(name), view.tensors[name].dtype, lies[name], target)
            steps = tuple(map(str, found.steps))
            at.setdefault(use.operator, []).append(ConnectionPlan(name, lies[name], target, steps, found.seconds))
    operators = []
    for i, (op, choice) in enumerate(zip(view.operators, chosen, strict=True)):
        compute, reduce = operator_seconds(model, op, choice)
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
