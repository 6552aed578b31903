"""Groups of devices: machines whose devices differ in rates, memory or links."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hidet_dist.errors import ConfigError
from hidet_dist.machine.cluster import Cluster, DeviceGroup, Link, slowest
from hidet_dist.machine.protocols import Protocol
from hidet_dist.spec import DeviceMesh


def unequal_cluster(mesh: DeviceMesh, links: Sequence[Link], groups: Sequence[DeviceGroup]) -> Cluster:
    """Describe a machine of several groups of devices; ``links`` has one link for each mesh axis.

    All devices of the mesh do equal parts of the work, so the slowest devices and links determine its costs. Raises
    ConfigError when the groups do not fit the mesh.
    """
    linked = tuple(replace(group, links=group.links or tuple(links)) for group in groups)
    within = [slowest_link([group.links[axis] for group in linked]) for axis in range(1, len(links))]
    return Cluster(mesh, (*links[:1], *within), slowest([group.device for group in linked]), linked)


def with_memory_of_each(cluster: Cluster, nbytes: Sequence[int]) -> Cluster:
    """Describe the machine whose devices have these bytes of memory, in the order of ranks.

    Devices at the same coordinate of the first mesh axis have the least of theirs. Raises ConfigError unless there is
    a number for each device.
    """
    mesh = cluster.mesh
    if len(nbytes) != mesh.size:
        raise ConfigError(f"The mesh {mesh} has {mesh.size} devices; memory budgets are given of {len(nbytes)}.")
    each = mesh.size // mesh.shape[0]
    least = [min(nbytes[begin : begin + each]) for begin in range(0, mesh.size, each)]
    own = [(group.device, group.links) for group in cluster.groups for _ in range(group.count)]
    found = own or [(cluster.device, cluster.links)] * mesh.shape[0]
    devices = [
        (replace(device, memory_bytes=memory), links) for (device, links), memory in zip(found, least, strict=True)
    ]
    groups = [DeviceGroup(len(list(equal)), *one) for one, equal in itertools.groupby(devices)]
    whole = replace(cluster.device, memory_bytes=min(least))
    return replace(cluster, device=whole, groups=tuple(groups) if cluster.groups or len(groups) > 1 else ())


def slowest_link(links: Sequence[Link]) -> Link:
    """Describe a link with the greatest latency and the least bandwidth of several, and the protocols that all have."""
    protocols = []
    for protocol in links[0].protocols:
        alike = [other for link in links for other in link.protocols if other.name == protocol.name]
        if len(alike) == len(links) and all(other.path == protocol.path for other in alike):
            protocols.append(
                Protocol(
                    protocol.name,
                    protocol.path,
                    max(other.start_seconds for other in alike),
                    max(other.latency_seconds for other in alike),
                    min(other.bandwidth_bytes_per_second for other in alike),
                )
            )
    return Link(
        max(link.latency_seconds for link in links),
        min(link.bandwidth_bytes_per_second for link in links),
        tuple(protocols),
    )
