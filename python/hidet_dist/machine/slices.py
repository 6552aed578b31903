"""Slices of a described machine: sub-meshes of consecutive ranks, and the links between two of them.

A slice is a block of consecutive ranks that the mesh axes divide evenly: some devices of a node, one node, several
whole nodes. So on the mesh ``[node=2, gpu=8]`` there are slices of 1, 2, 4, 8 and 16 devices. The mesh of a slice has
the axes along which the slice has more than one device, with the shares of the slice's coordinates along them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hidet_dist.errors import ConfigError
from hidet_dist.machine.cluster import Cluster, Device, DeviceGroup, Link, slowest
from hidet_dist.machine.groups import slowest_link
from hidet_dist.spec import DeviceMesh


@dataclass(frozen=True, order=True)
class MeshSlice:
    """The ranks ``start`` to ``stop`` (excluded) of a mesh.

    ``shares`` are those of the first axis of the slice's mesh. Without them, the slice has the shares of the mesh.
    """

    start: int
    stop: int
    shares: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.stop - self.start

    @property
    def ranks(self) -> range:
        """The ranks in the whole mesh, in the order of the ranks in the slice's mesh."""
        return range(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if self.size > 1 else str(self.start)


def slice_sizes(mesh: DeviceMesh) -> list[int]:
    """List the sizes of a mesh's slices, smallest first: a divisor of an axis, times all axes behind it."""
    sizes = {1}
    for axis, extent in enumerate(mesh.shape):
        behind = math.prod(mesh.shape[axis + 1 :])
        sizes.update(part * behind for part in range(1, extent + 1) if extent % part == 0)
    return sorted(sizes)


def slices_at(mesh: DeviceMesh, start: int) -> list[MeshSlice]:
    """List the slices of a mesh that begin with a rank, smallest first."""
    return [
        MeshSlice(start, start + size) for size in slice_sizes(mesh) if start % size == 0 and start + size <= mesh.size
    ]


def check_slice(mesh: DeviceMesh, part: MeshSlice) -> None:
    """Raise ConfigError unless ``part`` is a slice of the mesh."""
    if not 0 <= part.start < part.stop <= mesh.size:
        raise ConfigError(f"The mesh {mesh} has the ranks 0 to {mesh.size - 1}; {part} are outside it.")
    if part.size not in slice_sizes(mesh) or part.start % part.size:
        raise ConfigError(
            f"The ranks {part} are not a slice of the mesh {mesh}: slices have "
            f"{', '.join(map(str, slice_sizes(mesh)))} ranks, and begin at a multiple of their size."
        )


def sub_cluster(cluster: Cluster, part: MeshSlice) -> Cluster:
    """Describe a slice as a separate machine: its devices, and the mesh axes along which it has several.

    The slice of all ranks is the machine itself, but for shares of the slice. Raises ConfigError when the mesh has no
    such slice.
    """
    mesh = cluster.mesh
    check_slice(mesh, part)
    if part.size == mesh.size:
        return with_shares(cluster, part.shares) if part.shares else cluster
    shape, left = [], part.size
    for extent in reversed(mesh.shape):
        shape.append(min(extent, left))
        left //= shape[-1]
    shape.reverse()
    axes = [axis for axis, extent in enumerate(shape) if extent > 1] or [mesh.ndim - 1]
    shares = tuple(_shares_within(mesh, axis, part.start, shape[axis]) for axis in axes)
    if part.shares:
        shares = (part.shares, *shares[1:])
    sub_mesh = DeviceMesh(tuple(shape[axis] for axis in axes), tuple(mesh.axis_names[axis] for axis in axes), shares)
    if not cluster.groups:
        return Cluster(sub_mesh, tuple(cluster.links[axis] for axis in axes), cluster.device)
    groups = _groups_of(cluster, part)
    links = [slowest_link([(group.links or cluster.links)[axis] for group in groups]) for axis in axes]
    if len(groups) > 1:  # groups are joined by the first axis of the machine
        links = [cluster.links[0] if axis == 0 else link for axis, link in zip(axes, links, strict=True)]
    devices = devices_along(cluster, sub_mesh, part.start)
    return Cluster(sub_mesh, tuple(links), slowest(devices), device_groups(sub_mesh, devices))


def _groups_of(cluster: Cluster, part: MeshSlice) -> list[DeviceGroup]:
    """List the groups of devices of which a slice has some."""
    rows = cluster.mesh.size // cluster.mesh.shape[0]
    first, last = part.start // rows, (part.stop - 1) // rows
    groups, begin = [], 0
    for group in cluster.groups:
        if begin <= last and first < begin + group.count:
            groups.append(group)
        begin += group.count
    return groups


def with_shares(cluster: Cluster, shares: Sequence[int]) -> Cluster:
    """Describe a machine whose mesh has these shares of the first axis."""
    mesh = cluster.mesh
    others = ((),) * (mesh.ndim - 1)
    return replace(cluster, mesh=DeviceMesh(mesh.shape, mesh.axis_names, (tuple(shares), *others)))


def _shares_within(mesh: DeviceMesh, axis: int, start: int, count: int) -> tuple[int, ...]:
    """Return the shares of ``count`` coordinates of a mesh axis, from that of the rank ``start`` on."""
    if not mesh.shares or not mesh.shares[axis]:
        return ()
    first = mesh.coordinate(start)[axis]
    return mesh.shares_of(axis)[first : first + count]


def devices_along(cluster: Cluster, mesh: DeviceMesh, start: int) -> list[Device]:
    """List the device at each coordinate of the first axis of a sub-mesh that begins with the rank ``start``.

    Where the devices at one coordinate differ, it is one as slow as the slowest of them.
    """
    each = mesh.size // mesh.shape[0]
    if not cluster.groups:
        return [cluster.device] * mesh.shape[0]
    rows = cluster.mesh.size // cluster.mesh.shape[0]
    of_row = [group.device for group in cluster.groups for _ in range(group.count)]
    begins = [start + number * each for number in range(mesh.shape[0])]
    return [slowest(of_row[begin // rows : (begin + each - 1) // rows + 1]) for begin in begins]


def device_groups(mesh: DeviceMesh, devices: Sequence[Device]) -> tuple[DeviceGroup, ...]:
    """Group the devices along the first axis of a mesh, if it has shares for them and they differ; else none."""
    if not mesh.shares or not mesh.shares[0] or all(device == devices[0] for device in devices):
        return ()
    return tuple(DeviceGroup(len(list(equal)), device) for device, equal in itertools.groupby(devices))


def link_between(cluster: Cluster, first: MeshSlice, second: MeshSlice) -> Link:
    """Return the link between the devices of two slices: that of the first mesh axis along which their ranks differ.

    Raises ConfigError when the slices have ranks in common.
    """
    mesh = cluster.mesh
    if first.start < second.stop and second.start < first.stop:
        raise ConfigError(f"The slices {first} and {second} have ranks in common.")
    ranks = (*first.ranks, *second.ranks)
    for axis in range(mesh.ndim):
        behind = math.prod(mesh.shape[axis + 1 :])
        if len({rank // behind for rank in ranks}) > 1:
            break
    if axis and cluster.groups:
        begin, row = 0, first.start // (mesh.size // mesh.shape[0])
        for group in cluster.groups:
            if begin <= row < begin + group.count:
                return (group.links or cluster.links)[axis]
            begin += group.count
    return cluster.links[axis]
