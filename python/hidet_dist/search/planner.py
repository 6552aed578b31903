"""The search: states the problem for a graph on a cluster, solves it, and writes the plan down."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hidet.graph import FlowGraph

from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import ConfigError, InfeasibleError, VerificationError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.search.labels import label_plan, parse_names
from hidet_dist.search.memory import live_bytes
from hidet_dist.search.optimum import Options, optimize
from hidet_dist.search.overlap import OverlapSearch
from hidet_dist.search.pins import Pins, parse_pins
from hidet_dist.search.propagate import propagate
from hidet_dist.search.refine import refine
from hidet_dist.search.report import Incumbents, write_report
from hidet_dist.search.solution import write_plan
from hidet_dist.search.statement import Allow, state
from hidet_dist.spec import Plan, TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.symbolic.planning import check_specs, planning_view
from hidet_dist.view import GraphView
from hidet_dist.weights import names_of

MODES = ("search", "propagate")

OnBetter = Callable[[float, float], None]


def search(
    graph: FlowGraph,
    cluster: Cluster,
    mem_budget: int | None = None,
    input_specs: Sequence[TensorShardSpec | None] | None = None,
    output_specs: Sequence[TensorShardSpec | None] | None = None,
    solver: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-3,
    pins: Mapping[str, Any] | None = None,
    names: Any = None,
    mode: str = "search",
    threads: int = 1,
    symbols: Mapping[str, SymbolSize] | None = None,
    refine_mesh: bool = True,
    on_incumbent: OnBetter | None = None,
) -> Plan:
    """Find the plan of least predicted time.

    Parameters
    ----------
    graph: FlowGraph
        The graph as traced, before ``hidet.graph.optimize``.
    cluster: Cluster
        The machine, with the mesh to plan for.
    mem_budget: int, optional
        Bytes that each device may hold at any time: weights, graph inputs and outputs, and activations while they live;
        the device's memory when not given.
    input_specs, output_specs: sequence of TensorShardSpec or None, optional
        How graph inputs arrive and outputs are wanted; None stands for replicated.
    solver, time_limit_seconds, gap:
        The ILP solver (``highs`` or ``cbc``); the seconds after which the search ends with the best plan known; and
        the relative gap to stop at.
    pins: mapping, optional
        What weights, inputs, outputs, activations and operators must be sharded as, by name: specs or patterns of
        them, or their text. See :class:`hidet_dist.search.pins.Pin` for the names.
    names: Module or mapping of names to tensors, optional
        What the user calls tensors of the graph, in pins and in the plan.
    mode: str
        ``search``, or ``propagate`` to derive everything from pins and given specs (see
        :mod:`hidet_dist.search.propagate`): fast, and no better than the pins are.
    threads: int
        Threads of the solver. With one, the same graph gets the same plan.
    symbols: mapping, optional
        What is declared of the graph's symbolic dims, by name.
    refine_mesh: bool
        Whether to plan for a finer mesh as well, where the graph has fewer heads than a mesh axis has devices
        (:mod:`hidet_dist.search.refine`), and take that plan if it is better: so two heads of keys and values are split
        over four devices, each held by a group of two. The plan's mesh then has more axes than the given one, and the
        same ranks. Not done with pins, which name the axes of the given mesh, nor for symbolic dims.
    on_incumbent: callable, optional
        Called as the search goes on with the predicted seconds of the best plan known, and those below which there is
        none.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget; it states the least budget that would do.
    ConfigError, SpecError
        When specs or pins do not fit the graph, or contradict each other.
    SolverError
        When the solver fails or finds nothing in time.
    """

    def planned(
        on: Cluster,
        inputs: Sequence[TensorShardSpec | None] | None,
        outputs: Sequence[TensorShardSpec | None] | None,
    ) -> Plan:
        return find(
            graph,
            on,
            mem_budget,
            inputs,
            outputs,
            solver,
            time_limit_seconds,
            gap,
            pins,
            names=names,
            mode=mode,
            threads=threads,
            symbols=symbols,
            on_incumbent=on_incumbent,
        ).plan

    free = mode == "search" and not pins and not symbols
    finer = refine(graph, cluster) if refine_mesh and free else None
    if finer is None:
        return planned(cluster, input_specs, output_specs)
    infeasible: InfeasibleError | None = None
    plans: list[Plan] = []
    try:
        plans.append(planned(cluster, input_specs, output_specs))
    except InfeasibleError as error:
        infeasible = error
    try:
        inputs, outputs = (finer.translated_all(specs) for specs in (input_specs, output_specs))
        plans.append(planned(finer.cluster, inputs, outputs))
    except InfeasibleError as error:
        if infeasible is not None:
            raise min((infeasible, error), key=lambda one: one.least_budget) from None
    # Within the gap the finer mesh is no better, and the given one is what the user knows.
    first, last = plans[0], plans[-1]
    return last if last.makespan_seconds < first.makespan_seconds * (1 - gap) else first


@dataclass(frozen=True)
class Found:
    """A plan, how far it can be from the best one, and the seconds below which there is none.

    ``gap`` is relative: ``(plan.seconds - bound_seconds) / plan.seconds``. A plan that was propagated is proven to be
    nothing: its bound is 0.
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
    pins: Mapping[str, Any] | None = None,
    allow: Allow | None = None,
    cost_model: CostModel | None = None,
    names: Any = None,
    mode: str = "search",
    symbols: Mapping[str, SymbolSize] | None = None,
    report: bool = True,
    threads: int = 1,
    on_incumbent: OnBetter | None = None,
    overlap: bool = True,
) -> Found:
    """As :func:`search`, with the bound that proves the plan, and with less to choose from.

    Parameters
    ----------
    allow: callable, optional
        Says of an operator and a spec whether the spec may be chosen for it. An operator of which nothing is allowed
        keeps all its choices.
    cost_model: CostModel, optional
        What the parts of a plan cost; predicted for the cluster when not given.
    report: bool
        Whether to work out what ``plan.explain()`` says besides the plan.
    on_incumbent: callable, optional
        Called with the predicted seconds of the best plan known so far, and the seconds below which there is none.
    overlap: bool
        Whether to look for plans that take less time with communication beside computation
        (:mod:`hidet_dist.search.overlap`), on a machine that can, and to say what it hides.
    """
    if mode not in MODES:
        raise ConfigError(f"Unknown mode {mode!r}; the modes are {', '.join(MODES)}.")
    budget = memory_budget(cluster, mem_budget)
    view = planning_view(graph, symbols or {}, cluster.mesh)
    check_specs(view, cluster.mesh, "input", view.inputs, input_specs)
    check_specs(view, cluster.mesh, "output", view.outputs, output_specs)
    tensors = parse_names(names)
    tensors |= {name: x for name, x in names_of(view.tensors.values()).items() if name not in tensors}
    pinned = Pins(view, cluster.mesh, parse_pins(pins), tensors)
    model = PredictedCost(cluster) if cost_model is None else cost_model
    overlaps = overlap and cost_model is None and cluster.device.overlaps_communication
    with collector_paused():
        statement = state(view, cluster, model, budget, input_specs, output_specs, pinned, allow)
        incumbents = Incumbents()

        def tell(choices: Sequence[int], seconds: float, least: float, elapsed: float) -> None:
            incumbents(choices, seconds, least, elapsed)
            if on_incumbent is not None:
                on_incumbent(seconds, least)

        def write(picks: Sequence[int]) -> Plan:
            return label_plan(view, write_plan(view, cluster, model, statement, picks), tensors)

        if mode == "propagate":
            picks = propagate(view, statement)
            plan, bound, own_gap = write(picks), 0.0, 1.0
            _check_held(view, plan, budget)
        else:
            options = Options(solver, time_limit_seconds, gap, threads, tell)
            begin = time.perf_counter()
            solution = optimize(statement.problem, options)
            bound = solution.seconds * (1 - solution.gap)
            picks = solution.choices
            if overlaps:
                if time_limit_seconds is not None:
                    options = replace(options, time_limit_seconds=time_limit_seconds - (time.perf_counter() - begin))
                candidate = OverlapSearch(view, cluster, model, statement).better(solution, options)
                picks = candidate.choices
            plan = write(picks)
            own_gap = solution.gap
            if picks != solution.choices:
                own_gap = 1 - bound / plan.seconds
                incumbents(picks, plan.seconds, bound, time.perf_counter() - begin)
            most = max(live_bytes(view, plan.stage))
            if most > budget:
                raise VerificationError(f"The plan holds {most} bytes on a device, more than mem_budget = {budget}.")
        if overlaps:
            if mode == "propagate":
                found = overlapped(PlannedTasks(view, cluster, statement.fused), plan.stage, budget)
            else:
                found = candidate.found
            plan = replace(plan, stages=(found.plan(plan.stage),))
        if report:
            known = [(one, plan if one.choices == picks else write(one.choices)) for one in incumbents.known]
            plan = replace(plan, report=write_report(view, statement, plan, picks, known, mode, own_gap, budget))
    return Found(plan, own_gap, bound)


def memory_budget(cluster: Cluster, given: int | None) -> int:
    """Bytes that a device may hold. Raises ConfigError for what is no such number."""
    if given is None:
        return cluster.device.memory_bytes
    if isinstance(given, bool) or not isinstance(given, int) or given <= 0:
        raise ConfigError(f"mem_budget must be whole bytes above 0; got {given!r}.")
    return given


@contextmanager
def collector_paused() -> Iterator[None]:
    """A search makes millions of small tuples and no cycles: looking for cycles among them is time lost."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_held(view: GraphView, plan: Plan, budget: int) -> None:
    held = max(live_bytes(view, plan.stage))
    if held > budget:
        raise InfeasibleError(
            f"What follows from the pins holds {held} bytes a device, and mem_budget is {budget}. Pin more weights to "
            "specs that split them, or search for a plan (mode 'search').",
            held,
        )
