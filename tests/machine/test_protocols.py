"""Collectives over links with protocols cost what the closed forms of NCCL's model say, by the quickest protocol."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Link, Protocol, builtin, load_machine, save_machine
from hidet_dist.machine.groups import slowest_link
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

US, GB = 1e-6, 1e9
NODE = builtin("dgx-h100", DeviceMesh((8,)))
POD = builtin("dgx-h100-pod", DeviceMesh((16, 8)))


@pytest.mark.parametrize("nbytes", [2, 16 * 1024])
def test_a_small_all_reduce_over_nvlink_goes_by_ll(nbytes: int) -> None:
    ring = 6.6 * US + 2 * 7 * (0.6 * US + nbytes / 8 / (141 * GB))
    assert NODE.collective_seconds(ALL_REDUCE, nbytes, (0,)) == pytest.approx(ring, rel=1e-12)
    assert ring < 16 * US


def test_gathers_go_by_rings_of_the_protocol_of_their_size() -> None:
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        for nbytes, start, step, rate in (
            (2**12, 6.6, 0.6, 141),
            (2**24, 14.0, 1.9, 0.92 * 18 * 20.6),
            (2**30, 8.4, 3.4, 18 * 20.6),
        ):
            ring = start * US + 7 * (step * US + nbytes / 8 / (rate * GB))
            assert NODE.collective_seconds(kind, nbytes, (0,)) == pytest.approx(ring, rel=1e-12)
    each = 6.6 * US + 7 * (0.6 * US + 2**12 / 64 / (141 * GB))
    assert NODE.collective_seconds(ALL_TO_ALL, 2**12, (0,)) == pytest.approx(each, rel=1e-12)


def test_a_ring_over_nodes_crosses_the_network_once_a_node() -> None:
    ring = 6.6 * US + 15 * 5.0 * US + 16 * 7 * 0.6 * US + 127 / 128 * 2**10 / (20.4 * GB)
    assert POD.collective_seconds(ALL_GATHER, 2**10, (0, 1)) == pytest.approx(ring, rel=1e-12)
    assert POD.collective_seconds(ALL_GATHER, 2**10, (1, 0)) == pytest.approx(ring, rel=1e-12)


def test_small_sums_of_many_nodes_go_by_a_tree() -> None:
    tree_rate = 0.92 / 3.8 * 0.4 * 50 * GB
    tree = 6.8 * US + 2 * (7 * 0.6 * US + 4 * 5.0 * US + 2**10 / tree_rate)
    assert POD.collective_seconds(ALL_REDUCE, 2**10, (0, 1)) == pytest.approx(tree, rel=1e-12)
    across = 6.8 * US + 2 * (4 * 5.0 * US + 2**10 / tree_rate)
    assert POD.collective_seconds(ALL_REDUCE, 2**10, (0,)) == pytest.approx(across, rel=1e-12)
    # No tree makes sums of which each device gets a part.
    ring = 6.6 * US + 15 * 5.0 * US + 15 / 16 * 2**10 / (20.4 * GB)
    assert POD.collective_seconds(REDUCE_SCATTER, 2**10, (0,)) == pytest.approx(ring, rel=1e-12)


def test_large_sums_go_around_a_ring_by_simple() -> None:
    nbytes = 2**31
    ring = 8.4 * US + 14 * (3.4 * US + nbytes / 8 / (18 * 20.6 * GB))
    assert NODE.collective_seconds(ALL_REDUCE, nbytes, (0,)) == pytest.approx(ring, rel=1e-12)


def test_pcie_has_no_ll128_and_a_group_of_one_nothing_to_send() -> None:
    cluster = builtin("pcie-h100", DeviceMesh((1, 8)))
    assert {protocol.name for protocol in cluster.links[1].protocols} == {
        f"{path}-{name}" for path in ("ring", "tree") for name in ("ll", "simple")
    }
    assert cluster.collective_seconds(ALL_REDUCE, 2**20, (0,)) == 0.0


def test_links_without_protocols_in_common_keep_their_own_figures() -> None:
    plain = Link(1e-5, 1e9)
    cluster = replace(builtin("dgx-h100", DeviceMesh((2, 4))), links=(plain, NODE.links[0]))
    ring = 7 * (1e-5 + 800 / (8 * 1e9))
    assert cluster.collective_seconds(ALL_GATHER, 800, (0, 1)) == pytest.approx(ring, rel=1e-12)


def test_the_slowest_of_several_links_has_the_slowest_figures_of_each_protocol() -> None:
    slow = slowest_link([NODE.links[0], builtin("dgx-a100", DeviceMesh((8,))).links[0]])
    rates = {protocol.name: protocol.bandwidth_bytes_per_second for protocol in slow.protocols}
    assert rates["ring-ll"] == 87.7 * GB and rates["ring-simple"] == 240 * GB
    assert slowest_link([NODE.links[0], Link(1e-6, 1e9)]).protocols == ()


def test_a_machine_file_keeps_protocols(tmp_path: Path) -> None:
    save_machine(POD, tmp_path / "pod.json")
    assert load_machine(tmp_path / "pod.json", POD.mesh) == POD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "star"}, "a path of ring, chain, tree; got 'x' and 'star'"),
        ({"name": 3}, "a text as its name"),
        ({"latency_seconds": -1.0}, "the latency_seconds of x is -1.0"),
        ({"start_seconds": float("nan")}, "the start_seconds of x is nan"),
        ({"bandwidth_bytes_per_second": 0.0}, "the bandwidth_bytes_per_second of x is 0.0"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Protocol(**{**vars(Protocol("x", "ring", 0.0, 0.0, 1.0)), **changes})


def test_two_protocols_of_one_name_are_refused() -> None:
    one = Protocol("x", "ring", 0.0, 0.0, 1.0)
    with pytest.raises(ConfigError, match="different names; got x, x"):
        Link(0.0, 1.0, (one, one))
    assert Cluster(DeviceMesh((2,)), (Link(0.0, 1.0, (one,)),), NODE.device).links[0].protocols == (one,)
