"""The search for a plan: formulate the problem of a graph on a cluster, solve it, and write the plan down."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hidet.graph import Tensor

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.cost.model import CostModel, PredictedCost
from hidet_dist.errors import InfeasibleError, SearchLimitWarning, SolverError, VerificationError
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.rules.rule import OfferedParts, RuleTable
from hidet_dist.search import tuning
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.choice_sets import ChoiceSet
from hidet_dist.search.formulation.devices import DeviceHeld, for_the_least, limiting_devices
from hidet_dist.search.formulation.formulate import Allow, Formulation, formulate
from hidet_dist.search.formulation.labels import label_stage, parse_names
from hidet_dist.search.formulation.parts import offered_parts
from hidet_dist.search.formulation.pins import Pins, parse_pins
from hidet_dist.search.formulation.solution import StageCosts, stage_of, write_stage
from hidet_dist.search.in_time import plan_in_time
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.options import SearchOptions, SolveOptions
from hidet_dist.search.overlap import OverlapSearch
from hidet_dist.search.problem import Problem, Solution
from hidet_dist.search.propagate import propagate
from hidet_dist.search.refine import Refinement, refine
from hidet_dist.search.report import Incumbents, write_report
from hidet_dist.spec import DeviceMesh, Plan, StagePlan
from hidet_dist.spec.report import SearchReport, StepTaken
from hidet_dist.symbolic.planning import check_specs, planning_view, rule_table
from hidet_dist.view import GraphView
from hidet_dist.weights import names_of

Found = TypeVar("Found")


@quick_hidet()
def search(
    graph: NormalGraph,
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    rules: RuleTable | None = None,
    **changes: Any,
) -> Plan:
    """Find the plan of least predicted time.

    Parameters
    ----------
    graph: NormalGraph
        The graph in normal form (:func:`hidet_dist.normalize.normalize`), before ``hidet.graph.optimize``.
    cluster: Cluster
        The machine, with the mesh to plan for.
    options: SearchOptions, optional
        The memory budget, given specs and pins, and limits.
    rules: RuleTable, optional
        A table, for any mesh, with which rules and proofs are shared.
    changes:
        Fields of the options, by name, that differ from ``options``: ``search(graph, cluster, mem_budget=10**9)``.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget; it states the least budget that would do.
    ConfigError, SpecError
        When specs or pins do not fit the graph, or contradict each other.
    SolverError
        When the solver fails, or no plan was found within the time limit or the memory limit.

    Warns
    -----
    SearchLimitWarning
        When the time limit was reached, and the plan is the best one until then.
    """
    options = SearchOptions.of(options, changes)
    limits = options.limits()
    with collector_paused():  # by all parts: it looks through what was made each time that it goes on
        result = search_result(graph, cluster, options, limits, rules).reported(limits)
    warn_of_limit(limits, result.gap)
    return result.plan


def search_result(
    graph: NormalGraph, cluster: Cluster, options: SearchOptions, limits: Limits, rules: RuleTable | None = None
) -> SearchResult:
    """Find a plan as :func:`search` does, with the bound that was proven, and without its report and a warning.

    Rules and proofs are shared with the table ``rules``.
    """
    free = options.mode == "search" and not options.pins and not options.symbols
    view = planning_view(graph, options.symbols, cluster.mesh)
    finer = refine(view, cluster, rules) if options.refine_mesh and free else None
    if finer is None:
        return _search(view, cluster, options, limits, rules=rules, insists=True)
    return _search_both(view, cluster, finer, options, limits, rules)


@dataclass(frozen=True)
class SearchResult:
    """A plan and the lower bound that was proven.

    Attributes
    ----------
    plan: the plan.
    gap: what the search proves, ``(least - bound_seconds) / least``, where ``least`` is the least sum of seconds that
        it found: ``plan.seconds``, unless the plan was chosen for its makespan, on a machine that overlaps
        communication with computation. Of makespans nothing is proven. The gap is 1 for a propagated plan.
    bound_seconds: the lower bound: no plan's sum of seconds is less. It is 0 for a propagated plan, of which nothing is
        proven.
    time_limit_reached: whether the time limit cut the search short. The plan then depends on the machine's speed.
    second_per_byte: the price of memory at which the bound was proven, summed over program points; 0 where the budget
        does not bind.
    write_report: writes the report of the search, which takes a while: of several searches, only the best one's is
        written. None if it is written, or there is none.
    """

    plan: Plan
    gap: float
    bound_seconds: float
    time_limit_reached: bool = False
    second_per_byte: float = 0.0
    write_report: Callable[[Limits], SearchReport] | None = field(default=None, compare=False, repr=False)

    def reported(self, limits: Limits) -> SearchResult:
        """The same with the report of the search in its plan, which has what can be found out within the limits."""
        if self.write_report is None:
            return self
        with collector_paused(), limits_as_errors(limits):
            report = self.write_report(limits)
        plan = replace(self.plan, stages=tuple(replace(stage, report=report) for stage in self.plan.stages))
        return replace(self, plan=plan, write_report=None)


def makespan_of(result: SearchResult) -> float:
    """Return the predicted seconds of a result's plan."""
    return result.plan.makespan_seconds


