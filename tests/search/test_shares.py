"""Shares of the first axis that the search proposes and takes for a machine of unequal devices."""

from __future__ import annotations

from dataclasses import replace

import hidet
import pytest
from hidet import ops
from hypothesis import given
from hypothesis import strategies as st

import hidet_dist  # noqa: F401
from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link
from hidet_dist.machine.groups import unequal_cluster
from hidet_dist.normalize import normalize
from hidet_dist.search import FamilyMember, search
from hidet_dist.search.shares import proportional, proposed_meshes
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.weights import weight

ROWS, HIDDEN, INNER = 256, 256, 512
RATE = 1e10


def traced(rows: int | str = ROWS) -> hidet.FlowGraph:
    x = hidet.symbol([rows, HIDDEN], "float32", "cpu")
    y = ops.relu(ops.matmul(x, weight("up", [HIDDEN, INNER], "float32")))
    return hidet.trace_from(ops.matmul(y, weight("down", [INNER, HIDDEN], "float32")), [x])


def machine(*rates: float, shape: tuple[int, ...] = (), latency: float = 0.0) -> Cluster:
    mesh = DeviceMesh(shape or (len(rates),), ("node", "gpu")[2 - len(shape or (1,)) :])
    groups = [DeviceGroup(1, Device(f"{rate:g}", {"default": rate}, 1e30, 2**40, 0.0)) for rate in rates]
    return unequal_cluster(mesh, [Link(latency, 1e12)] * mesh.ndim, groups)


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=5), st.integers(0, 20))
def test_parts_are_divided_so_that_no_move_of_one_shortens_the_longest_time(rates: list[float], more: int) -> None:
    parts = len(rates) + more
    shares = proportional(rates, parts)
    assert sum(shares) == parts
    assert min(shares) >= 1
    longest = max(share / rate for share, rate in zip(shares, rates, strict=True))
    for source, share in enumerate(shares):
        for target, own in enumerate(shares):
            if share > 1 and source != target and share / rates[source] == longest:
                assert (own + 1) / rates[target] >= longest * (1 - 1e-12)


def test_the_search_takes_shares_in_proportion_to_rates() -> None:
    cluster, graph = machine(3 * RATE, RATE), normalize(traced())
    assert DeviceMesh((2,), ("gpu",), ((3, 1),)) in proposed_meshes([FamilyMember(graph)], cluster)
    plan = search(graph, cluster, searches_shares=True).plan
    assert plan.stages[0].mesh == DeviceMesh((2,), ("gpu",), ((3, 1),))
    even = search(graph, cluster).plan
    assert plan.seconds < even.seconds / 1.9  # twice as fast, but for what is sent


def test_shares_of_graphs_with_symbolic_dims_are_those_of_their_other_dims() -> None:
    """The rows are planned for 3 * 5 * 7, which more shares than those of 256 divide."""
    cluster, graph, symbols = machine(3 * RATE, RATE), normalize(traced("rows")), {"rows": SymbolSize(105)}
    proposed = [sum(mesh.shares[0]) for mesh in proposed_meshes([FamilyMember(graph, symbols=symbols)], cluster)]
    assert proposed[0] == 4
    assert all(HIDDEN % parts == 0 for parts in proposed)
    plan = search(graph, cluster, searches_shares=True, symbols=symbols).plan
    assert str(plan.stages[0].mesh) == "[gpu=3:1]"
    assert plan.seconds < search(graph, cluster, symbols=symbols).plan.seconds / 1.5


def test_shares_that_divide_the_batch_are_proposed_and_taken_where_messages_are_slow() -> None:
    """Two parts of three are better for the work, but send within the graph; three of four split the rows."""
    x = hidet.symbol([8, 192], "float32", "cpu")
    y = ops.relu(ops.matmul(x, weight("up", [192, 192], "float32")))
    graph = normalize(hidet.trace_from(ops.matmul(y, weight("down", [192, 192], "float32")), [x]))
    quick, slow = machine(2 * RATE, RATE), machine(2 * RATE, RATE, latency=1e-5)
    proposed = [mesh.shares[0] for mesh in proposed_meshes([FamilyMember(graph)], quick)]
    assert proposed[0] == (2, 1)
    assert [sum(shares) for shares in proposed if 8 % sum(shares) == 0] == [4]
    assert str(search(graph, quick, searches_shares=True).plan.stages[0].mesh) == "[gpu=2:1]"
    plan = search(graph, slow, searches_shares=True).plan
    assert str(plan.stages[0].mesh) == "[gpu=3:1]"
    assert plan.collectives() == {"all_gather": 1}  # of the outputs


