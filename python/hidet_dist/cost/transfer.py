"""Prediction of the time of a transfer between two meshes."""

from __future__ import annotations

import math

from hidet_dist.machine import Cluster, Link
from hidet_dist.spec.collectives import ALL_GATHER
from hidet_dist.transfer import Transfer, volume


def transfer_seconds(transfer: Transfer, nbytes: int, link: Link, target: Cluster) -> float:
    """Predict the seconds of a transfer of a tensor of ``nbytes``.

    A device sends, or receives, one message after the other over ``link``, and different devices do so at the same
    time. The all-gather uses the links of the second mesh; that of the largest shard takes longest.
    """
    elements = math.prod(transfer.shape)
    seconds_of = [
        link.latency_seconds + nbytes * volume(message.box) / elements / link.bandwidth_bytes_per_second
        for message in transfer.messages
    ]
    busy: dict[tuple[str, int], float] = {}
    for message, seconds in zip(transfer.messages, seconds_of, strict=True):
        for end in (("sends", message.sender), ("receives", message.receiver)):
            busy[end] = busy.get(end, 0.0) + seconds
    crossing = max(busy.values(), default=0.0)
    if not transfer.gathers:
        return crossing
    largest = max(transfer.gathers, key=lambda gather: gather.elements)
    group = target.mesh.group_size(largest.mesh_axes)
    gathered = group * largest.elements * nbytes // elements
    return crossing + target.collective_seconds(ALL_GATHER, gathered, largest.mesh_axes)