@quick_hidet()
def find_plan(
    graph: NormalGraph,
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    allow: Allow | None = None,
    cost_model: CostModel | None = None,
    report: bool = True,
    overlap: bool = True,
    rules: RuleTable | None = None,
    limits: Limits | None = None,
    offered: OfferedParts | None = None,
    **changes: Any,
) -> SearchResult:
    """Find a plan as :func:`search` does, for the given mesh alone, and return it with its lower bound.

    Parameters
    ----------
    allow: callable, optional
        Whether a spec may be chosen for an operator. An operator for which nothing is allowed keeps all its choices.
    cost_model: CostModel, optional
        The cost of the parts of a plan; predicted for the cluster when not given.
    report: bool
        Whether to make the report that ``plan.explain()`` shows.
    overlap: bool
        Whether to look for plans that hide more communication behind computation (:mod:`hidet_dist.search.overlap`),
        on a machine that overlaps them, and to report what is hidden.
    rules: RuleTable, optional
        A table, for any mesh, with which rules and proofs are shared.
    limits: Limits, optional
        What is left to a search of which this one is a part, instead of the limits of the options. There is no warning
        then.
    offered: OfferedParts, optional
        The parts in which axes may split; see :func:`hidet_dist.search.formulation.formulate.formulate`.
    """
    options = SearchOptions.of(options, changes)
    own = options.limits() if limits is None else limits.part(1.0)
    view = planning_view(graph, options.symbols, cluster.mesh)
    result = _search(view, cluster, options, own, allow, cost_model, overlap, rules, True, offered)
    result = result.reported(own) if report else replace(result, write_report=None)
    if limits is None:
        warn_of_limit(own, result.gap)
    return result


def warn_of_limit(limits: Limits, gap: float) -> None:
    """Issue a SearchLimitWarning at the caller's caller if the time limit was reached; ``gap`` is the plan's."""
    if limits.time_reached:
        warnings.warn(
            f"Planning reached its time limit of {limits.given_seconds} s. The plan is the best one until then, the "
            f"gap to the lower bound is {gap:.2%}, and another run may find another plan.",
            SearchLimitWarning,
            stacklevel=3,
        )


def _search_both(
    view: GraphView,
    cluster: Cluster,
    finer: Refinement,
    options: SearchOptions,
    limits: Limits,
    rules: RuleTable | None,
) -> SearchResult:
    """Search for the given mesh and for the finer one, and return the better plan."""
    inputs, outputs = (finer.translated_all(specs) for specs in (options.input_specs, options.output_specs))
    translated = replace(options, input_specs=inputs, output_specs=outputs)
    searches = [
        (tuning.GIVEN_MESH_FRACTION, lambda part: _search(view, cluster, options, part, rules=rules, insists=True)),
        (1.0, lambda part: _search(view, finer.cluster, translated, part, rules=rules)),
    ]
    # Within the gap the given mesh wins: the user knows its axes.
    best = best_search(searches, limits, options.solver_gap, makespan_of)
    return replace(best, time_limit_reached=limits.time_reached)


