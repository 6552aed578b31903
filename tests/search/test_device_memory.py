"""Plans for devices of unlike memory, whose shards are unlike: each keeps its own budget."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import hidet
import numpy as np
import pytest
from hidet import ops
from hypothesis import given, settings
from hypothesis import strategies as st

import hidet_dist  # noqa: F401
from hidet_dist.cost.model import PredictedCost
from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster, DeviceGroup, builtin
from hidet_dist.machine.groups import unequal_cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.search import FamilyMember, SearchOptions, search
from hidet_dist.search.formulation.devices import held_by_fullest, held_by_ranks, limiting_devices
from hidet_dist.search.formulation.formulate import formulate
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.search.formulation.pins import Pins, parse_pins
from hidet_dist.search.formulation.solution import StageCosts, stage_of
from hidet_dist.search.problem import held_bytes, readers
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.view import GraphView
from hidet_dist.weights import names_of, weight

ROWS, HIDDEN, INNER = 48, 96, 288
GAP = 1e-6


def graph(layers: int = 1, rows: int = ROWS) -> NormalGraph:
    x = y = hidet.symbol([rows, HIDDEN], "float32", "cpu")
    for n in range(layers):
        z = ops.relu(ops.matmul(y, weight(f"up{n}", [HIDDEN, INNER], "float32")))
        y = y + ops.matmul(z, weight(f"down{n}", [INNER, HIDDEN], "float32"))
    return normalize(hidet.trace_from(y, [x]))


def machine(memory: tuple[int, ...], shares: tuple[int, ...] = (), name: str = "cpu") -> Cluster:
    mesh = DeviceMesh((len(memory),), ("gpu",), (shares,) if shares else ())
    like = builtin(name, mesh)
    groups = [DeviceGroup(1, replace(like.device, memory_bytes=nbytes)) for nbytes in memory]
    return unequal_cluster(mesh, like.links, groups)


def held(of: NormalGraph, plan: Plan, cluster: Cluster) -> list[int]:
    return [rank.most for rank in held_by_ranks(GraphView(of), plan.stages[0], cluster, None)]


def test_a_device_of_less_memory_holds_the_lesser_parts() -> None:
    whole, weights = graph(4), 4 * 2 * HIDDEN * INNER * 4
    most, least = int(0.85 * weights), int(0.5 * weights)
    cluster = machine((most, least), (2, 1))
    plan = search(whole, cluster).plan
    first, second = held(whole, plan, cluster)
    assert least < first <= most
    assert second <= least
    report = plan.stages[0].report
    assert report is not None
    fullest = held_by_fullest(GraphView(whole), plan.stages[0], cluster, None)
    assert (report.device, report.mem_budget) == (fullest.device.coordinate, fullest.device.nbytes)
    assert list(report.live_bytes) == fullest.live_bytes
    with pytest.raises(InfeasibleError, match="No plan fits mem_budget"):  # all of the device of less memory is needed
        search(whole, machine((least, most), (2, 1)))


def test_a_refusal_says_by_how_much_all_budgets_must_be_greater() -> None:
    whole = graph()
    cluster = machine((200_000, 120_000), (2, 1))
    with pytest.raises(InfeasibleError, match="budgets of 120000 and 200000 bytes") as refused:
        search(whole, cluster)
    least = refused.value.least_budget
    enough = cluster.with_memory(least)
    assert enough.memory_bytes == (least + 80_000, least)
    plan = search(whole, enough).plan
    room = [nbytes - own for nbytes, own in zip(enough.memory_bytes, held(whole, plan, enough), strict=True)]
    assert min(room) == 0
    with pytest.raises(InfeasibleError):
        search(whole, cluster.with_memory(least - 1))


@pytest.mark.parametrize(
    ("memory", "pins"),
    [
        ((0.9, 0.5), None),
        ((1.0, 0.4), None),
        *(
            pytest.param(memory, {"up0": "(R, S0[1,2])"}, marks=pytest.mark.slow)
            for memory in [(0.9, 0.5), (0.7, 0.8), (1.0, 0.4)]
        ),
    ],
)
def test_the_plan_is_the_best_of_all_that_fit_each_device(
    memory: tuple[float, float], pins: dict[str, str] | None
) -> None:
    whole, nbytes = graph(rows=8), 2 * HIDDEN * INNER * 4 + 2 * 8 * HIDDEN * 4
    view = GraphView(whole)
    cluster = machine((int(memory[0] * nbytes), int(memory[1] * nbytes)), (2, 1), "dgx-a100")
    options = SearchOptions(unequal_parts=True, pins=pins)
    formulation = formulate(view, cluster, PredictedCost(cluster), options, pinned(view, cluster, pins))
    costs = StageCosts(view, cluster.mesh, PredictedCost(cluster), formulation.fused)
    best = math.inf
    for picks in itertools.product(*(range(len(cost)) for cost in formulation.problem.cost)):
        seconds = formulation.problem.totals.seconds(picks)
        if seconds < best * (1 - 1e-9):
            stage = stage_of(costs, formulation, picks)
            ranks = held_by_ranks(view, stage, cluster, None)
            if all(rank.excess <= 0 for rank in ranks):
                best = seconds
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            search(whole, cluster, options)
        return
    found = search(whole, cluster, options, solver_gap=GAP, report=False, overlap=False)
    assert found.plan.seconds == pytest.approx(best, rel=2 * GAP)
    assert found.bound_seconds <= best * (1 + GAP)


def pinned(view: GraphView, cluster: Cluster, pins: dict[str, str] | None = None) -> Pins:
    return Pins(view, cluster.mesh, parse_pins(pins), names_of(view.tensors.values()))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_plan_holds_more_on_any_device_than_the_problem_counts(data: st.DataObject) -> None:
    """Whatever the shares, the memory and the choices: what fits the limiting devices fits all."""
    shares = tuple(data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3)))
    memory = tuple(data.draw(st.lists(st.integers(100_000, 400_000), min_size=3, max_size=3)))
    whole, cluster = graph(rows=math.lcm(48, sum(shares))), machine(memory, shares)
    view, model = GraphView(whole), PredictedCost(cluster)
    formulation = formulate(view, cluster, model, SearchOptions(), pinned(view, cluster))
    problem = formulation.problem
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    picks = [int(generator.integers(len(cost))) for cost in problem.cost]
    nbytes = max(held_bytes(problem, readers(problem), picks))
    assert nbytes == max(problem.totals.nbytes(picks))
    stage = stage_of(StageCosts(view, cluster.mesh, model, formulation.fused), formulation, picks)
    ranks = held_by_ranks(view, stage, cluster, None)
    assert max(rank.excess for rank in ranks) <= nbytes - problem.budget
    assert max(rank.most for rank in ranks) <= max(live_bytes(view, stage))  # with the largest part of each
    assert held_by_fullest(view, stage, cluster, None).excess == max(rank.excess for rank in ranks)


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_devices_limit_plans_unless_another_has_greater_parts_and_no_more_memory(
    shares: list[int], memory: list[int]
) -> None:
    mesh = DeviceMesh((4,), ("gpu",), (tuple(shares),))
    cluster = replace(machine(tuple(2**20 * nbytes for nbytes in memory)), mesh=mesh)
    limiting = limiting_devices(cluster, None, ())
    of_axis, budgets = mesh.shares_of(0), cluster.memory_bytes
    chosen = [device.coordinate[0] for device in limiting if device.coordinate is not None]
    if not chosen:
        assert limiting[0].nbytes == min(budgets)
        chosen = [n for n in range(4) if of_axis[n] == max(of_axis) and budgets[n] == min(budgets)]
        assert chosen
    for n in range(4):
        assert any(of_axis[one] >= of_axis[n] and budgets[one] <= budgets[n] for one in chosen)


def test_one_device_limits_the_plans_of_equal_devices() -> None:
    cluster = machine((10, 10, 10))
    assert [one.coordinate for one in limiting_devices(cluster, None, [(0, (3, 2, 2))])] == [None]
    assert [one.coordinate for one in limiting_devices(cluster, None, [(0, (3, 2, 2)), (0, (2, 2, 3))])] == [(0,), (2,)]
    assert [one.nbytes for one in limiting_devices(machine((9, 8), (2, 1)), 7, ())] == [7]


def test_graphs_that_share_weights_keep_the_budget_of_each_device() -> None:
    prefill, decode = graph(4, 48), graph(4, 12)
    weights = 4 * 2 * HIDDEN * INNER * 4
    cluster = machine((int(0.9 * weights), int(0.5 * weights)), (2, 1))
    members = [FamilyMember(one, names=names_of(GraphView(one).tensors.values())) for one in (prefill, decode)]
    family = search(members, cluster)
    for member, plan in zip((prefill, decode), family.plans, strict=True):
        first, second = held(member, plan, cluster)
        assert int(0.5 * weights) < first <= int(0.9 * weights)
        assert second <= int(0.5 * weights)
    with pytest.raises(InfeasibleError):
        search(members, cluster.with_memory(int(0.3 * weights)))
