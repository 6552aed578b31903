"""Devices and links, and the predicted seconds of operators and collectives on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.machine.kernels import PRODUCT, STORED_PRODUCTS, KernelCost, Work, check_kernels, slowest_kernel
from hidet_dist.machine.protocols import GroupRoute, Protocol
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.collectives import Collective

HIDET, LIBRARY, GPU = "hidet", "library", "gpu"
FUSIONS = (HIDET, LIBRARY, GPU)
"""How the operators of a device's programs share kernels (:mod:`hidet_dist.cost.fusion`): by hidet's pass alone; by
hidet's pass, with matrix products and convolutions as kernels around a library's calls; as on GPUs, where a softmax, a
norm or attention is one kernel."""


def _positive(value: Any) -> bool:
    return is_finite(value) and value > 0


@dataclass(frozen=True)
class Link:
    """The connection between the devices along one mesh axis.

    ``latency_seconds`` is paid at each step of a collective's ring. ``bandwidth_bytes_per_second`` is the rate at which
    one device sends in one direction. With ``protocols``, collectives have their figures, those of the quickest; others
    are left to messages between two devices.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    protocols: tuple[Protocol, ...] = ()

    def __post_init__(self) -> None:
        if not (is_finite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ConfigError(f"A link needs a latency of 0 or more seconds; got {shown(self.latency_seconds)}.")
        if not _positive(self.bandwidth_bytes_per_second):
            raise ConfigError(
                f"A link needs a bandwidth above 0 bytes/s; got {shown(self.bandwidth_bytes_per_second)}."
            )
        names = [protocol.name for protocol in self.protocols]
        if len(set(names)) < len(names):
            raise ConfigError(f"A link's protocols need different names; got {', '.join(names)}.")


def _least_rates(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Take the least rate of each dtype for which one is given; others have the default one."""
    dtypes = dict.fromkeys(dtype for own in rates for dtype in own)
    return {dtype: min(own.get(dtype, own["default"]) for own in rates) for dtype in dtypes}


def _slowest_kernels(kernels: Sequence[Mapping[str, KernelCost]]) -> dict[str, KernelCost]:
    """Take the greatest costs of each class that was measured on all devices."""
    of_all = [name for name in kernels[0] if all(name in own for own in kernels)]
    return {name: slowest_kernel([own[name] for own in kernels]) for name in of_all}


def _figure(worst: Callable[[Sequence[Any]], Any], **options: Any) -> Any:
    """Make the field of a device's figure; ``worst`` chooses from those of several devices, for :func:`slowest`."""
    return field(metadata={"worst": worst}, **options)


@dataclass(frozen=True)
class Device:
    """The figures of one device. A new one is a field here, with a default, and machine files may have it.

    Attributes
    ----------
    name: the device's name, such as ``H100-SXM5-80GB``.
    flops_per_second: FLOP/s by dtype name; the ``default`` entry is used for all other dtypes.
    memory_bandwidth_bytes_per_second: the bandwidth between the device and its memory, in bytes/s.
    memory_bytes: the capacity of its memory, in bytes.
    launch_seconds: the fixed cost of one kernel, in seconds.
    overlaps_communication: whether collectives run beside computation, in a separate stream.
    cache_bytes: the bytes of the cache that holds recently written data. Bytes beyond it, and weights, move at most at
        the bandwidth of memory.
    kernels: the measured cost of each class of float32 kernels (:data:`hidet_dist.machine.kernels.KERNEL_CLASSES`),
        which also applies to half-precision types. Classes that were not measured are predicted by the roofline.
    places_shards: whether collectives read and write the shards of any dim in place, without packing or unpacking.
        Those in host memory do, because they copy anyway. Where they do not, as in NCCL, ranks exchange partial maxima
        and minima, and reduce them by a kernel, which keeps NaN.
    fusion: how operators share kernels, one of :data:`FUSIONS`: ``library`` for CPUs, ``gpu`` for GPUs.
    multiprocessors: the streaming multiprocessors of a GPU, by whose number products of one operand are predicted to
        share a launch; 0 for a device of which this is not predicted.
    """

    name: str = _figure(lambda names: " and ".join(dict.fromkeys(names)))
    flops_per_second: Mapping[str, float] = _figure(_least_rates, hash=False)
    memory_bandwidth_bytes_per_second: float = _figure(min)
    memory_bytes: int = _figure(min)
    launch_seconds: float = _figure(max)
    overlaps_communication: bool = _figure(all, default=False)
    cache_bytes: int = _figure(min, default=0)
    kernels: Mapping[str, KernelCost] = _figure(_slowest_kernels, default_factory=dict, hash=False)
    places_shards: bool = _figure(all, default=False)
    fusion: str = _figure(lambda each: each[0] if len(set(each)) == 1 else HIDET, default=GPU)
    multiprocessors: int = _figure(lambda each: each[0] if len(set(each)) == 1 else 0, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"A device's name is a text; got {shown(self.name)}.")
        if not isinstance(self.flops_per_second, Mapping) or "default" not in self.flops_per_second:
            raise ConfigError(
                f"A device needs a 'default' entry in flops_per_second; got {shown(self.flops_per_second)}."
            )
        rates = {f"flops_per_second[{dtype!r}]": rate for dtype, rate in self.flops_per_second.items()}
        rates["memory_bandwidth_bytes_per_second"] = self.memory_bandwidth_bytes_per_second
        rates["memory_bytes"] = self.memory_bytes
        for what, rate in rates.items():
            if not _positive(rate):
                raise ConfigError(f"A device needs rates above 0; its {what} is {shown(rate)}.")
        if not (is_finite(self.launch_seconds) and self.launch_seconds >= 0):
            raise ConfigError(f"A device needs a launch_seconds of 0 or more; got {shown(self.launch_seconds)}.")
        for name in ("overlaps_communication", "places_shards"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"A device's {name} is true or false; got {shown(getattr(self, name))}.")
        if not (is_finite(self.cache_bytes) and self.cache_bytes >= 0):
            raise ConfigError(f"A device needs cache_bytes of 0 or more; got {shown(self.cache_bytes)}.")
        if not is_whole(self.multiprocessors, 0):
            raise ConfigError(
                f"A device's multiprocessors is a whole number of 0 or more; got {shown(self.multiprocessors)}."
            )
        if not isinstance(self.fusion, str) or self.fusion not in FUSIONS:
            raise ConfigError(f"A device's fusion is one of {', '.join(FUSIONS)}; got {shown(self.fusion)}.")
        check_kernels(self.kernels)

    def operator_seconds(self, operations: int, moved_bytes: int, dtype: str) -> float:
        """Predict the seconds of one operator by the roofline (Williams et al., CACM 52(4), 2009), plus a launch.

        ``operations`` are scalar operations, ``moved_bytes`` the bytes read and written. An operator without work takes
        no time.
        """
        if not operations and not moved_bytes:
            return 0.0
        rate = self.flops_per_second.get(dtype, self.flops_per_second["default"])
        return self.launch_seconds + max(operations / rate, moved_bytes / self.memory_bandwidth_bytes_per_second)

    def beyond_cache(self, work: Work) -> int:
        """Return the bytes that a kernel moves to or from memory because no cache holds them."""
        return work.weight_bytes + max(0, work.moved_bytes - work.weight_bytes - self.cache_bytes)

    def kernel_seconds(self, work: Work) -> float | None:
        """Predict the seconds of a kernel whose class was measured, without its launch; None for other classes."""
        cost = self.kernels.get(work.kernel)
        if cost is None and work.kernel in STORED_PRODUCTS:
            cost = self.kernels.get(PRODUCT)
        if cost is None:
            return None
        beyond = self.beyond_cache(work)
        function = self.kernels.get("function")
        return (
            (work.functions * function.seconds_per_operation if function is not None else 0.0)
            + work.operations * cost.seconds_per_operation
            + (work.moved_bytes - beyond) * cost.seconds_per_byte
            + beyond * max(cost.seconds_per_byte, 1 / self.memory_bandwidth_bytes_per_second)
            + work.calls * cost.seconds_per_call
        )


def slowest(devices: Sequence[Device]) -> Device:
    """Describe a device that is equivalent to unequal devices where all do equal parts of the work.

    Each rate is the least, and each cost the greatest, of all devices. It has only the features that all devices have,
    and the classes of kernels that were measured on all. Where they fuse differently, it fuses as hidet does.
    """
    first = devices[0]
    if all(device == first for device in devices):
        return first
    figures = {one.name: [getattr(device, one.name) for device in devices] for one in fields(Device)}
    return Device(**{one.name: one.metadata["worst"](figures[one.name]) for one in fields(Device)})


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices at consecutive coordinates of the first mesh axis.

    Attributes
    ----------
    count: the number of coordinates along the first mesh axis: of nodes on the mesh ``[node=2, gpu=8]``, of devices on
        ``[gpu=8]``.
    device: the figures of each of its devices.
    links: the link of each mesh axis within the group; empty for those of the machine.
    """

    count: int
    device: Device
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not is_whole(self.count, 1):
            raise ConfigError(f"A group of devices has a count of 1 or more; got {shown(self.count)}.")


@dataclass(frozen=True)
class Cluster:
    """A device mesh, the link of each of its axes, and the device at each coordinate.

    If devices differ, ``groups`` lists them in the order of the first mesh axis, and ``device`` is a device as good as
    each of them when all do equal parts of the work (:func:`hidet_dist.machine.groups.unequal_cluster`). Along an
    uneven axis of the mesh, each device does the part of the work that is its share.

    Costs of collectives are those of ring algorithms (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005). For n
    devices that together hold b bytes, latency a and bandwidth w, all-gather and reduce-scatter take
    (n-1)(a + b/(n w)), and an all-reduce is one of each. In an all-to-all each device sends b/n^2 bytes to each other
    device, which takes (n-1)(a + b/(n^2 w)). A group over several mesh axes is one ring with its slowest link.

    Where links have protocols, a collective takes the least time of those that all links of its group have
    (:class:`hidet_dist.machine.protocols.GroupRoute`).
    """

    mesh: DeviceMesh
    links: tuple[Link, ...]
    device: Device
    groups: tuple[DeviceGroup, ...] = ()

    def __post_init__(self) -> None:
        if len(self.links) != self.mesh.ndim:
            raise ConfigError(f"The mesh {self.mesh} has {self.mesh.ndim} axes; got {len(self.links)} links.")
        counts = [group.count for group in self.groups]
        if counts and sum(counts) != self.mesh.shape[0]:
            raise ConfigError(
                f"The first axis of the mesh {self.mesh} has {self.mesh.shape[0]} coordinates; the groups of devices "
                f"have {' + '.join(map(str, counts))}."
            )
        for group in self.groups:
            if group.links and len(group.links) != self.mesh.ndim:
                raise ConfigError(
                    f"The mesh {self.mesh} has {self.mesh.ndim} axes; a group of devices has {len(group.links)} links."
                )

    def device_at(self, coordinate: Sequence[int]) -> Device:
        """Return the device at a coordinate along uneven axes; ``device`` if they do not determine which it is."""
        if not self.mesh.shares or not self.mesh.shares[0]:
            return self.device
        begin = 0
        for group in self.groups:
            begin += group.count
            if coordinate[0] < begin:
                return group.device
        return self.device

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """The memory of the devices at each coordinate of the first mesh axis."""
        each = [group.device.memory_bytes for group in self.groups for _ in range(group.count)]
        return tuple(each) or (self.device.memory_bytes,) * self.mesh.shape[0]

    def with_memory(self, nbytes: int) -> Cluster:
        """Describe the machine whose least device has ``nbytes`` of memory, and each other as much more as it has now.

        Raises ConfigError for less than one byte.
        """
        more = nbytes - min(self.memory_bytes)

        def changed(device: Device) -> Device:
            return replace(device, memory_bytes=device.memory_bytes + more)

        groups = tuple(replace(group, device=changed(group.device)) for group in self.groups)
        return replace(self, device=replace(self.device, memory_bytes=nbytes), groups=groups)

    def _ring_seconds(self, nbytes: float, axes: Sequence[int]) -> float:
        n = self.mesh.group_size(axes)
        latency = max(self.links[axis].latency_seconds for axis in axes)
        bandwidth = min(self.links[axis].bandwidth_bytes_per_second for axis in axes)
        return (n - 1) * (latency + nbytes / (n * bandwidth))

    def collective_seconds(self, kind: Collective, nbytes: int, axes: Sequence[int]) -> float:
        """Predict the seconds of a collective over the group of ``axes``, on a tensor of ``nbytes`` within the group.

        These are the bytes after an all-gather, before a reduce-scatter, and on each device in an all-reduce; in an
        all-to-all, the sum over the devices of the group.
        """
        count = self.mesh.group_size(axes)
        if count == 1 or not kind.communicates:
            return 0.0
        around = kind.ring_nbytes(nbytes, count)
        # By a tree, only sums are made that all devices get.
        found = [
            route.seconds(around, kind.ring_passes)
            for is_ring, route in self._routes_over(tuple(axes))
            if is_ring or (kind.reduces and not kind.splits)
        ]
        return min(found) if found else kind.ring_passes * self._ring_seconds(around, axes)

    @cached_property
    def _routes(self) -> dict[tuple[int, ...], list[tuple[bool, GroupRoute]]]:
        """The routes over groups of axes that were asked for: there are few groups of a mesh."""
        return {}

    def _routes_over(self, axes: tuple[int, ...]) -> list[tuple[bool, GroupRoute]]:
        """List the routes, and whether each is a ring, of the protocols that the links of all axes have."""
        if axes not in self._routes:
            sizes = [self.mesh.group_size([axis]) for axis in axes]
            links = [{protocol.name: protocol for protocol in self.links[axis].protocols} for axis in axes]
            self._routes[axes] = [
                (
                    protocol.is_ring,
                    GroupRoute.over([(size, link[name]) for size, link in zip(sizes, links, strict=True)]),
                )
                for name, protocol in links[0].items()
                if all(name in link for link in links)
            ]
        return self._routes[axes]

    def copy_seconds(self, nbytes: int) -> float:
        """Predict the seconds of copying ``nbytes`` within a device: each byte is read and written."""
        seconds = self.device.kernel_seconds(Work("copy", 0, 2 * nbytes)) if nbytes else None
        if seconds is not None:
            return self.device.launch_seconds + seconds
        return self.device.operator_seconds(0, 2 * nbytes, "default")