def best_search(
    searches: Iterable[tuple[float, Callable[[Limits], Found]]],
    limits: Limits,
    gap: float,
    seconds: Callable[[Found], float],
) -> Found:
    """Run searches on several meshes, and return the best result; within the gap an earlier one wins.

    Parameters
    ----------
    searches: iterable of (float, callable)
        For each mesh, the fraction of the limits that are left to it, and the search under limits.
    limits: Limits
        The limits of all searches together.
    gap: float
        The relative gap.
    seconds: callable
        The predicted seconds of a result.

    Raises
    ------
    InfeasibleError, SolverError
        When no mesh has a plan within the budget and the limits. A mesh without one is left out otherwise.
    """
    errors: list[InfeasibleError | SolverError] = []
    best: Found | None = None
    for fraction, run in searches:
        part = limits.part(fraction)
        if best is not None and part.expired():
            break
        try:
            result = run(part)
        except InfeasibleError as error:
            errors.append(error)
        except SolverError as error:
            if not part.time_reached:
                raise
            errors.append(error)
        else:
            if best is None or seconds(result) < seconds(best) * (1 - gap):
                best = result
    if best is None:
        unfit = [error for error in errors if isinstance(error, InfeasibleError)]
        raise min(unfit, key=lambda one: one.least_budget) if unfit else errors[0]
    return best


def _search(
    view: GraphView,
    cluster: Cluster,
    options: SearchOptions,
    limits: Limits,
    allow: Allow | None = None,
    cost_model: CostModel | None = None,
    overlap: bool = True,
    rules: RuleTable | None = None,
    insists: bool = False,
    offered: OfferedParts | None = None,
) -> SearchResult:
    """Search for one mesh; if it ``insists``, with a plan of a simpler problem where none was found in time."""
    model = PredictedCost(cluster) if cost_model is None else cost_model
    overlaps = overlap and cost_model is None and cluster.device.overlaps_communication
    tensors, pins = _named(view, cluster.mesh, options)
    # A simpler problem is formulated with the rules that the time has been enough for.
    rules = RuleTable(cluster.mesh) if rules is None else rules
    with collector_paused(), limits_as_errors(limits):
        if offered is None:
            offered = offered_parts([pins], rules, options.unequal_parts, options.mode == "search")
        budgets = [device.nbytes for device in limiting_devices(cluster, options.mem_budget, offered.parts)]
        incumbents = Incumbents()
        steps: tuple[StepTaken, ...] = ()
        made: StagePlan | None = None
        if options.mode == "propagate":
            formulation = formulate(view, cluster, model, options, pins, allow, limits, rules, offered=offered)
            costs = StageCosts(view, cluster.mesh, model, formulation.fused)
            picks: Sequence[int] = propagate(view, formulation, limits)
            bound, gap, price = 0.0, 1.0, 0.0
        else:

            def formulated(part: Limits | None, choice_set: ChoiceSet) -> Formulation:
                return formulate(view, cluster, model, options, pins, allow, part, rules, choice_set, offered)

            table = rule_table(view, cluster.mesh, rules)
            for few in (ChoiceSet.FEW, ChoiceSet.FEW_PROVEN):
                try:
                    formulation, solution, incumbents = _solved(
                        view, formulated, few, options, limits, insists and allow is None
                    )
                except InfeasibleError as error:
                    raise for_the_least(error, budgets) from None
                costs = StageCosts(view, cluster.mesh, model, formulation.fused)
                picks = solution.choices
                if overlaps:
                    overlapping = OverlapSearch(costs, cluster, formulation)
                    candidate = overlapping.better(solution, options.solve_options(limits))
                    picks, made = candidate.choices, candidate.stage
                if formulation.is_proven(view, picks, table):
                    break
            gap, bound = solution.gap, solution.seconds * (1 - solution.gap)
            price, steps = math.fsum(solution.second_per_byte), solution.steps

        def describe(choices: Sequence[int]) -> StagePlan:
            return label_stage(view, stage_of(costs, formulation, choices), tensors)

        stage, held = write_stage(costs, cluster, formulation, picks, made)
        stage = label_stage(view, stage, tensors)
        if options.mode == "propagate":
            _check_held(held, min(budgets))
        else:
            if picks != solution.choices:
                incumbents(picks, stage.seconds, bound, limits.elapsed_seconds())
            if held.excess > 0:
                raise VerificationError(f"The plan holds {held}, more than mem_budget = {held.device.nbytes}.")
        if overlaps:
            if options.mode == "propagate":
                beside = overlapped(PlannedTasks(view, cluster, formulation.fused), stage, min(budgets))
            else:
                beside = candidate.overlap
            stage = beside.plan(stage)

    def report_of(left: Limits) -> SearchReport:
        known = [
            (one, stage if one.choices == picks else describe(one.choices))
            for one in incumbents.known
            if one.choices == picks or not left.expired()
        ]
        return write_report(view, formulation, stage, picks, known, options.mode, bound, gap, held, left, steps)

    return SearchResult(Plan((stage,)), gap, bound, limits.time_reached, price, report_of)


