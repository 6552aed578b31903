"""The kinds of devices that programs run on, by the manifest's target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hidet_dist.artifacts.manifest import Manifest, StageManifest
from hidet_dist.runtime.cuda.driver import check_architecture, device_of_rank
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.memory import HostMemory, Memory


@dataclass(frozen=True)
class DeviceKind:
    """A kind of devices.

    Attributes
    ----------
    check: refuse a host that has no such device, with ``ConfigError``, before ranks meet.
    open: make the memory that a rank's stage lies in, on its device, which must run code for the manifest's ``arch``.
    """

    check: Callable[[], None]
    open: Callable[[Manifest, StageManifest, int], Memory]


def _check_cuda() -> None:
    device_of_rank(0)


def _open_cuda(manifest: Manifest, stage: StageManifest, rank: int) -> Memory:
    device = device_of_rank(rank)
    check_architecture(manifest.arch, device)
    return CudaMemory(device, static=stage.cuda_graph)


DEVICE_KINDS = {
    "cpu": DeviceKind(lambda: None, lambda manifest, stage, rank: HostMemory()),
    "cuda": DeviceKind(_check_cuda, _open_cuda),
}
