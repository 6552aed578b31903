"""Transports: implementations of the collectives and messages of a communicator.

``base`` has the protocol. ``choose`` alone opens an implementation, the one that the target names: shared memory within
a host and Gloo across hosts, or NCCL between CUDA devices, each in the module of its name.
"""

from hidet_dist.runtime.transports.base import Failures, Setup, Transport
from hidet_dist.runtime.transports.choose import open_transport

__all__ = ["Failures", "Setup", "Transport", "open_transport"]
