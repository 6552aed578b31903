"""Predicted seconds of the steps of a conversion."""

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
    """Return the bytes of one element."""
    return dtype if isinstance(dtype, int) else int(data_type(dtype).nbytes)


class StepSeconds(NamedTuple):
    """The predicted seconds of a step: of the copy before it sends (pack), the collective, what follows it (unpack)."""

    pack: float
    communicate: float
    unpack: float

    @property
    def whole(self) -> float:
        """The sum."""
        return self.communicate + self.pack + self.unpack


def step_parts(
    step: Step, before: Layout, after: Layout, shape: Sequence[int], element_bytes: int, cluster: Cluster
) -> StepSeconds:
    """Predict the seconds of a step on a tensor of ``shape`` (whole, in elements), with the copies that it needs.

    A slice copies the part that it keeps. A collective along a dim whose parts are not contiguous in the order of group
    ranks packs the data that it sends, or unpacks the data that it receives; each is a copy (:meth:`Step.packs`,
    :meth:`Step.unpacks`). Padding is sent like data, and cutting it off afterwards costs a copy. Collectives that write
    shards directly to their positions (``Device.places_shards``) need neither copy if parts are equal and the axes in
    ascending order. Partial maxima and minima are exchanged, and reduced by a kernel, where the
    collectives' own drop NaN (:meth:`Step.exchanges`).
    """
    sent, received = (
        Shard.of(split_of(layout).local_shape(shape, cluster.mesh), element_bytes) for layout in (before, after)
    )
    return seconds_of_work(step, step_work(step, sent, received, cluster), cluster)


class Shard(NamedTuple):
    """The shape of the largest shard of a tensor in a layout, and its bytes."""

    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, shape: tuple[int, ...], element_bytes: int) -> Shard:
        """Describe a shard of elements of so many bytes."""
        return cls(shape, math.prod(shape) * element_bytes)


class StepWork(NamedTuple):
    """What a step does: the bytes of a shard before and after it, and whether it packs them, and unpacks these."""

    sent_nbytes: int
    received_nbytes: int
    packs: bool
    unpacks: bool


def step_work(step: Step, sent: Shard, received: Shard, cluster: Cluster) -> StepWork:
    """Describe what a step does with a shard that is ``sent`` before and ``received`` after it."""
    places = cluster.device.places_shards
    return StepWork(
        sent.nbytes,
        received.nbytes,
        step.packs(sent.shape, cluster.mesh, places),
        step.unpacks(sent.shape, received.shape, cluster.mesh, places),
    )


def seconds_of_work(step: Step, work: StepWork, cluster: Cluster) -> StepSeconds:
    """Predict the seconds of :func:`step_parts` for a step that does ``work``.

    The dims of the step do not matter beside it.
    """
    mesh, kind = cluster.mesh, step.collective
    sent_bytes, received_bytes, packs, unpacks = work
    if not kind.communicates:
        return StepSeconds(cluster.copy_seconds(received_bytes), 0.0, 0.0)
    reduce = 0.0
    if step.exchanges(cluster.device.places_shards):
        moved = step.exchanged_nbytes(sent_bytes, received_bytes, mesh) + received_bytes
        reduce = cluster.copy_seconds(moved // 2)  # a copy both reads and writes its bytes
    return StepSeconds(
        cluster.copy_seconds(sent_bytes) if packs else 0.0,
        communication_seconds(step, sent_bytes, cluster),
        reduce + (cluster.copy_seconds(received_bytes) if unpacks else 0.0),
    )


def communication_seconds(step: Step, sent_nbytes: int, cluster: Cluster) -> float:
    """Predict the seconds of a step's collective, given the bytes of the largest shard before the step.

    Ranks with unequal parts take as long as the busiest one. Partial results may be exchanged (:meth:`Step.exchanges`).
    """
    mesh, kind = cluster.mesh, step.collective
    whole, ranks = step.whole_nbytes(sent_nbytes, mesh), mesh.group_size(step.mesh_axes)
    exchanges = step.exchanges(cluster.device.places_shards)
    if exchanges:
        kind, whole = kind.exchange, whole * ranks
    if step.is_uneven(mesh):
        split, joined = (
            () if each is None else each.of_group_ranks for each in (step.divided(mesh), step.joined(mesh))
        )
        whole = kind.even_nbytes(whole, split, (1,) * ranks if exchanges else joined)
    return cluster.collective_seconds(kind, whole, step.mesh_axes)


def step_seconds(
    step: Step, before: Layout, after: Layout, shape: Sequence[int], element_bytes: int, cluster: Cluster
) -> float:
    """Predict the seconds of a step: the sum of those of :func:`step_parts`."""
    return step_parts(step, before, after, shape, element_bytes, cluster).whole


def reduce_seconds(
    shape: Sequence[int],
    dtype: Element,
    partial: TensorShardSpec,
    fns: Sequence[ReduceFn],
    cluster: Cluster,
) -> float:
    """Predict the seconds of applying ``fns`` in turn to a tensor of ``shape`` (whole) in the spec ``partial``."""
    seconds = 0.0
    spec = partial
    for fn in fns:
        after = fn.after(spec)
        seconds += step_seconds(Step.of(fn), spec, after, shape, itemsize(dtype), cluster)
        spec = after
    return seconds
