"""Transports: implementations of the collectives and messages of a communicator.

``base`` has the protocol. ``choose`` alone selects an implementation: shared memory within a host, Gloo across hosts,
or NCCL between CUDA devices, each in the module of its name.
"""

from hidet_dist.runtime.transports.base import Failures, Setup, Transport
from hidet_dist.runtime.transports.choose import TARGETS, open_transport

__all__ = ["TARGETS", "Failures", "Setup", "Transport", "open_transport"]
