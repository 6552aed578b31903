"""Machine files: described machines as JSON."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_MACHINE_BYTES
from hidet_dist.machine.cluster import FUSIONS, Cluster, Device, DeviceGroup, Link
from hidet_dist.machine.gpu import GPUS
from hidet_dist.machine.groups import unequal_cluster
from hidet_dist.machine.kernels import KernelCost
from hidet_dist.machine.protocols import Protocol
from hidet_dist.spec import DeviceMesh

_IS_OPTIONAL = {one.name: (one.default, one.default_factory) != (MISSING, MISSING) for one in fields(Device)}
_DEVICE, _OPTIONAL = (tuple(name for name, own in _IS_OPTIONAL.items() if own is wanted) for wanted in (False, True))
_KERNEL = tuple(one.name for one in fields(KernelCost))
_GROUP = ("count", "device")
_LINK = ("latency_seconds", "bandwidth_bytes_per_second")
_PROTOCOL = ("name", "path", "start_seconds", "latency_seconds", "bandwidth_bytes_per_second")


def save_machine(cluster: Cluster, path: str | Path) -> None:
    """Write the devices and the link of each mesh axis to a JSON file, atomically."""
    if cluster.groups:
        data: dict[str, Any] = {"groups": [_group_data(group) for group in cluster.groups]}
    else:
        data = {"device": _device_data(cluster.device)}
    data["links"] = [_link_data(link) for link in cluster.links]
    write_text(Path(path), json.dumps(data, indent=1) + "\n")


def _device_data(device: Device) -> dict[str, Any]:
    data = {key: getattr(device, key) for key in (*_DEVICE, *_OPTIONAL)}
    data["flops_per_second"] = dict(device.flops_per_second)
    data["kernels"] = {name: {key: getattr(cost, key) for key in _KERNEL} for name, cost in device.kernels.items()}
    return data


def _link_data(link: Link) -> dict[str, Any]:
    data: dict[str, Any] = {key: getattr(link, key) for key in _LINK}
    if link.protocols:
        data["protocols"] = [{key: getattr(protocol, key) for key in _PROTOCOL} for protocol in link.protocols]
    return data


def _group_data(group: DeviceGroup) -> dict[str, Any]:
    data = {"count": group.count, "device": _device_data(group.device)}
    return {**data, "links": [_link_data(link) for link in group.links]} if group.links else data


def load_machine(path: str | Path, mesh: DeviceMesh) -> Cluster:
    """Read the machine of a JSON file, with ``mesh`` on it.

    The file has ``device`` (the attributes of :class:`hidet_dist.machine.Device`; those with a default may be left out,
    but ``fusion`` must not be beside measured kernels; ``multiprocessors`` are then those of the GPU of this name, if
    it is known) and ``links`` (latency_seconds, bandwidth_bytes_per_second): one per
    mesh axis, or one for all. A link may have ``protocols`` (name, path, start_seconds, latency_seconds,
    bandwidth_bytes_per_second each).

    Where devices differ, it has ``groups`` in place of ``device``, in the order of the first mesh axis: ``count``
    coordinates of that axis, their ``device``, and their ``links``, if these differ from the machine's.

    Raises
    ------
    ConfigError
        When the file is missing or malformed, has invalid figures, or lacks a link for an axis.
    """
    try:
        data = parse_json(read_text(path, MOST_MACHINE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the machine {path}: {error}") from error
    if isinstance(data, dict) and "device" in data and "groups" in data:
        raise ConfigError(f"The machine {path} has 'device' and 'groups'; leave one of the two out.")
    groups = data.get("groups") if isinstance(data, dict) else None
    if groups is not None and (not isinstance(groups, list) or not groups):
        raise ConfigError(f"'groups' of {path} must be a list with a group of equal devices each; got {shown(groups)}.")
    links = _links(data.get("links") if isinstance(data, dict) else None, f"'links' of {path}", path, mesh)
    if groups is None:
        device = _device(data.get("device") if isinstance(data, dict) else None, f"'device' of {path}", path)
        return Cluster(mesh, links, device)
    described = []
    for number, group in enumerate(groups):
        what = f"'groups'[{number}] of {path}"
        fields = _fields(group, _GROUP, what, ("links",))
        device = _device(fields["device"], f"'device' of {what}", path)
        group_links = _links(fields["links"], f"'links' of {what}", path, mesh) if "links" in fields else ()
        described.append(DeviceGroup(fields["count"], device, group_links))
    return unequal_cluster(mesh, links, described)


def _device(data: Any, what: str, path: str | Path) -> Device:
    device = _fields(data, _DEVICE, what, _OPTIONAL)
    if device.get("kernels") and "fusion" not in device:
        raise ConfigError(
            f"{what} has measured kernels, but no 'fusion', which says how they share operators: add "
            f"'fusion': 'library' for a CPU, 'gpu' for a GPU (of {', '.join(FUSIONS)}), or calibrate again."
        )
    gpu = GPUS.get(device["name"]) if isinstance(device["name"], str) else None
    known = {} if gpu is None else {"multiprocessors": gpu.multiprocessors}
    try:
        return Device(**{**known, **device, "kernels": _kernels(device.get("kernels", {}), path)})
    except ConfigError as error:
        raise ConfigError(f"The machine {path} has an invalid figure: {error}") from error


def _links(data: Any, what: str, path: str | Path, mesh: DeviceMesh) -> tuple[Link, ...]:
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{what} must be a list with one link per mesh axis, or one for all; got {shown(data)}.")
    try:
        links = tuple(_link(link, path) for link in data)
    except ConfigError as error:
        raise ConfigError(f"The machine {path} has an invalid figure: {error}") from error
    if len(links) not in (1, mesh.ndim):
        raise ConfigError(f"The machine {path} has {len(links)} links, but the mesh {mesh} has {mesh.ndim} axes.")
    return links * mesh.ndim if len(links) == 1 else links


def _link(data: Any, path: str | Path) -> Link:
    link = _fields(data, _LINK, f"a link of {path}", ("protocols",))
    protocols = link.get("protocols", [])
    if not isinstance(protocols, list):
        raise ConfigError(f"'protocols' of a link of {path} must be a list; got {shown(protocols)}.")
    known = tuple(Protocol(**_fields(one, _PROTOCOL, f"a protocol of a link of {path}")) for one in protocols)
    return Link(**{**link, "protocols": known})


def _kernels(kernels: Any, path: str | Path) -> dict[str, KernelCost]:
    if not isinstance(kernels, dict):
        raise ConfigError(f"'kernels' of {path} must map classes of kernels to their costs; got {shown(kernels)}.")
    return {
        name: KernelCost(**_fields(cost, _KERNEL, f"the kernel {name!r} of {path}")) for name, cost in kernels.items()
    }


def _fields(data: Any, keys: tuple[str, ...], what: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) - set(optional) != set(keys):
        raise ConfigError(f"{what} must have the keys {', '.join(keys)}; got {shown(data)}.")
    return data
