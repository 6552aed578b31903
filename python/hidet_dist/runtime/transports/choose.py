"""The choice of a transport."""

from __future__ import annotations

import os
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from hidet_dist.errors import ConfigError
from hidet_dist.targets import TARGETS

if TYPE_CHECKING:
    from hidet_dist.runtime.transports.base import Setup, Transport

VARIABLE = "HIDET_DIST_TRANSPORT"
"""The environment variable with the choice for CPUs: ``auto`` (default), or ``gloo`` to use Gloo on one host too."""


def open_for_host(setup: Setup, device: int | None, stream: int | None) -> Transport:
    """Open the transport of ranks whose buffers are in the memory of their hosts. Raises ConfigError."""
    from hidet_dist.runtime.transports.shared_memory import SharedMemoryTransport

    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", "gloo"):
        raise ConfigError(f"{VARIABLE} must be 'auto' or 'gloo', not {choice!r}")
    return SharedMemoryTransport(setup, lambda: _open_gloo(setup), is_shared=choice == "auto")


def _open_gloo(setup: Setup) -> Transport:
    # PyTorch, which contains Gloo, takes a second to import: do so only when a group needs it.
    from hidet_dist.runtime.transports.gloo import GlooTransport

    return GlooTransport(setup)


def open_transport(target: str, setup: Setup, device: int | None = None, stream: int | None = None) -> Transport:
    """Open the transport of one rank.

    Parameters
    ----------
    target: str
        One of :data:`hidet_dist.targets.TARGETS`: the memory that buffers of collectives lie in.
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
    opened: Transport = resolve_name(TARGETS[target].transport)(setup, device, stream)
    return opened
