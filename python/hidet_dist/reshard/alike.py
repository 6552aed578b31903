"""The layouts of tensors whose dims are alike, and the steps between them: mesh axes split such tensors alike."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from hidet_dist.machine import Cluster
from hidet_dist.native.search.paths import Flags, Nodes, flags_of, nodes_of
from hidet_dist.reshard.cost import Shard, StepWork, seconds_of_work, step_work
from hidet_dist.reshard.steps import Offered, Step, StepMoves
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.partial import Layout
from hidet_dist.spec.parts import Split
from hidet_dist.spec.tensor import padded_shard

_MOST_AXES = 4  # of a mesh, up to which dims are described by all splits: there are 16 without parts
_MOST_SECONDS = 2**17  # after which the seconds are forgotten: each takes about 200 bytes

_Kind: TypeAlias = int
"""The number of a step up to its dims, of what it copies before and after it."""


class StepsOf(NamedTuple):
    """The steps that apply to a layout: the numbers of their results, their kinds, and whether they communicate."""

    steps: tuple[Step, ...]
    after: Nodes
    kinds: tuple[_Kind, ...]
    communicates: Flags


class AlikeLayouts:
    """The layouts of tensors whose dims are alike, numbered, and the steps that apply to them, listed on demand.

    Parameters
    ----------
    shape: tuple of int
        The shape of one of the tensors.
    cluster: Cluster
        The machine.
    usable: tuple of int
        The mesh axes by which steps split a tensor further.
    offered: Offered
        The parts in which they do, besides the mesh's shares.
    """

    def __init__(self, shape: tuple[int, ...], cluster: Cluster, usable: tuple[int, ...], offered: Offered):
        self._cluster = cluster
        self._moves = StepMoves(shape, cluster.mesh, usable, offered)
        self._numbers: dict[Layout, int] = {}
        self.layouts: list[Layout] = []
        self._shards: dict[int, Shard] = {}
        self._steps: dict[int, StepsOf] = {}
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._kind_steps: list[tuple[Step, StepWork]] = []
        self._seconds: dict[tuple[_Kind, int, int], float] = {}

    def number(self, layout: Layout) -> int:
        """Return the number of a layout."""
        number = self._numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def has(self, layout: Layout) -> bool:
        """Tell whether a layout has a number: then it fits the tensors."""
        return layout in self._numbers

    def steps(self, number: int) -> StepsOf:
        """List the steps that apply to a layout, in the order of ``moves``."""
        known = self._steps.get(number)
        if known is None:
            found = list(self._moves(self.layouts[number]))
            steps = tuple([step for step, _ in found])
            after = [self.number(result) for _, result in found]
            known = self._steps[number] = StepsOf(
                steps,
                nodes_of(after),
                tuple([self._kind(step, number, result) for step, result in zip(steps, after, strict=True)]),
                flags_of([step.collective.communicates for step in steps]),
            )
        return known

    def _shard(self, number: int) -> Shard:
        """Describe a shard of one of the tensors, of elements of one byte."""
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = Shard.of(self._moves.local_shape(self.layouts[number]), 1)
        return shard

    def _kind(self, step: Step, before: int, after: int) -> _Kind:
        """Return the kind of a step from a layout to another one."""
        work = step_work(step, self._shard(before), self._shard(after), self._cluster)
        key = step.kind, step.mesh_axes, step.op, step.parts, step.to_parts, work.packs, work.unpacks
        kind = self._kinds.setdefault(key, len(self._kind_steps))
        if kind == len(self._kind_steps):
            self._kind_steps.append((step, work))
        return kind

    def seconds(self, kind: _Kind, sent_nbytes: int, received_nbytes: int) -> float:
        """Predict the seconds of a step of some kind, given the bytes of a shard before and after it."""
        key = kind, sent_nbytes, received_nbytes
        seconds = self._seconds.get(key)
        if seconds is None:
            if len(self._seconds) == _MOST_SECONDS:
                self._seconds.clear()
            step, alike = self._kind_steps[kind]
            work = alike._replace(sent_nbytes=sent_nbytes, received_nbytes=received_nbytes)
            seconds = self._seconds[key] = seconds_of_work(step, work, self._cluster).whole
        return seconds


def alike_dims(shape: tuple[int, ...], cluster: Cluster, offered: Offered) -> tuple[Hashable, ...]:
    """Describe the dims of a shape so that those of equal description are alike.

    A step applies, and copies before or after it, by how the shards of the dims tile them: whether mesh axes can split
    a dim, which splits pad it to the same extent, and whether a shard has one element. Dims are alike if all splits
    tile them so. On meshes with shares or many axes, only equal dims are, and those that are divided without padding.
    """
    mesh = cluster.mesh
    if mesh.ndim <= _MOST_AXES and not mesh.shares:
        return tuple([_tilings(size, mesh, offered) for size in shape])
    if offered or mesh.shares:
        return shape
    return tuple(-1 if size % mesh.size == 0 and size > mesh.size else size for size in shape)


@functools.lru_cache(maxsize=2**12)
def _tilings(size: int, mesh: DeviceMesh, offered: Offered) -> Hashable:
    """Describe how splits by mesh axes, in equal parts or in those that are offered, tile a dim.

    That is, for each split: nothing if it is impossible, or else the number of the extent that its shards tile, in
    order of appearance, and whether the largest shard has one element.
    """
    ways = [[None, (), *((pair,) for pair in offered if pair[0] == axis)] for axis in range(mesh.ndim)]
    padded: dict[int, int] = {}
    found: list[tuple[int, bool] | None] = []
    for chosen in itertools.product(*ways):
        axes = [axis for axis, parts in enumerate(chosen) if parts is not None]
        parts = tuple(pair for pairs in chosen for pair in pairs or ())
        local = padded_shard(size, axes, mesh, parts)
        if local is None:
            found.append(None)
            continue
        tiled = local * mesh.group_size(axes) if Split.of(mesh, axes, parts).is_even else size
        found.append((padded.setdefault(tiled, len(padded)), local == 1))
    return tuple(found)
