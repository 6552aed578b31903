"""Transfers: the messages that convert a tensor from its layout on one mesh to a layout on another mesh.

The two meshes are disjoint. Each element crosses between them once. If several devices of the second mesh hold the same
shard, each receives a part of it, and an all-gather within their group completes it over the links of the second mesh.
If several devices of the first mesh hold the same shard, the one that has sent least so far sends it.

This follows Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023), section 3. Their
scheduling of broadcasts over hosts is not needed, because nothing is sent twice.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist.errors import SpecError
from hidet_dist.spec import DeviceMesh, TensorShardSpec

Box = tuple[slice, ...]
"""A part of a tensor: a slice with ``start`` and ``stop`` for each dim."""


@dataclass(frozen=True)
class MeshLayout:
    """A tensor's spec on a mesh."""

    mesh: DeviceMesh
    spec: TensorShardSpec

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Compute the part of the whole tensor that a rank of the mesh holds."""
        return self.spec.slices(shape, self.mesh, self.mesh.coordinate(rank))

    @property
    def replicated_axes(self) -> tuple[int, ...]:
        """The mesh axes of two devices or more along which devices hold the same shard, ascending."""
        used = self.spec.mesh_axes
        return tuple(axis for axis, size in enumerate(self.mesh.shape) if axis not in used and size > 1)


@dataclass(frozen=True)
class Message:
    """A part of the whole tensor that one rank of the first mesh sends to one of the second."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Gather:
    """The all-gather that completes a shard of the second mesh.

    Attributes
    ----------
    mesh_axes: the axes of the second mesh, ascending, along which devices hold the same shard.
    dim: the dim along which the group's devices receive parts. All dims before it have extent 1 in a shard, so that
        the parts are consecutive in memory. None if all dims have extent 1: the first device receives everything.
    extent: the extent of a part along ``dim``. The last parts may be smaller or empty.
    elements: the elements of a part. The all-gather writes ``group size * elements``, of which the first are the shard.
    """

    mesh_axes: tuple[int, ...]
    dim: int | None
    extent: int
    elements: int


@dataclass(frozen=True)
class Transfer:
    """The transfer of a tensor of ``shape`` (elements, whole) from the layout ``source`` to the layout ``target``.

    All ranks can send and receive ``messages`` in their order. ``gathers`` has the all-gather of each rank of the
    second mesh; it is empty if every device receives its whole shard. The all-gathers differ where uneven axes split
    the tensor, but not within a group, which holds one shard.
    """

    shape: tuple[int, ...]
    source: MeshLayout
    target: MeshLayout
    messages: tuple[Message, ...]
    gathers: tuple[Gather, ...]

    def gather(self, rank: int) -> Gather | None:
        """Return the all-gather of a rank of the second mesh; None if it receives its whole shard."""
        return self.gathers[rank] if self.gathers else None

    def part(self, rank: int) -> Box:
        """Compute the part of the whole tensor that a rank of the second mesh receives; it may be empty."""
        return _part(self.target.box(self.shape, rank), self.target.mesh, rank, self.gather(rank))


def volume(box: Box) -> int:
    """Count the elements of a part of a tensor."""
    return math.prod(side.stop - side.start for side in box)


def within(box: Box, outer: Box) -> Box:
    """Make the coordinates of a part relative to another part that contains it."""
    return tuple(
        slice(side.start - other.start, side.stop - other.start) for side, other in zip(box, outer, strict=True)
    )


