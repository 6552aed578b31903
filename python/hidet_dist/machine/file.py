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
    """Write the device and the link of each mesh axis to a JSON file, whole or not at all."""
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
    and ``links`` (latency_seconds, bandwidth_bytes_per_second): one a mesh axis, or one for all.

    Raises
    ------
    ConfigError
        When the file is missing, is not such a file, has figures that make no sense, or not a link for each axis.
    """
    try:
        data = parse_json(read_text(path, MOST_MACHINE_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the machine {path}: {error}") from error
    device = _fields(data.get("device") if isinstance(data, dict) else None, _DEVICE, f"'device' of {path}", _OPTIONAL)
    links = data.get("links")
    if not isinstance(links, list) or not links:
        raise ConfigError(
            f"'links' of {path} must be a list with a link a mesh axis, or one for all; got {shown(links)}."
        )
    try:
        found = tuple(Link(**_fields(link, _LINK, f"a link of {path}")) for link in links)
        made = Device(**{**device, "kernels": _kernels(device.get("kernels", {}), path)})
    except ConfigError as error:
        raise ConfigError(f"The machine {path} makes no sense: {error}") from error
    if len(found) not in (1, mesh.ndim):
        raise ConfigError(f"The machine {path} has {len(found)} links, but the mesh {mesh} has {mesh.ndim} axes.")
    return Cluster(mesh, found * mesh.ndim if len(found) == 1 else found, made)


def _kernels(given: Any, path: str | Path) -> dict[str, KernelCost]:
    if not isinstance(given, dict):
        raise ConfigError(f"'kernels' of {path} must map classes of kernels to their costs; got {shown(given)}.")
    return {
        name: KernelCost(**_fields(cost, _KERNEL, f"the kernel {name!r} of {path}")) for name, cost in given.items()
    }


def _fields(given: Any, keys: tuple[str, ...], what: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(given, dict) or set(given) - set(optional) != set(keys):
        raise ConfigError(f"{what} must have the keys {', '.join(keys)}; got {shown(given)}.")
    return given
