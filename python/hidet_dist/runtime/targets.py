"""The kinds of devices that serving processes run programs on, by the manifest's target."""

from __future__ import annotations

from pkgutil import resolve_name

from hidet_dist.runtime.device import DeviceKind
from hidet_dist.targets import TARGETS


def device_kind(target: str) -> DeviceKind:
    """Import the kind of devices of a target."""
    kind: DeviceKind = resolve_name(TARGETS[target].device)
    return kind
