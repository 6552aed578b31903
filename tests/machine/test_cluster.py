from __future__ import annotations

import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.machine import MACHINES, PODS, Cluster, Device, Link, builtin
from hidet_dist.spec import DeviceMesh

DEVICE = Device("toy", {"default": 1e9, "float16": 4e9}, 1e8, 10**6, 1e-6)
FAST, SLOW = Link(1e-6, 1e9), Link(1e-5, 1e8)
CLUSTER = Cluster(DeviceMesh((4, 2)), (SLOW, FAST), DEVICE)


def test_collectives_cost_what_the_closed_forms_say() -> None:
    # n = 2 over the fast axis, 4 over the slow one; 8 over both: one ring over the slower link.
    for axes, n, a, w in (((1,), 2, 1e-6, 1e9), ((0,), 4, 1e-5, 1e8), ((0, 1), 8, 1e-5, 1e8)):
        ring = (n - 1) * (a + 8000 / (n * w))
        assert CLUSTER.all_gather_seconds(8000, axes) == pytest.approx(ring, rel=1e-12)
        assert CLUSTER.reduce_scatter_seconds(8000, axes) == pytest.approx(ring, rel=1e-12)
        assert CLUSTER.all_reduce_seconds(8000, axes) == pytest.approx(2 * ring, rel=1e-12)
        exchange = (n - 1) * (a + 8000 / (n * n * w))
        assert CLUSTER.all_to_all_seconds(8000, axes) == pytest.approx(exchange, rel=1e-12)


def test_a_group_of_one_communicates_for_nothing() -> None:
    alone = Cluster(DeviceMesh((1,)), (SLOW,), DEVICE)
    assert alone.all_reduce_seconds(10**6, (0,)) == 0


def test_an_operator_is_bound_by_arithmetic_or_by_memory() -> None:
    assert DEVICE.operator_seconds(10**9, 8, "float32") == pytest.approx(1 + 1e-6)
    assert DEVICE.operator_seconds(10**9, 8, "float16") == pytest.approx(0.25 + 1e-6)
    assert DEVICE.operator_seconds(10, 10**8, "float16") == pytest.approx(1 + 1e-6)
    assert DEVICE.operator_seconds(0, 0, "float32") == 0
    assert CLUSTER.copy_seconds(500) == pytest.approx(1e-6 + 1000 / 1e8)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_built_in_machines_have_one_link_an_axis(name: str) -> None:
    cluster = builtin(name, DeviceMesh((2, 4)))
    assert len(cluster.links) == 2
    assert cluster.all_gather_seconds(2**20, (0, 1)) > cluster.all_gather_seconds(2**20, (0,)) > 0


@pytest.mark.parametrize("name", sorted(PODS))
def test_only_the_last_axis_of_a_pod_stays_within_a_node(name: str) -> None:
    cluster = builtin(name, DeviceMesh((4, 4)))
    assert cluster.all_gather_seconds(2**30, (0,)) > 4 * cluster.all_gather_seconds(2**30, (1,))
    # A ring over both axes is as slow as its slowest link.
    assert cluster.all_gather_seconds(2**30, (0, 1)) > cluster.all_gather_seconds(2**30, (0,))
    assert builtin(name, DeviceMesh((8,))).links == builtin(PODS[name][0], DeviceMesh((8,))).links


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        Link(1e-6, -1e9)
    with pytest.raises(ConfigError, match="latency"):
        Link(float("nan"), 1e9)
    with pytest.raises(ConfigError, match="rates above 0"):
        Device("broken", {"default": 1e9}, 1e9, 0, 1e-6)
    with pytest.raises(ConfigError, match="2 axes; got 1 links"):
        Cluster(DeviceMesh((2, 2)), (FAST,), DEVICE)
    with pytest.raises(ConfigError, match="Unknown machine 'dgx-z'"):
        builtin("dgx-z", DeviceMesh((2,)))
