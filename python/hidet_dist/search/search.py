"""The search: states the problem for a graph on a cluster, solves it, and writes the plan down."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hidet.graph import FlowGraph

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.cost import CostModel, PredictedCost
from hidet_dist.search.optimum import optimize
from hidet_dist.search.solution import write_plan
from hidet_dist.search.statement import Allow, Statement, state
from hidet_dist.spec import Plan, TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.symbolic.planning import SymbolicGraph
from hidet_dist.view import GraphView, graph_symbols


def search(
    graph: FlowGraph,
    cluster: Cluster,
    mem_budget: int | None = None,
    input_specs: Sequence[TensorShardSpec | None] | None = None,
    output_specs: Sequence[TensorShardSpec | None] | None = None,
    solver: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-3,
    symbols: Mapping[str, SymbolSize] | None = None,
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
    symbols: mapping, optional
        What is declared of the graph's symbolic dims, by name.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget; it states the least budget that would do.
    ConfigError, SpecError
        When the input or output specs do not fit the graph.
    SolverError
        When the solver fails or finds nothing in time.
    """
    return find(
        graph, cluster, mem_budget, input_specs, output_specs, solver, time_limit_seconds, gap, symbols=symbols
    ).plan


@dataclass(frozen=True)
class Found:
    """A plan, how far it can be from the best one, and the seconds below which there is none.

    ``gap`` is relative: ``(plan.seconds - bound_seconds) / plan.seconds``.
    """

    plan: Plan
    gap: float
    bound_seconds: float


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
    cost_model: CostModel | None = None,
    symbols: Mapping[str, SymbolSize] | None = None,
) -> Found:
    """As :func:`search`, with the bound that proves the plan, and with less to choose from.

    Parameters
    ----------
    weight_specs: mapping, optional
        How weights lie, by name (``w0``, ...); the others are free.
    allow: callable, optional
        Says of an operator and a spec whether the spec may be chosen for it. An operator of which nothing is allowed
        keeps all its choices.
    cost_model: CostModel, optional
        What the parts of a plan cost; predicted for the cluster when not given.
    """
    symbolic = SymbolicGraph(graph, symbols or {}, cluster.mesh) if symbols or graph_symbols(graph) else None
    if symbolic is not None:
        symbolic.check_specs("input", symbolic.view.inputs, input_specs)
        symbolic.check_specs("output", symbolic.view.outputs, output_specs)
    view = GraphView(graph if symbolic is None else symbolic.twin)
    table = RuleTable(cluster.mesh) if symbolic is None else symbolic.rules()
    budget = cluster.device.memory_bytes if mem_budget is None else mem_budget
    model = PredictedCost(cluster) if cost_model is None else cost_model
    with _collector_paused():
        statement = state(view, cluster, model, budget, input_specs, output_specs, weight_specs or {}, allow, table)
        found = _found(view, cluster, model, statement, budget, solver, time_limit_seconds, gap)
    return found if symbolic is None else replace(found, plan=symbolic.plan(found.plan))


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
    model: CostModel,
    statement: Statement,
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
    plan = write_plan(view, cluster, model, statement, solution.choices)
    return Found(plan, solution.gap, solution.seconds * (1 - solution.gap))
