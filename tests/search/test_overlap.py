"""Plans for machines that communicate beside computing: makespans in closed form, and plans that change for it."""

from __future__ import annotations

from dataclasses import replace

import hidet
import pytest
from hidet import ops
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist import recost
from hidet_dist.cost.model import PredictedCost
from hidet_dist.errors import VerificationError
from hidet_dist.machine import Cluster, Device, Link, builtin
from hidet_dist.normalize import normalize
from hidet_dist.overlap.planned import PlannedTasks, overlapped
from hidet_dist.search import search, tuning
from hidet_dist.search.formulation.formulate import formulate
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import Pins
from hidet_dist.search.formulation.solution import StageCosts, stage_of
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.overlap import OverlapSearch, _cheapest
from hidet_dist.search.problem import Problem, Solution, evaluate
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

ROWS, WIDTH, LAYERS = 3072, 4096, 6
FLOPS, MEMORY, LINK, LATENCY = 1e12, 1e13, 1e9, 1e-6
SPLIT = 2


def machine(flops: float = FLOPS, overlaps: bool = True) -> Cluster:
    device = Device("toy", {"default": flops}, MEMORY, 2**40, 0.0, overlaps)
    return Cluster(DeviceMesh((SPLIT,)), (Link(LATENCY, LINK),), device)


def chain(layers: int = LAYERS) -> hidet.FlowGraph:
    """Matrices one after the other, of a few more rows and columns than there are rows."""
    x = y = hidet.symbol([ROWS, WIDTH], "float32", "cpu")
    for number in range(layers):
        y = ops.matmul(y, weight(f"w{number}", [WIDTH, WIDTH], "float32"))
    return normalize(hidet.trace_from(y, [x]))


MATRIX, ACTIVATION = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
GATHER = (SPLIT - 1) * (LATENCY + MATRIX / (SPLIT * LINK))
PRODUCT = 2 * ROWS * WIDTH * WIDTH / SPLIT / FLOPS
# Room for split weights, the graph's input and output, and a few whole weights: all of them whole do not fit.
BUDGET = LAYERS * MATRIX // SPLIT + 2 * ACTIVATION + 3 * MATRIX


def weights_gathered(plan: Plan) -> list[str]:
    return [c.tensor for op in plan.stages[0].operators for c in op.conversions if c.tensor.startswith("w")]


def test_weights_are_gathered_where_products_hide_it_and_activations_where_nothing_does() -> None:
    serial = search(chain(), machine(overlaps=False), mem_budget=BUDGET, solver_gap=1e-6).plan
    beside = search(chain(), machine(), mem_budget=BUDGET, solver_gap=1e-6).plan
    # One after the other, the activations are what is cheaper to send.
    assert serial.stages[0].overlap is None
    assert serial.makespan_seconds == serial.seconds
    assert "overlap" not in serial.to_json()
    assert len(weights_gathered(serial)) < len(weights_gathered(beside))
    # Beside the products, gathering weights is free but for the first.
    overlap = beside.stages[0].overlap
    assert overlap is not None
    assert beside.seconds > serial.seconds
    assert beside.makespan_seconds < serial.seconds
    # The gap is what the search proved of the least sum, though the plan's own sum is greater.
    report = beside.stages[0].report
    assert report is not None
    assert report.gap <= 1e-6
    assert report.bound_seconds == pytest.approx(serial.seconds, rel=2e-6)
    gathers = [own for own in overlap.communications if own.tensor.startswith("w")]
    assert [own.seconds for own in gathers] == pytest.approx([GATHER] * len(gathers))
    assert PRODUCT > GATHER
    assert sum(own.hidden_seconds < own.seconds * (1 - 1e-9) for own in gathers) <= 1
    assert overlap.hidden_seconds == pytest.approx(beside.seconds - beside.makespan_seconds)
    assert overlap.held_bytes <= BUDGET


def fully_split(graph: hidet.FlowGraph, cluster: Cluster, budget: int | None = None) -> Plan:
    """Every device multiplies its rows with weights that are stored split, and gathered."""
    pins = {f"w{number}": "(S0, R)" for number in range(LAYERS)}
    pins |= {f"op:{number}": "(S0, R), (R, R) -> (S0, R)" for number in range(LAYERS)}
    return search(graph, cluster, mem_budget=budget, pins=pins, solver_gap=1e-6).plan


