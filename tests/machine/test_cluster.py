from __future__ import annotations

import re
from typing import Any

import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.machine import MACHINES, Cluster, Device, Link, builtin
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

DEVICE = Device("toy", {"default": 1e9, "float16": 4e9}, 1e8, 10**6, 1e-6)
FAST, SLOW = Link(1e-6, 1e9), Link(1e-5, 1e8)
CLUSTER = Cluster(DeviceMesh((4, 2)), (SLOW, FAST), DEVICE)


def test_collectives_cost_what_the_closed_forms_say() -> None:
    # n = 2 over the fast axis, 4 over the slow one; 8 over both: one ring over the slower link.
    for axes, n, a, w in (((1,), 2, 1e-6, 1e9), ((0,), 4, 1e-5, 1e8), ((0, 1), 8, 1e-5, 1e8)):
        ring = (n - 1) * (a + 8000 / (n * w))
        assert CLUSTER.collective_seconds(ALL_GATHER, 8000, axes) == pytest.approx(ring, rel=1e-12)
        assert CLUSTER.collective_seconds(REDUCE_SCATTER, 8000, axes) == pytest.approx(ring, rel=1e-12)
        assert CLUSTER.collective_seconds(ALL_REDUCE, 8000, axes) == pytest.approx(2 * ring, rel=1e-12)
        exchange = (n - 1) * (a + 8000 / (n * n * w))
        assert CLUSTER.collective_seconds(ALL_TO_ALL, 8000, axes) == pytest.approx(exchange, rel=1e-12)


def test_a_group_of_one_communicates_for_nothing() -> None:
    alone = Cluster(DeviceMesh((1,)), (SLOW,), DEVICE)
    assert alone.collective_seconds(ALL_REDUCE, 10**6, (0,)) == 0


def test_an_operator_is_bound_by_arithmetic_or_by_memory() -> None:
    assert DEVICE.operator_seconds(10**9, 8, "float32") == pytest.approx(1 + 1e-6)
    assert DEVICE.operator_seconds(10**9, 8, "float16") == pytest.approx(0.25 + 1e-6)
    assert DEVICE.operator_seconds(10, 10**8, "float16") == pytest.approx(1 + 1e-6)
    assert DEVICE.operator_seconds(0, 0, "float32") == 0
    assert CLUSTER.copy_seconds(500) == pytest.approx(1e-6 + 1000 / 1e8)


PODS = sorted(name for name, machine in MACHINES.items() if machine.network is not None)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_built_in_machines_have_one_link_an_axis(name: str) -> None:
    cluster = builtin(name, DeviceMesh((2, 4)))
    assert len(cluster.links) == 2
    assert (
        cluster.collective_seconds(ALL_GATHER, 2**20, (0, 1)) > cluster.collective_seconds(ALL_GATHER, 2**20, (0,)) > 0
    )


@pytest.mark.parametrize("name", PODS)
def test_axes_that_leave_the_node_go_over_the_network(name: str) -> None:
    machine = MACHINES[name]
    within, across = machine.link, machine.network
    for shape, links in (
        ((8,), (within,)),
        ((16,), (across,)),
        ((2, 4), (within, within)),
        ((4, 4), (across, within)),
        ((8, 8), (across, within)),
        ((3, 2, 4), (across, within, within)),
        ((2, 2, 8), (across, across, within)),
    ):
        assert builtin(name, DeviceMesh(shape)).links == links
    cluster = builtin(name, DeviceMesh((4, 4)))
    assert cluster.collective_seconds(ALL_GATHER, 2**30, (0,)) > 4 * cluster.collective_seconds(ALL_GATHER, 2**30, (1,))
    # A ring over both axes is as slow as its slowest link.
    assert cluster.collective_seconds(ALL_GATHER, 2**30, (0, 1)) > cluster.collective_seconds(ALL_GATHER, 2**30, (0,))


def test_a_mesh_of_more_devices_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dgx-h100 has 8 devices; .* needs 16. dgx-h100-pod has several nodes"):
        builtin("dgx-h100", DeviceMesh((2, 8)))
    with pytest.raises(ConfigError, match=r"pcie-l40s has 8 devices; .* needs 9.$"):
        builtin("pcie-l40s", DeviceMesh((9,)))
    assert builtin("cpu", DeviceMesh((4, 16))).mesh.size == 64


def test_faster_machines_are_faster() -> None:
    """The order in which data sheets and measurements put them, so that no figure slips by a digit."""
    mesh = DeviceMesh((8,))
    half = {name: builtin(name, mesh).device.operator_seconds(10**15, 2, "bfloat16") for name in MACHINES}
    order = ["dgx-h100", "hgx-h200", "pcie-h100", "pcie-l40s", "pcie-a100", "cpu"]
    assert sorted(order, key=half.__getitem__) == order
    memory = {name: builtin(name, mesh).copy_seconds(10**10) for name in MACHINES}
    order = ["hgx-h200", "dgx-h100", "dgx-a100", "pcie-a100", "pcie-l40s", "cpu"]
    assert sorted(order, key=memory.__getitem__) == order
    gather = {name: builtin(name, mesh).collective_seconds(ALL_GATHER, 10**9, (0,)) for name in MACHINES}
    order = ["dgx-h100", "dgx-a100", "pcie-h100", "pcie-a100", "cpu"]
    assert sorted(order, key=gather.__getitem__) == order
    for name, machine in MACHINES.items():
        rates = machine.device.flops_per_second
        assert rates.get("float64", rates["default"]) < rates["float32"]
        # A CPU's library computes products of float32 and float64 only.
        assert (rates["float32"] <= rates["float16"]) == (name != "cpu")


@pytest.mark.parametrize("wrong", [-1e9, 0, float("nan"), float("inf"), "fast", None, True])
def test_rates_must_be_positive_numbers(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"bandwidth above 0 bytes/s; got {wrong!r}"):
        Link(1e-6, wrong)
    with pytest.raises(ConfigError, match=re.escape(f"flops_per_second['int8'] is {wrong!r}")):
        Device("broken", {"default": 1e9, "int8": wrong}, 1e9, 10**9, 1e-6)
    with pytest.raises(ConfigError, match=f"memory_bandwidth_bytes_per_second is {wrong!r}"):
        Device("broken", {"default": 1e9}, wrong, 10**9, 1e-6)
    with pytest.raises(ConfigError, match=f"memory_bytes is {wrong!r}"):
        Device("broken", {"default": 1e9}, 1e9, wrong, 1e-6)


@pytest.mark.parametrize("wrong", [-1e-9, float("nan"), float("inf"), "short", None])
def test_times_must_not_be_negative(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"latency of 0 or more seconds; got {wrong!r}"):
        Link(wrong, 1e9)
    with pytest.raises(ConfigError, match=f"launch_seconds of 0 or more; got {wrong!r}"):
        Device("broken", {"default": 1e9}, 1e9, 10**9, wrong)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="'default' entry"):
        Device("broken", {"float32": 1e9}, 1e9, 10**9, 1e-6)
    with pytest.raises(ConfigError, match="2 axes; got 1 links"):
        Cluster(DeviceMesh((2, 2)), (FAST,), DEVICE)
    with pytest.raises(ConfigError, match="Unknown machine 'dgx-z'"):
        builtin("dgx-z", DeviceMesh((2,)))
