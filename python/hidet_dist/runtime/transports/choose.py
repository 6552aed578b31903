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
"""The environment variable with the choice for CPUs, a key of :data:`FOR_HOSTS`."""

FOR_HOSTS = {
    "auto": "hidet_dist.runtime.transports.shared_memory:open_within_hosts",
    "gloo": "hidet_dist.runtime.transports.shared_memory:open_gloo_alone",
}
"""What opens each transport of ranks on CPUs, by its name for users: the default, and Gloo on one host, too."""


def open_for_host(setup: Setup, device: int | None, stream: int | None) -> Transport:
    """Open the transport of ranks whose buffers are in the memory of their hosts. Raises ConfigError."""
    choice = os.environ.get(VARIABLE, next(iter(FOR_HOSTS)))
    if choice not in FOR_HOSTS:
        raise ConfigError(f"{VARIABLE} must be {' or '.join(map(repr, FOR_HOSTS))}, not {choice!r}")
    opened: Transport = resolve_name(FOR_HOSTS[choice])(setup)
    return opened


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