def test_the_even_split_is_kept_where_shares_do_not_pay() -> None:
    graph = normalize(traced())
    for cluster in (machine(RATE, RATE), machine(3 * RATE, RATE, latency=1.0)):
        assert not search(graph, cluster, searches_shares=True).plan.stages[0].mesh.is_uneven()
    assert proposed_meshes([FamilyMember(graph)], machine(RATE, RATE)) == []
    one = Cluster(DeviceMesh((2,)), (Link(0.0, 1e9),), Device("one", {"default": RATE}, 1e9, 1, 0.0))
    assert proposed_meshes([FamilyMember(graph)], one) == []


def test_shares_are_in_proportion_to_memory_where_equal_parts_of_the_weights_fill_it() -> None:
    """Devices of one rate: three quarters of the weights, and the activations, fit the greater memory only."""
    graph, weights = normalize(traced(8)), 2 * HIDDEN * INNER * 4

    def of_memory(*memory: float) -> Cluster:
        cluster = machine(RATE, RATE)
        groups = [
            replace(group, device=replace(group.device, memory_bytes=int(share * weights)))
            for group, share in zip(cluster.groups, memory, strict=True)
        ]
        return unequal_cluster(cluster.mesh, cluster.links, groups)

    (mesh,) = proposed_meshes([FamilyMember(graph)], of_memory(1.2, 0.4))
    assert mesh.shares == ((3, 1),)
    plan = search(graph, of_memory(1.2, 0.4), searches_shares=True).plan
    assert plan.stages[0].mesh == mesh
    assert proposed_meshes([FamilyMember(graph)], of_memory(1.2, 0.4), mem_budget=weights) == []
    assert proposed_meshes([FamilyMember(graph)], of_memory(1.2, 0.7)) == []
    with pytest.raises(InfeasibleError):
        search(graph, of_memory(0.7, 0.2), searches_shares=True)


@pytest.mark.parametrize("frequency", [1.0, 99.0])
def test_graphs_that_share_weights_have_shares_that_suit_all_of_them(frequency: float) -> None:
    cluster, names = machine(3 * RATE, RATE), {}
    for name, shape in (("up", [HIDDEN, INNER]), ("down", [INNER, HIDDEN])):
        names[name] = weight(name, shape, "float32")

    def of_rows(rows: int) -> FamilyMember:
        x = hidet.symbol([rows, HIDDEN], "float32", "cpu")
        y = ops.matmul(ops.relu(ops.matmul(x, names["up"])), names["down"])
        return FamilyMember(normalize(hidet.trace_from(y, [x])), frequency if rows == 1 else 1.0, names)

    members = [of_rows(ROWS), of_rows(1)]
    family = search(members, cluster, searches_shares=True)
    even = search(members, cluster)
    assert family.seconds < even.seconds / 1.7
    (mesh,) = {plan.stages[0].mesh for plan in family.plans}
    assert mesh.shares == ((3, 1),)
    stated = search(members, replace(cluster, mesh=mesh))
    assert stated.plans == family.plans
    equal = search(members, machine(RATE, RATE), searches_shares=True)
    assert not equal.plans[0].stages[0].mesh.is_uneven()


def test_only_the_first_axis_gets_shares() -> None:
    cluster = machine(2 * RATE, RATE, shape=(2, 2))
    meshes = proposed_meshes([FamilyMember(normalize(traced()))], cluster)
    assert meshes
    assert all(mesh.shares[0] and not mesh.shares[1] for mesh in meshes)


def test_the_configuration_asks_for_it() -> None:
    cluster = machine(3 * RATE, RATE)
    config = {"mesh_shape": [2], "mesh_axis_names": ["gpu"], "machine": cluster, "shares": "auto"}
    plan = hidet.distributed.make_plan(traced(), config)
    assert plan.stages[0].mesh == DeviceMesh((2,), ("gpu",), ((3, 1),))
    report = hidet.distributed.describe(plan, traced(), config)
    assert report.mesh_shares == ((3, 1),)
    assert type(report).from_json(report.to_json()) == report
    # The plan says which mesh it is for, so that it is built for it.
    stated = replace(cluster, mesh=DeviceMesh((2,), ("gpu",), ((3, 1),)))
    again = hidet.distributed.make_plan(traced(), {"mesh_shape": [2], "machine": stated})
    assert again.stages[0].seconds == pytest.approx(plan.stages[0].seconds)
