"""Protocols by which a library of collectives sends data over a link, and the seconds that they take.

NCCL sends small tensors by protocols that synchronise with each word (LL, LL128) and large ones by buffers (Simple),
along rings or trees, whichever its own model predicts to be quickest. This is that model (NCCL 2.27,
``src/graph/tuning.cc``) without its corrections for versions of CPUs and for single sizes. It takes its figures from
the description of a machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hidet_dist.checks import is_finite, shown
from hidet_dist.errors import ConfigError

RING, CHAIN, TREE = "ring", "chain", "tree"
PATHS = (RING, CHAIN, TREE)
"""The ways of data among the devices of a link: around a ring of all; or, in all-reduces by trees, along a chain of the
devices (those of a node) to the root and back, or up and down a binary tree (of nodes)."""


@dataclass(frozen=True)
class Protocol:
    """The figures of one protocol over one link.

    Attributes
    ----------
    name: the name by which the protocol is known on all links of a machine, such as ``ring-ll``.
    path: the way of the data, one of :data:`PATHS`.
    start_seconds: paid once by each collective: its kernel is started, and its ranks are waited for.
    latency_seconds: paid at each step from one device to the next.
    bandwidth_bytes_per_second: the rate at which one device sends in one direction.
    """

    name: str
    path: str
    start_seconds: float
    latency_seconds: float
    bandwidth_bytes_per_second: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.path, str) or self.path not in PATHS:
            raise ConfigError(
                f"A protocol has a text as its name, and a path of {', '.join(PATHS)}; got {shown(self.name)} and "
                f"{shown(self.path)}."
            )
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if not (is_finite(value) and (value > 0 if field.name.startswith("bandwidth") else value >= 0)):
                raise ConfigError(
                    f"A protocol needs times of 0 or more seconds and a bandwidth above 0 bytes/s; the "
                    f"{field.name} of {self.name} is {shown(value)}."
                )

    @property
    def is_ring(self) -> bool:
        """True if data goes around a ring; else it goes along a tree, by which only whole sums are made."""
        return self.path == RING


@dataclass(frozen=True)
class GroupRoute:
    """The figures of one protocol over a group of devices that several links connect.

    Attributes
    ----------
    start_seconds: paid once by each collective.
    pass_seconds: paid by each pass, however few its bytes.
    sent_fraction: the fraction of the bytes that a device sends in each pass.
    bandwidth_bytes_per_second: the rate at which it does.
    """

    start_seconds: float
    pass_seconds: float
    sent_fraction: float
    bandwidth_bytes_per_second: float

    @classmethod
    def over(cls, used: Sequence[tuple[int, Protocol]]) -> GroupRoute:
        """Make the route over links: for each the number of devices along it, and its figures.

        A piece of data visits all n devices of a ring. It is sent from one group of devices to the next by the slowest
        link as rarely as possible: along links of n1, n2, ... devices, the slowest first, n1 - 1 times by the first
        one, n1 (n2 - 1) times by the second. Pieces follow each other, so that a pass takes the sum of these latencies,
        and (n - 1) / n of the bytes at the least bandwidth. In a tree of N nodes of C devices, data goes along C - 1
        devices and floor(log2 N) nodes in each pass, with all its bytes.
        """
        start = max(protocol.start_seconds for _, protocol in used)
        bandwidth = min(protocol.bandwidth_bytes_per_second for _, protocol in used)
        latency = 0.0
        if used[0][1].is_ring:
            sizes: dict[float, int] = {}  # of links of equal latency together, so that a finer mesh has the same sum
            for size, protocol in used:
                sizes[protocol.latency_seconds] = sizes.get(protocol.latency_seconds, 1) * size
            count = 1
            for step, size in sorted(sizes.items(), reverse=True):
                latency += count * (size - 1) * step
                count *= size
            return cls(start, latency, (count - 1) / count, bandwidth)
        for path in (CHAIN, TREE):
            own = [(size, protocol.latency_seconds) for size, protocol in used if protocol.path == path]
            count = math.prod(size for size, _ in own)
            steps = count - 1 if path == CHAIN else int(math.log2(count))
            latency += steps * max((seconds for _, seconds in own), default=0.0)
        return cls(start, latency, 1.0, bandwidth)

    def seconds(self, nbytes: float, passes: int) -> float:
        """Predict the seconds of a collective.

        Parameters
        ----------
        nbytes: float
            The bytes that go around a ring, or along a tree.
        passes: int
            The number of times that they do: 2 of an all-reduce.
        """
        sending_seconds = self.sent_fraction * nbytes / self.bandwidth_bytes_per_second
        return self.start_seconds + passes * (self.pass_seconds + sending_seconds)