@functools.lru_cache(maxsize=2**10)
def plan_transfer(shape: tuple[int, ...], source: MeshLayout, target: MeshLayout) -> Transfer:
    """Plan the transfer of a tensor of ``shape`` (elements, whole) from one mesh's layout to another's.

    A scalar is treated as a tensor of shape [1].

    Raises
    ------
    SpecError
        When a spec does not fit the tensor, or splits a dim that is not divisible.
    """
    for layout in (source, target):
        layout.spec.validate(shape, layout.mesh)
    if not shape:  # only with a dim, an empty part differs from the whole
        one = TensorShardSpec.replicated(1)
        return plan_transfer((1,), MeshLayout(source.mesh, one), MeshLayout(target.mesh, one))
    gathers = _gathers(shape, target)
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(source.mesh.size):
        holders.setdefault(_key(source.box(shape, rank)), []).append(rank)
    sent = dict.fromkeys(range(source.mesh.size), 0)
    messages = []
    for receiver in range(target.mesh.size):
        gather = gathers[receiver] if gathers else None
        part = _part(target.box(shape, receiver), target.mesh, receiver, gather)
        for key, ranks in holders.items():
            box = _overlap(part, tuple(itertools.starmap(slice, key)))
            if volume(box) == 0:
                continue
            sender = min(ranks, key=lambda rank: (sent[rank], rank))
            sent[sender] += volume(box)
            messages.append(Message(sender, receiver, box))
    return Transfer(tuple(shape), source, target, tuple(messages), gathers)


def transferred(transfer: Transfer, shards: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Execute a transfer in one process: from the shards of the first mesh's ranks to those of the second's.

    Raises
    ------
    SpecError
        When the shards are not those of the first mesh's layout.
    """
    shape, source, target = transfer.shape, transfer.source, transfer.target
    expected = [_sides(source.box(shape, rank)) for rank in range(source.mesh.size)]
    if [shard.shape for shard in shards] != expected:
        raise SpecError(
            f"A transfer from {source.mesh} needs {source.mesh.size} shards of the shapes "
            f"{', '.join(map(str, dict.fromkeys(expected)))}."
        )
    parts = [np.empty(_sides(transfer.part(rank)), shards[0].dtype) for rank in range(target.mesh.size)]
    for message in transfer.messages:
        sent = shards[message.sender][within(message.box, source.box(shape, message.sender))]
        parts[message.receiver][within(message.box, transfer.part(message.receiver))] = sent
    result = []
    for rank, gather in enumerate(transfer.gathers):
        flat = np.concatenate([parts[peer].reshape(-1) for peer in target.mesh.peers(rank, gather.mesh_axes)])
        local = _sides(target.box(shape, rank))
        result.append(flat[: math.prod(local)].reshape(local))
    return result or parts


def _gathers(shape: Sequence[int], target: MeshLayout) -> tuple[Gather, ...]:
    """Plan the all-gather of each rank of the second mesh; none if no devices hold the same shard."""
    axes = target.replicated_axes
    if not axes:
        return ()
    devices = target.mesh.group_size(axes)
    gathers: dict[tuple[int, ...], Gather] = {}  # by the shape of a shard
    locals_of = [_sides(target.box(shape, rank)) for rank in range(target.mesh.size)]
    for local in dict.fromkeys(locals_of):
        dim = next((number for number, extent in enumerate(local) if extent > 1), None)
        extent = 1 if dim is None else -(-local[dim] // devices)
        gathers[local] = Gather(axes, dim, extent, 1 if dim is None else extent * math.prod(local[dim + 1 :]))
    return tuple(gathers[local] for local in locals_of)


def _part(box: Box, mesh: DeviceMesh, rank: int, gather: Gather | None) -> Box:
    """Compute the part of a rank's shard that it receives in messages."""
    if gather is None:
        return box
    number = mesh.peers(rank, gather.mesh_axes).index(rank)
    if gather.dim is None:  # one element
        return box if number == 0 else tuple(slice(side.start, side.start) for side in box)
    side = box[gather.dim]
    begin = min(side.start + number * gather.extent, side.stop)
    received = slice(begin, min(begin + gather.extent, side.stop))
    return (*box[: gather.dim], received, *box[gather.dim + 1 :])


def _overlap(a: Box, b: Box) -> Box:
    sides = [(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)]
    return tuple(slice(begin, max(begin, end)) for begin, end in sides)


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((side.start, side.stop) for side in box)


def _sides(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)
