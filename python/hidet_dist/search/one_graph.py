"""The search for the plan of one graph on one mesh: formulate its problem, solve it, and write the plan down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hidet.graph import Tensor

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.cost.model import PredictedCost
from hidet_dist.errors import InfeasibleError, VerificationError
from hidet_dist.frugal import collector_paused
from hidet_dist.machine import Cluster
from hidet_dist.normalize import NormalGraph
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.choice_sets import ChoiceSet
from hidet_dist.search.formulation.devices import DeviceHeld, for_the_least, limiting_devices
from hidet_dist.search.formulation.formulate import Formulation, formulate
from hidet_dist.search.formulation.labels import label_stage, parse_names
from hidet_dist.search.formulation.parts import offered_parts
from hidet_dist.search.formulation.pins import Pins, parse_pins
from hidet_dist.search.formulation.solution import StageCosts, stage_of, write_stage
from hidet_dist.search.in_time import plan_in_time
from hidet_dist.search.limits import Limits, limits_as_errors
from hidet_dist.search.options import SearchOptions, SolveOptions
from hidet_dist.search.overlap import OverlapSearch
from hidet_dist.search.problem import Problem, Solution
from hidet_dist.search.propagate import propagate
from hidet_dist.search.report import Incumbents, write_report
from hidet_dist.search.request import SearchRequest
from hidet_dist.search.result import SearchResult
from hidet_dist.spec import DeviceMesh, Plan, StagePlan
from hidet_dist.spec.report import SearchReport, StepTaken
from hidet_dist.symbolic.planning import check_specs, planning_view, rule_table
from hidet_dist.view import GraphView
from hidet_dist.weights import names_of


def search_graph(view: GraphView, request: SearchRequest, limits: Limits, insists: bool = True) -> SearchResult:
    """Search for one graph, in its ``view``, on one mesh.

    If it ``insists``, the result is the plan of a simpler problem where none was found in time. The report is not
    written yet. Raises as :func:`hidet_dist.search.search` does.
    """
    cluster, options, allow = request.cluster, request.options, request.allow
    model = PredictedCost(cluster) if request.cost_model is None else request.cost_model
    overlaps = options.overlap and request.cost_model is None and cluster.device.overlaps_communication
    tensors, pins = _named(view, cluster.mesh, options)
    # A simpler problem is formulated with the rules that the time has been enough for.
    rules, offered = RuleTable(cluster.mesh) if request.rules is None else request.rules, request.offered
    with collector_paused(), limits_as_errors(limits):
        if offered is None:
            offered = offered_parts([pins], rules, options.unequal_parts, options.mode == "search")
        budgets = [device.nbytes for device in limiting_devices(cluster, options.mem_budget, offered.parts)]
        incumbents = Incumbents()
        steps: tuple[StepTaken, ...] = ()
        narrowed: frozenset[int] | None = None
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
            price, steps, narrowed = math.fsum(solution.second_per_byte), solution.steps, solution.narrowed

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
        told = known, options.mode, bound, gap, held, left, steps, narrowed
        return write_report(view, formulation, stage, picks, *told)

    plan = Plan((stage,))
    return SearchResult((plan,), plan.makespan_seconds, gap, bound, limits.time_reached, price, write_report=report_of)


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

    Raises as :func:`hidet_dist.search.search` does for options that do not fit the graph.
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


def _check_held(held: DeviceHeld, least: int) -> None:
    if held.excess > 0:
        raise InfeasibleError(
            f"The plan that follows from the pins holds {held}, and mem_budget is {held.device.nbytes}. Pin more "
            "weights to specs that split them, or search for a plan (mode 'search').",
            least + held.excess,
        )
