"""Machine files: a described machine as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_MACHINE_BYTES
from hidet_dist.machine.cluster import Cluster, Device, Link
from hidet_dist.machine.kernels import KernelCost
from hidet_dist.spec import DeviceMesh

_DEVICE = ("name", "flops_per_second", "memory_bandwidth_bytes_per_second", "memory_bytes", "launch_seconds")
# Fields of a device that a file may leave out.
_OPTIONAL = ("overlaps_communication", "cache_bytes", "kernels", "places_shards")
_KERNEL = ("seconds_per_operation", "seconds_per_byte", "seconds_per_call")
_LINK = ("latency_seconds", "bandwidth_bytes_per_second")


def save_machine(cluster: Cluster, path: str | Path) -> None:
    """Write the device and the link of each mesh axis to a JSON file, atomically."""
    device = {key: getattr(cluster.device, key) for key in (*_DEVICE, *_OPTIONAL)}
    device["flops_per_second"] = dict(cluster.device.flops_per_second)
    device["kernels"] = {
        name: {key: getattr(cost, key) for key in _KERNEL} for name, cost in cluster.device.kernels.items()
    }
    links = [{key: getattr(link, key) for key in _LINK} for link in cluster.links]
    write_text(Path(path), json.dumps({"device": device, "links": links}, indent=1) + "\n")


def load_machine(path: str | Path, mesh: DeviceMesh) -> Cluster:
    """Read the machine of a JSON file, with ``mesh`` on it.

    The file has ``device`` (name, flops_per_second by dtype, memory_bandwidth_bytes_per_second, memory_bytes,
    launch_seconds; overlaps_communication and places_shards, false where left out; cache_bytes and kernels if measured)
    and ``links`` (latency_seconds, bandwidth_bytes_per_second): one per mesh axis, or one for all.

    Raises
    ------
    ConfigError
        When the file is missing or malformed, has invalid figures, or lacks a link for an axis.
    """
    try:
        data = parse_json(read_text(path, MOST_MACHINE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the machine {path}: {error}") from error
    device = _fields(data.get("device") if isinstance(data, dict) else None, _DEVICE, f"'device' of {path}", _OPTIONAL)
    links = data.get("links")
    if not isinstance(links, list) or not links:
        raise ConfigError(
            f"'links' of {path} must be a list with one link per mesh axis, or one for all; got {shown(links)}."
        )
    try:
        axis_links = tuple(Link(**_fields(link, _LINK, f"a link of {path}")) for link in links)
        described = Device(**{**device, "kernels": _kernels(device.get("kernels", {}), path)})
    except ConfigError as error:
        raise ConfigError(f"The machine {path} has an invalid figure: {error}") from error
    if len(axis_links) not in (1, mesh.ndim):
        raise ConfigError(f"The machine {path} has {len(axis_links)} links, but the mesh {mesh} has {mesh.ndim} axes.")
    return Cluster(mesh, axis_links * mesh.ndim if len(axis_links) == 1 else axis_links, described)


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