def _solved(
    view: GraphView,
    formulated: Callable[[Limits | None, ChoiceSet], Formulation],
    few: ChoiceSet,
    options: SearchOptions,
    limits: Limits,
    insists: bool,
) -> tuple[Formulation, Solution, Incumbents]:
    """Formulate a problem and solve it, if it ``insists`` with these few choices where time is short for all.

    The incumbents are those of the formulation that is returned.
    """
    told: list[tuple[Formulation, Incumbents]] = []

    def solve_options(of: Formulation) -> SolveOptions:
        """Keep the incumbents of each formulation apart: their choices are numbers of its own."""
        known = Incumbents()
        told.append((of, known))

        def tell(choices: Sequence[int], seconds: float, least: float, elapsed: float) -> None:
            known(choices, seconds, least, elapsed)
            if options.on_incumbent is not None:
                options.on_incumbent(seconds, least)

        return options.solve_options(limits, tell)

    def solve(whole: Formulation, given: SolveOptions) -> Solution:
        return optimize(whole.problem, given)

    if insists:
        size = len(view.operators), view.kinds
        formulation, solution = plan_in_time(formulated, solve, solve_options, limits, *size, few=few)
    else:
        formulation = formulated(limits, ChoiceSet.ALL)
        solution = solve(formulation, solve_options(formulation))
    return formulation, solution, next(known for of, known in reversed(told) if of is formulation)


@quick_hidet()
def formulate_problem(
    graph: NormalGraph,
    cluster: Cluster,
    options: SearchOptions | None = None,
    *,
    rules: RuleTable | None = None,
    **changes: Any,
) -> Problem:
    """Formulate the planning of a graph, for the given mesh alone, as the problem that solvers take.

    Raises as :func:`search` does for options that do not fit the graph.
    """
    options = SearchOptions.of(options, changes)
    limits = options.limits()
    view = planning_view(graph, options.symbols, cluster.mesh)
    _, pins = _named(view, cluster.mesh, options)
    with collector_paused(), limits_as_errors(limits):
        return formulate(view, cluster, PredictedCost(cluster), options, pins, limits=limits, rules=rules).problem


def _named(view: GraphView, mesh: DeviceMesh, options: SearchOptions) -> tuple[dict[str, Tensor], Pins]:
    """Check the specs of inputs and outputs; return the tensors by the user's names too, and the pins."""
    check_specs(view, mesh, "input", view.inputs, options.input_specs)
    check_specs(view, mesh, "output", view.outputs, options.output_specs)
    tensors = parse_names(options.names)
    tensors |= {name: x for name, x in names_of(view.tensors.values()).items() if name not in tensors}
    return tensors, Pins(view, mesh, parse_pins(options.pins), tensors)


@contextmanager
def limits_as_errors(limits: Limits) -> Iterator[None]:
    """Turn a time limit reached without a plan, and a lack of memory, into SolverError."""
    try:
        yield
    except OutOfTimeError:
        raise SolverError(
            f"No plan was found within the time limit of {limits.given_seconds} s. Allow more time "
            "(solver_time_limit_seconds), pin specs, or derive the plan from pins (mode 'propagate')."
        ) from None
    except MemoryError as error:
        raise SolverError(
            f"Planning ran out of memory. It may take {limits.nbytes} bytes; allow less (solver_memory_limit_bytes), "
            "so that the graph is planned by coarser means."
        ) from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a search makes millions of small tuples without cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_held(held: DeviceHeld, least: int) -> None:
    if held.excess > 0:
        raise InfeasibleError(
            f"The plan that follows from the pins holds {held}, and mem_budget is {held.device.nbytes}. Pin more "
            "weights to specs that split them, or search for a plan (mode 'search').",
            least + held.excess,
        )