@pytest.mark.parametrize("flops", [FLOPS, FLOPS * 2])
def test_the_makespan_of_gathered_weights_is_that_of_the_slower_stream(flops: float) -> None:
    plan = fully_split(chain(), machine(flops))
    product = PRODUCT * FLOPS / flops
    taken = [op.compute_seconds for op in plan.stages[0].operators]
    assert taken == pytest.approx([product] * LAYERS)
    (output,) = plan.stages[0].output_conversions
    slice_seconds = plan.seconds - LAYERS * (product + GATHER) - output.seconds
    assert 0 < slice_seconds < 1e-4
    # The first gather goes beside nothing but cutting the input.
    exposed = GATHER - slice_seconds + (LAYERS - 1) * max(0.0, GATHER - product)
    assert plan.makespan_seconds == pytest.approx(LAYERS * product + slice_seconds + exposed + output.seconds)
    overlap = plan.stages[0].overlap
    assert overlap is not None
    hidden = [own.hidden_seconds for own in overlap.communications]
    assert hidden == pytest.approx([slice_seconds, *[min(GATHER, product)] * (LAYERS - 1), 0.0], abs=1e-9)


def test_memory_for_one_gathered_weight_leaves_nothing_to_hide_behind() -> None:
    kept = LAYERS * MATRIX // SPLIT + 2 * ACTIVATION
    # Two products' activations of half the rows, and one whole weight, or two.
    for weights, exposed in ((1, LAYERS), (2, 1)):
        budget = kept + ACTIVATION + weights * MATRIX
        plan = fully_split(chain(), machine(), budget)
        assert plan.stages[0].overlap is not None
        assert plan.stages[0].overlap.held_bytes == budget
        (output,) = plan.stages[0].output_conversions
        product_seconds = sum(op.compute_seconds for op in plan.stages[0].operators)
        expected = product_seconds + exposed * GATHER + output.seconds
        assert plan.makespan_seconds == pytest.approx(expected, rel=1e-3)
    # Just in time: no more than two whole weights are held, however much room there is.
    roomy = fully_split(chain(), machine()).stages[0].overlap
    assert roomy is not None
    assert roomy.held_bytes == kept + ACTIVATION + 2 * MATRIX


def test_a_reduction_between_two_products_is_not_hidden() -> None:
    x = hidet.symbol([ROWS, WIDTH], "float32", "cpu")
    up, down = weight("up", [WIDTH, WIDTH], "float32"), weight("down", [WIDTH, WIDTH], "float32")
    graph = normalize(hidet.trace_from(ops.relu(ops.matmul(ops.matmul(x, up), down)), [x]))
    plan = search(graph, machine(), pins={"up": "(R, S0)", "down": "(S0, R)", "op:2": "(R, R) -> (R, R)"}).plan
    assert plan.stages[0].overlap is not None
    assert plan.stages[0].overlap.communications
    assert plan.makespan_seconds == pytest.approx(plan.seconds)
    assert plan.stages[0].overlap.hidden_seconds == pytest.approx(0.0, abs=1e-12)


def test_a_plan_is_the_same_every_time_and_comes_back_from_its_file() -> None:
    one, two = (search(chain(), machine(), mem_budget=BUDGET).plan for _ in range(2))
    assert one.to_json() == two.to_json()
    assert Plan.from_json(one.to_json()) == one


def test_a_plan_that_is_changed_by_hand_is_scheduled_anew() -> None:
    graph, cluster = chain(2), machine()
    plan = search(graph, cluster, pins={"w0": "(S0, R)", "w1": "(S0, R)"}).plan
    edited = plan.edit({"w0": "(R, R)", "w1": "(R, R)"})
    assert edited.stages[0].overlap is None
    anew = recost(edited, graph, cluster)
    assert anew.stages[0].overlap is not None
    assert anew.makespan_seconds <= anew.seconds
    assert recost(edited, graph, machine(overlaps=False)).stages[0].overlap is None


def blocks(layers: int) -> hidet.FlowGraph:
    """Norm, linear, GELU, linear, with the residual around them."""
    x = y = hidet.symbol([2048, 1024], "float16", "cpu")
    for number in range(layers):
        inner = ops.matmul(ops.layer_norm(y), weight(f"up{number}", [1024, 4096], "float16"))
        y = y + ops.matmul(ops.gelu(inner), weight(f"down{number}", [4096, 1024], "float16"))
    return normalize(hidet.trace_from(y, [x]))


