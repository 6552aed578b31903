"""The memory that conversions and reductions take while they run: buffers between steps, and packed copies.

Bytes of buffers are counted as they are placed (:mod:`hidet_dist.spec.buffers`).
"""

from __future__ import annotations

import functools
import math
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
) -> int:
    """Compute the peak bytes of converting a tensor of ``shape`` (elements), besides its source and its result."""
    shape, spec, most = tuple(shape), source, 0
    source_nbytes = buffer_nbytes(source.local_nbytes(shape, itemsize, mesh))
    for number, step in enumerate(steps):
        spec, during = _taken(step, spec, shape, itemsize, mesh, places_shards)
        most = max(most, during.beside(source_nbytes, number == 0))
    return max(0, most - source_nbytes - buffer_nbytes(spec.local_nbytes(shape, itemsize, mesh)))


@functools.lru_cache(maxsize=2**13)  # equal layers convert equal tensors
def _taken(
    step: Step, source: TensorShardSpec, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh, places_shards: bool
) -> tuple[TensorShardSpec, StepBytes]:
    """Return the spec after a step from ``source``, and the step's bytes. Raises SpecError if it does not apply."""
    spec = split_of(step.after(source, shape, mesh))
    return spec, step_bytes(step, source, spec, shape, itemsize, mesh, places_shards)


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
) -> StepBytes:
    """Compute the bytes of a step that brings a tensor of ``shape`` (whole) from one spec to another."""
    local, result = source.local_shape(shape, mesh), target.local_shape(shape, mesh)
    before, after = math.prod(local) * itemsize, math.prod(result) * itemsize
    uneven = step.is_uneven(mesh)
    places = places_shards and not uneven
    unpacks = step.unpacks(local, result, mesh, places)
    received = buffer_nbytes(after if places and not unpacks else step.received_nbytes(before, after, mesh))
    working = buffer_nbytes(before) + received
    if uneven:
        working = max(working, uneven_nbytes(step, before, after, mesh))
    if step.packs(local, places):
        working = max(working, 2 * buffer_nbytes(before))
    return StepBytes(working, received + buffer_nbytes(after) if unpacks else 0)


def reduction_nbytes(
    shape: Sequence[int],
    itemsize: int,
    partial: TensorShardSpec,
    fns: Sequence[ReduceFn],
    mesh: DeviceMesh,
    places_shards: bool = False,
) -> int:
    """Compute the peak bytes of reducing a partial tensor of ``shape`` (elements), itself and the result included."""
    spec = partial
    before = partial.local_nbytes(shape, itemsize, mesh)
    most = buffer_nbytes(before)
    for fn in fns:
        step, local = Step.of(fn), spec.local_shape(shape, mesh)
        spec = fn.after(spec)
        after, uneven = spec.local_nbytes(shape, itemsize, mesh), step.is_uneven(mesh)
        packs = step.packs(local, places_shards and not uneven)
        sent, result = buffer_nbytes(before), buffer_nbytes(after)
        copies: tuple[int, ...] = (2 * sent if packs else 0, 2 * result if fn.op == "average" else 0)
        if uneven:
            copies = (*copies, uneven_nbytes(step, before, after, mesh))
        if step.exchanges(places_shards):
            stacked = step.whole_nbytes(before, after, mesh)
            exchanged = step.exchanged_nbytes(before, after, mesh)
            copies = (*copies, buffer_nbytes(stacked) + buffer_nbytes(exchanged))
        most = max(most, sent + result, *copies)
        before = after
    return most


def uneven_nbytes(step: Step, before: int, after: int, mesh: DeviceMesh) -> int:
    """Compute the peak bytes of a step on unequal parts, its tensors of ``before`` and ``after`` bytes included."""
    whole = step.whole_nbytes(before, after, mesh)
    block = before if step.collective.joins else after
    return buffer_nbytes(whole) + buffer_nbytes(max(before, block, after))
