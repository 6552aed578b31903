"""What the steps of a conversion cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hidet.ir.type import DataType, data_type

from hidet_dist.machine import Cluster
from hidet_dist.reshard.steps import Step
from hidet_dist.spec import ReduceFn, TensorShardSpec
from hidet_dist.spec.partial import Layout, split_of

Element: TypeAlias = str | DataType | int
"""A dtype, hidet's name of it, or the bytes of an element."""


def itemsize(dtype: Element) -> int:
    """Bytes of one element."""
    return dtype if isinstance(dtype, int) else int(data_type(dtype).nbytes)


class StepSeconds(NamedTuple):
    """The predicted times of a step in turn: what is copied before it communicates, communicating, copying after."""

    pack: float
    communicate: float
    unpack: float


def step_parts(
    step: Step, before: Layout, after: Layout, shape: Sequence[int], element_bytes: int, cluster: Cluster
) -> StepSeconds:
    """Predicted times of a step on a tensor of ``shape`` (whole), with the copies that its order in memory needs.

    A slice copies what it keeps. A collective along a dim whose parts do not lie one behind the other in the group's
    order packs what it sends, or unpacks what it receives, which copies it (:meth:`Step.packs`, :meth:`Step.unpacks`).
    Padding is sent like anything else; what is left after it is cut off is copied. Where collectives put shards in
    their places (``Device.places_shards``), neither costs a copy.
    """
    mesh = cluster.mesh
    sent = split_of(before).local_shape(shape, mesh)
    sent_bytes = math.prod(sent) * element_bytes
    received = split_of(after).local_shape(shape, mesh)
    received_bytes = math.prod(received) * element_bytes
    if step.kind == "slice":
        return StepSeconds(cluster.copy_seconds(received_bytes), 0.0, 0.0)
    if step.kind == "all_gather":
        seconds = cluster.all_gather_seconds(sent_bytes * mesh.group_size(step.mesh_axes), step.mesh_axes)
    elif step.kind == "all_to_all":
        seconds = cluster.all_to_all_seconds(sent_bytes * mesh.group_size(step.mesh_axes), step.mesh_axes)
    elif step.kind == "reduce_scatter":
        seconds = cluster.reduce_scatter_seconds(sent_bytes, step.mesh_axes)
    else:
        seconds = cluster.all_reduce_seconds(sent_bytes, step.mesh_axes)
    if cluster.device.places_shards:
        return StepSeconds(0.0, seconds, 0.0)
    return StepSeconds(
        cluster.copy_seconds(sent_bytes) if step.packs(sent) else 0.0,
        seconds,
        cluster.copy_seconds(received_bytes) if step.unpacks(sent, received, mesh) else 0.0,
    )


def step_seconds(
    step: Step, before: Layout, after: Layout, shape: Sequence[int], element_bytes: int, cluster: Cluster
) -> float:
    """Predicted time of a step in all, as :func:`step_parts` has it."""
    pack, communicate, unpack = step_parts(step, before, after, shape, element_bytes, cluster)
    return communicate + pack + unpack


def reduce_seconds(
    shape: Sequence[int],
    dtype: Element,
    partial: TensorShardSpec,
    fns: Sequence[ReduceFn],
    cluster: Cluster,
) -> float:
    """Predicted time of applying ``fns`` to a partial tensor of ``shape`` (whole) that lies as ``partial`` says."""
    seconds = 0.0
    spec = partial
    for fn in fns:
        after = fn.after(spec)
        seconds += step_seconds(Step.of(fn), spec, after, shape, itemsize(dtype), cluster)
        spec = after
    return seconds