@pytest.mark.parametrize(("mesh", "name"), [((8,), "dgx-a100"), ((2, 2), "pcie-l40s")])
def test_no_plan_is_worse_or_larger_for_overlap(mesh: tuple[int, ...], name: str) -> None:
    graph, cluster = blocks(2), builtin(name, DeviceMesh(mesh))
    view = GraphView(graph)
    least = search(graph, cluster, report=False, overlap=False)
    assert least.plan.stages[0].overlap is None
    for limit in (None, int(0.7 * max(live_bytes(view, least.plan.stages[0])))):
        found = search(graph, cluster, mem_budget=limit, report=False)
        plain = least if limit is None else search(graph, cluster, mem_budget=limit, report=False, overlap=False)
        overlap = found.plan.stages[0].overlap
        assert overlap is not None
        assert found.plan.makespan_seconds <= plain.plan.seconds
        assert overlap.held_bytes <= (cluster.device.memory_bytes if limit is None else limit)
        # What is proven is proven of the sum.
        assert found.bound_seconds == pytest.approx(plain.bound_seconds)
        assert found.gap == pytest.approx(1 - found.bound_seconds / plain.plan.seconds, abs=1e-9)
        # No plan takes less than half of the least sum: one of the two streams has half of it.
        assert found.plan.makespan_seconds >= found.bound_seconds / 2


def test_a_plan_whose_conversions_are_costed_for_another_machine_is_refused() -> None:
    graph, cluster = chain(2), machine()
    plan = search(graph, cluster, pins={"w0": "(S0, R)", "op:0": "(R, R), (R, R) -> (R, R)"}).plan
    tasks = PlannedTasks(GraphView(graph), replace(cluster, links=(Link(1.0, LINK),)), {})
    with pytest.raises(VerificationError, match="on two streams"):
        overlapped(tasks, plan.stages[0], 2**40)


@settings(max_examples=10)
@given(st.data())
def test_of_plans_that_a_search_saw_the_one_of_least_makespan_is_taken(data: st.DataObject) -> None:
    graph, cluster = chain(3), machine()
    view, model, options = GraphView(graph), PredictedCost(cluster), SearchOptions(mem_budget=BUDGET)
    formulation = formulate(view, cluster, model, options, Pins(view, cluster.mesh, {}))
    costs = StageCosts(view, cluster.mesh, model, formulation.fused)
    search = OverlapSearch(costs, cluster, formulation)
    draws = [st.integers(0, len(costs) - 1) for costs in formulation.problem.cost]
    known = tuple(data.draw(st.lists(st.tuples(*draws), min_size=1, max_size=tuning.OVERLAP_PLANS + 1, unique=True)))
    assume(peak(formulation.problem, known[0]) <= BUDGET)
    solution = Solution(known[0], evaluate(formulation.problem, known[0]), 0.0, known=known)
    solve = options.solve_options(options.limits(), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "OVERLAP_ROUNDS", 0)  # no search at other costs, which might find a better plan
        best = search.better(solution, solve)

    def makespan(picks: tuple[int, ...]) -> float:
        stage = stage_of(costs, formulation, picks)
        return overlapped(search.planned, stage, BUDGET).schedule.seconds

    assert peak(formulation.problem, best.choices) <= BUDGET
    # Where nothing is hidden, the schedule and the sum add up the same seconds in different orders.
    assert best.seconds == pytest.approx(makespan(best.choices), rel=1e-9)
    least = min(makespan(one) for one in known if peak(formulation.problem, one) <= BUDGET)
    assert least * (1 - 1e-9) <= best.seconds <= least / (1 - solve.solver_gap) * (1 + 1e-9)


@given(problems())
def test_the_cheapest_plan_is_the_least_of_those_that_fit_or_the_last_if_none_does(problem: Problem) -> None:
    plans = all_picks(problem)
    chosen = _cheapest(problem, plans)
    fitting = [evaluate(problem, one) for one in plans if peak(problem, one) <= problem.budget]
    if fitting:
        assert peak(problem, chosen) <= problem.budget
        assert evaluate(problem, chosen) == pytest.approx(min(fitting))
    else:
        assert chosen == plans[-1]
