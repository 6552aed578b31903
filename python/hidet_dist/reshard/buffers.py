"""The memory that conversions and reductions take while they run: buffers between steps, and packed copies.

Bytes of buffers are counted as they are placed (:mod:`hidet_dist.spec.buffers`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hidet_dist.reshard.steps import Step
from hidet_dist.spec import DeviceMesh, ReduceFn, TensorShardSpec
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.spec.partial import split_of


def conversion_nbytes(
    shape: Sequence[int],
    itemsize: int,
    source: TensorShardSpec,
    steps: Sequence[Step],
    mesh: DeviceMesh,
    places_shards: bool = False,
    coordinate: Sequence[int] | None = None,
) -> int:
    """Compute the peak bytes of converting a tensor of ``shape`` (elements), besides its source and its result.

    They are those of the device at ``coordinate``, or by default of one with the largest shards.
    """
    shape, spec, most = tuple(shape), source, 0
    at = None if coordinate is None else tuple(coordinate)
    source_nbytes = buffer_nbytes(source.local_nbytes(shape, itemsize, mesh, at))
    for number, step in enumerate(steps):
        spec, during = _taken(step, spec, shape, itemsize, mesh, places_shards, at)
        most = max(most, during.beside(source_nbytes, number == 0))
    return max(0, most - source_nbytes - buffer_nbytes(spec.local_nbytes(shape, itemsize, mesh, at)))


def smaller_nbytes(
    shape: Sequence[int],
    itemsize: int,
    specs: Sequence[TensorShardSpec],
    mesh: DeviceMesh,
    coordinate: Sequence[int] | None,
) -> int:
    """Compute by how many bytes the shards of the device at ``coordinate`` are smaller than the largest ones, in all.

    A conversion between the ``specs`` takes the device at most so much more beside its source and its result than it
    takes a device with the largest shards: its peak is no greater.
    """
    if coordinate is None:
        return 0
    return sum(
        buffer_nbytes(spec.local_nbytes(shape, itemsize, mesh))
        - buffer_nbytes(spec.local_nbytes(shape, itemsize, mesh, coordinate))
        for spec in specs
    )


@functools.lru_cache(maxsize=2**13)  # equal layers convert equal tensors
def _taken(
    step: Step,
    source: TensorShardSpec,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: DeviceMesh,
    places_shards: bool,
    coordinate: tuple[int, ...] | None,
) -> tuple[TensorShardSpec, StepBytes]:
    """Return the spec after a step from ``source``, and the step's bytes. Raises SpecError if it does not apply."""
    spec = split_of(step.after(source, shape, mesh))
    return spec, step_bytes(step, source, spec, shape, itemsize, mesh, places_shards, coordinate)


class StepBytes(NamedTuple):
    """The bytes while a step runs: with its input, and while received data are unpacked."""

    working: int
    unpacking: int

    def beside(self, source_nbytes: int, first: bool) -> int:
        """Return the bytes while the step runs, those of the conversion's source included.

        The input of a conversion's first step is the source itself, which later steps find beside their input.
        """
        return max(self.working + (0 if first else source_nbytes), self.unpacking + source_nbytes)


def step_bytes(
    step: Step,
    source: TensorShardSpec,
    target: TensorShardSpec,
    shape: Sequence[int],
    itemsize: int,
    mesh: DeviceMesh,
    places_shards: bool,
    coordinate: Sequence[int] | None = None,
) -> StepBytes:
    """Compute the bytes of a step that brings a tensor of ``shape`` (whole) from one spec to another.

    They are those of the device at ``coordinate``, or by default of one with the largest shards.
    """
    local, result = source.local_shape(shape, mesh), target.local_shape(shape, mesh)
    before, after = (spec.local_nbytes(shape, itemsize, mesh, coordinate) for spec in (source, target))
    unpacks = step.unpacks(local, result, mesh, places_shards)
    placed = step.is_uneven(mesh) or (places_shards and not unpacks)
    received = buffer_nbytes(after if placed else step.received_nbytes(before, after, mesh))
    working = buffer_nbytes(before) + received
    if step.packs(local, mesh, places_shards):
        working = max(working, 2 * buffer_nbytes(before))
    return StepBytes(working, received + buffer_nbytes(after) if unpacks else 0)


def reduction_nbytes(
    shape: Sequence[int],
    itemsize: int,
    partial: TensorShardSpec,
    fns: Sequence[ReduceFn],
    mesh: DeviceMesh,
    places_shards: bool = False,
    coordinate: Sequence[int] | None = None,
) -> int:
    """Compute the peak bytes of reducing a partial tensor of ``shape`` (elements), itself and the result included.

    They are those of the device at ``coordinate``, or by default of one with the largest shards.
    """
    spec = partial
    before = partial.local_nbytes(shape, itemsize, mesh, coordinate)
    most = buffer_nbytes(before)
    for fn in fns:
        step, local = Step.of(fn), spec.local_shape(shape, mesh)
        spec = fn.after(spec)
        after = spec.local_nbytes(shape, itemsize, mesh, coordinate)
        packs = step.packs(local, mesh, places_shards)
        sent, result = buffer_nbytes(before), buffer_nbytes(after)
        copies: tuple[int, ...] = (2 * sent if packs else 0, 2 * result if fn.op == "average" else 0)
        if step.exchanges(places_shards):
            stacked = step.whole_nbytes(before, mesh)
            exchanged = step.exchanged_nbytes(before, after, mesh)
            copies = (*copies, buffer_nbytes(stacked) + buffer_nbytes(exchanged))
        most = max(most, sent + result, *copies)
        before = after
    return most
