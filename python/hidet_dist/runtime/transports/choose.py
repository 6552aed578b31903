"""The choice of a transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hidet_dist.errors import ConfigError

if TYPE_CHECKING:
    from hidet_dist.runtime.transports.base import Setup, Transport

VARIABLE = "HIDET_DIST_TRANSPORT"
"""The environment variable with the choice for CPUs: ``auto`` (default), or ``gloo`` to use Gloo on one host too."""


def _open_for_cpu(setup: Setup, device: int | None, stream: int | None) -> Transport:
    from hidet_dist.runtime.transports.shared_memory import SharedMemoryTransport

    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", "gloo"):
        raise ConfigError(f"{VARIABLE} must be 'auto' or 'gloo', not {choice!r}")
    return SharedMemoryTransport(setup, lambda: _open_gloo(setup), shares=choice == "auto")


def _open_gloo(setup: Setup) -> Transport:
    # PyTorch, which contains Gloo, takes a second to import: do so only when a group needs it.
    from hidet_dist.runtime.transports.gloo import GlooTransport

    return GlooTransport(setup)


def _open_for_cuda(setup: Setup, device: int | None, stream: int | None) -> Transport:
    from hidet_dist.runtime.transports.nccl import NcclTransport

    return NcclTransport(setup, device, stream)


_OPEN: dict[str, Callable[[Setup, int | None, int | None], Transport]] = {
    "cpu": _open_for_cpu,
    "cuda": _open_for_cuda,
}

TARGETS = tuple(_OPEN)
"""The targets for which there is a transport."""


def open_transport(target: str, setup: Setup, device: int | None = None, stream: int | None = None) -> Transport:
    """Open the transport of one rank.

    Parameters
    ----------
    target: str
        One of ``TARGETS``: the memory that buffers of collectives lie in.
    setup: Setup
        The common arguments of transports.
    device: int | None
        This rank's CUDA device; ``default_device`` by default.
    stream: int | None
        The CUDA stream of collectives; by default hidet's current stream when each is called.

    Raises
    ------
    ConfigError
        Where HIDET_DIST_TRANSPORT names no transport; where NCCL, the CUDA driver or the device cannot be used.
    """
    return _OPEN[target](setup, device, stream)
