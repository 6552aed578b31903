"""Groups of devices: machines whose devices differ in rates, memory or links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hidet_dist.errors import ConfigError
from hidet_dist.machine.cluster import HIDET, Cluster, Device, DeviceGroup, Link
from hidet_dist.machine.kernels import KernelCost
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


def slowest(devices: Sequence[Device]) -> Device:
    """Describe a device that is equivalent to unequal devices where all do equal parts of the work.

    Each rate is the least, and each cost the greatest, of all devices. It has only the features that all devices have,
    and the classes of kernels that were measured on all. Where they fuse differently, it fuses as hidet does.
    """
    first = devices[0]
    if all(device == first for device in devices):
        return first
    rates = _least_rates([device.flops_per_second for device in devices])
    of_all = [name for name in first.kernels if all(name in device.kernels for device in devices)]
    kernels = {name: _slowest_kernel([device.kernels[name] for device in devices]) for name in of_all}
    return Device(
        " and ".join(dict.fromkeys(device.name for device in devices)),
        rates,
        min(device.memory_bandwidth_bytes_per_second for device in devices),
        min(device.memory_bytes for device in devices),
        max(device.launch_seconds for device in devices),
        all(device.overlaps_communication for device in devices),
        min(device.cache_bytes for device in devices),
        kernels,
        all(device.places_shards for device in devices),
        first.fusion if all(device.fusion == first.fusion for device in devices) else HIDET,
    )


def _least_rates(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Take the least rate of each dtype for which one is given; others have the default one."""
    dtypes = dict.fromkeys(dtype for own in rates for dtype in own)
    return {dtype: min(own.get(dtype, own["default"]) for own in rates) for dtype in dtypes}


def _slowest_kernel(costs: Sequence[KernelCost]) -> KernelCost:
    return KernelCost(
        max(cost.seconds_per_operation for cost in costs),
        max(cost.seconds_per_byte for cost in costs),
        max(cost.seconds_per_call for cost in costs),
    )


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
