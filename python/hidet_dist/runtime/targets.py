"""The kinds of devices that serving processes run programs on, by the manifest's target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hidet_dist.artifacts.manifest import Manifest, StageManifest
from hidet_dist.runtime.cuda.device import open_cuda_device
from hidet_dist.runtime.cuda.driver import device_of_rank
from hidet_dist.runtime.device import Device, HostDevice


@dataclass(frozen=True)
class DeviceKind:
    """A kind of devices.

    Attributes
    ----------
    check: raises ``ConfigError`` on a host without such a device; called before ranks meet.
    open: opens a rank's device for a stage. The device must run code for the manifest's ``arch``.
    """

    check: Callable[[], None]
    open: Callable[[Manifest, StageManifest, int], Device]


def _check_cuda() -> None:
    device_of_rank(0)


DEVICE_KINDS = {
    "cpu": DeviceKind(lambda: None, lambda manifest, stage, rank: HostDevice()),
    "cuda": DeviceKind(_check_cuda, open_cuda_device),
}
