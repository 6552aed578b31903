"""Slices of described machines, and groups of devices that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link, builtin, load_machine, save_machine, unequal_cluster
from hidet_dist.machine.slices import MeshSlice, link_between, slice_sizes, slices_at, sub_cluster
from hidet_dist.spec import DeviceMesh

MESH = DeviceMesh((2, 8), ("node", "gpu"))
POD = builtin("dgx-a100-pod", MESH)
NETWORK, NVLINK = POD.links
OLD = Device("old", {"default": 1e12, "float16": 4e12}, 1e11, 16 * 10**9, 1e-6, True)
NEW = Device("new", {"default": 2e12}, 3e11, 80 * 10**9, 2e-6)
PCIE = Link(5e-6, 3e10)
UNEQUAL = unequal_cluster(MESH, POD.links, [DeviceGroup(1, NEW), DeviceGroup(1, OLD, (NETWORK, PCIE))])


def test_slices_are_aligned_blocks_of_ranks() -> None:
    assert slice_sizes(MESH) == [1, 2, 4, 8, 16]
    assert slice_sizes(DeviceMesh((3, 2))) == [1, 2, 6]
    assert [str(part) for part in slices_at(MESH, 4)] == ["4", "4-5", "4-7"]
    assert [part.size for part in slices_at(MESH, 8)] == [1, 2, 4, 8]
    for part, says in (
        (MeshSlice(2, 6), "not a slice of the mesh .* begin at a multiple of their size"),
        (MeshSlice(0, 3), "slices have 1, 2, 4, 8, 16 ranks"),
        (MeshSlice(8, 24), "has the ranks 0 to 15; 8-23 are outside"),
    ):
        with pytest.raises(ConfigError, match=says):
            sub_cluster(POD, part)


def test_a_slice_has_the_axes_and_links_along_which_it_has_several_devices() -> None:
    node = sub_cluster(POD, MeshSlice(8, 16))
    assert (str(node.mesh), node.links) == ("[gpu=8]", (NVLINK,))
    assert str(sub_cluster(POD, MeshSlice(2, 4)).mesh) == "[gpu=2]"
    assert str(sub_cluster(POD, MeshSlice(5, 6)).mesh) == "[gpu=1]"
    assert sub_cluster(POD, MeshSlice(0, 16)) is POD
    four = builtin("dgx-a100-pod", DeviceMesh((4, 8), ("node", "gpu")))
    assert sub_cluster(four, MeshSlice(16, 32)) == POD


def test_the_link_between_slices_is_that_of_the_first_axis_on_which_they_differ() -> None:
    assert link_between(POD, MeshSlice(0, 4), MeshSlice(4, 8)) == NVLINK
    assert link_between(POD, MeshSlice(4, 8), MeshSlice(8, 12)) == NETWORK
    assert link_between(UNEQUAL, MeshSlice(8, 12), MeshSlice(12, 16)) == PCIE
    assert link_between(UNEQUAL, MeshSlice(0, 4), MeshSlice(4, 8)) == NVLINK
    with pytest.raises(ConfigError, match="0-7 and 4-5 have ranks in common"):
        link_between(POD, MeshSlice(0, 8), MeshSlice(4, 6))


def test_a_slice_has_the_devices_of_its_groups_and_the_whole_is_as_good_as_the_worst() -> None:
    assert sub_cluster(UNEQUAL, MeshSlice(0, 8)) == Cluster(DeviceMesh((8,), ("gpu",)), (NVLINK,), NEW)
    assert sub_cluster(UNEQUAL, MeshSlice(12, 14)) == Cluster(DeviceMesh((2,), ("gpu",)), (PCIE,), OLD)
    whole = UNEQUAL.device
    assert dict(whole.flops_per_second) == {"default": 1e12, "float16": 2e12}
    assert (whole.memory_bytes, whole.memory_bandwidth_bytes_per_second) == (16 * 10**9, 1e11)
    assert (whole.launch_seconds, whole.overlaps_communication) == (2e-6, False)
    assert UNEQUAL.links == (NETWORK, PCIE)


def test_groups_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(UNEQUAL, path)
    assert load_machine(path, MESH) == UNEQUAL
    equal = unequal_cluster(MESH, POD.links, [DeviceGroup(2, NEW)])
    assert equal.device == NEW


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(device={}), "has 'device' and 'groups'"),
        (lambda data: data.update(groups={}), "must be a list with a group"),
        (lambda data: data["groups"].pop(), "has 2 coordinates; the groups of devices have 1"),
        (lambda data: data["groups"][0].update(count=0), "count of 1 or more; got 0"),
        (lambda data: data["groups"][1].pop("device"), r"'groups'\[1\] of .* must have the keys count, device"),
        (lambda data: data["groups"][1]["device"].update(memory_bytes=-1), "memory_bytes is -1"),
        (lambda data: data["groups"][1].update(links=[]), r"'links' of 'groups'\[1\] .* must be a list"),
    ],
)
def test_a_file_whose_groups_make_no_sense_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(UNEQUAL, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        load_machine(path, MESH)
