"""Transports: what carries the collectives of a communicator's ranks.

``base`` has the protocol. ``choose`` is the one place that picks an implementation: shared memory within a host, Gloo
across hosts, or NCCL between CUDA devices, each in the module of its name.
"""

from hidet_dist.runtime.transports.base import Failures, Setup, Transport
from hidet_dist.runtime.transports.choose import TARGETS, open_transport

__all__ = ["TARGETS", "Failures", "Setup", "Transport", "open_transport"]
