"""The predicted seconds of transfers between sub-meshes.

Each byte crosses the link between the two once. Senders and receivers work in pairs, each pair over a separate link, so
that the smaller sub-mesh's number of devices is that of parallel streams. If several devices of the receiving mesh hold
the same shard, each receives an equal part, and an all-gather completes the shard (Zhuang et al., MLSys 2023).
"""

from __future__ import annotations

from hidet_dist.machine import Cluster, Link
from hidet_dist.machine.slices import MeshSlice
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.collectives import COLLECTIVES
from hidet_dist.view import GraphView

_ALL_GATHER = COLLECTIVES["all_gather"]


def least_seconds(nbytes: int, senders: int, receivers: int, link: Link) -> float:
    """Predict the seconds to send ``nbytes`` from some devices to others over ``link``, each byte once."""
    return link.latency_seconds + nbytes / (min(senders, receivers) * link.bandwidth_bytes_per_second)


def message_seconds(
    view: GraphView, name: str, senders: int, receivers: Cluster, spec: TensorShardSpec, link: Link
) -> float:
    """Predict the least seconds to send a tensor from ``senders`` devices to a sub-mesh, where it arrives in ``spec``.

    Where shares of the sub-mesh split it, the device with the largest shard receives longest.
    """
    mesh = receivers.mesh
    alike = [axis for axis in range(mesh.ndim) if axis not in spec.mesh_axes and mesh.shape[axis] > 1]
    local = spec.local_nbytes(view.shape(name), view.itemsize(name), mesh)
    largest = least_seconds(local, mesh.group_size(alike), mesh.group_size(alike), link)
    seconds = max(largest, least_seconds(view.nbytes(name), senders, mesh.size, link))
    if alike:
        seconds += receivers.collective_seconds(_ALL_GATHER, local, alike)
    return seconds


def delivery_seconds(cluster: Cluster, part: MeshSlice, nbytes: int) -> float:
    """Predict the seconds to send ``nbytes`` of outputs from a slice to all other ranks; 0 if there are none.

    Each byte leaves the slice once, in as many streams as there are pairs of ranks. A ring all-gather among the other
    ranks completes the outputs there.
    """
    others = cluster.mesh.size - part.size
    if not others:
        return 0.0
    link = cluster.links[0]
    seconds = link.latency_seconds + nbytes / (min(part.size, others) * link.bandwidth_bytes_per_second)
    return seconds + (others - 1) * (link.latency_seconds + nbytes / (others * link.bandwidth_bytes_per_second))
