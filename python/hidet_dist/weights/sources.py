"""Sources of the data of a graph's weights, and shards cut from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.spec import DeviceMesh, TensorPlan
from hidet_dist.weights.named import is_weight, mark_of
from hidet_dist.weights.safetensors_file import SafetensorsFiles

BLOCK_BYTES = 2**24
"""How much of a shard is held at once while it is written."""


class Source(Protocol):
    """The data of a whole weight."""

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, a slice with whole bounds and step 1 for each dim; contiguous."""
        ...


class Constant:
    """A weight that is in memory, a constant of the graph."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``; not a copy where they lie in one piece."""
        elements: torch.Tensor = self.tensor.torch()
        return elements[tuple(region)].contiguous()


class Missing:
    """A weight that has a name and no data."""

    def __init__(self, name: str):
        self.name = name

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Raises WeightsError."""
        raise WeightsError(_missing(self.name))


def _missing(name: str) -> str:
    return (
        f"The weight {name!r} has no data: set optimization_config['weights'] to the safetensors file, or the folder, "
        "that has it."
    )


class Part:
    """A part of a weight that lies somewhere: ``part`` has a slice with whole bounds for each of its dims."""

    def __init__(self, whole: Source, part: Sequence[slice]):
        self.whole = whole
        self.part = tuple(part)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region`` of the part; contiguous."""
        return self.whole.read(
            [
                slice(own.start + wanted.start, own.start + wanted.stop)
                for own, wanted in zip(self.part, region, strict=True)
            ]
        )


class Padded:
    """A weight with zeros beyond the extents of what lies somewhere."""

    def __init__(self, inner: Source, extents: Sequence[int]):
        self.inner = inner
        self.extents = tuple(extents)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``; contiguous."""
        there = [
            slice(min(own.start, extent), min(own.stop, extent))
            for own, extent in zip(region, self.extents, strict=True)
        ]
        data = self.inner.read(there)
        if there == list(region):
            return data
        result = torch.zeros([own.stop - own.start for own in region], dtype=data.dtype)
        result[tuple(slice(0, size) for size in data.shape)] = data
        return result


class Cast:
    """A floating-point weight that lies somewhere in another dtype."""

    def __init__(self, stored: Source, dtype: torch.dtype):
        self.stored = stored
        self.dtype = dtype

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, cast; contiguous."""
        return cast_within(self.stored.read(region), self.dtype)


def cast_within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in ``dtype``, finite ones beyond its range being its largest instead of infinite."""
    limit = torch.finfo(dtype).max
    return torch.where(torch.isfinite(values), values.clamp(-limit, limit), values).to(dtype)


def source_of(tensor: Tensor, files: SafetensorsFiles | None = None) -> Source:
    """Find the source of a weight's data: itself, the file that it was made from, or else ``files``.

    Raises
    ------
    WeightsError
        When ``files`` lack it, or have it in another shape or dtype; it names the tensor and the file.
    """
    mark = mark_of(tensor)
    if mark is None:
        return Constant(tensor)
    stored = mark.stored
    if stored is None and files is not None:
        stored = files.find(mark.name, mark.dtype or tensor.dtype.name, mark.shape)
    if stored is None:
        return Missing(mark.name)
    source: Source = Part(stored, mark.part)
    if mark.dtype is not None:
        source = Cast(source, getattr(torch, tensor.dtype.name))
    extents = [own.stop - own.start for own in mark.part]
    return source if extents == list(tensor.shape) else Padded(source, extents)


def check_weights(weights: Iterable[Tensor], files: SafetensorsFiles | None) -> None:
    """Refuse weights whose data is nowhere to be found.

    Raises
    ------
    WeightsError
        When a weight has no data and ``files`` lack it, or have it in another shape or dtype, or when ``files`` are
        given for a graph that asks for nothing from them.
    """
    named = [x for x in weights if is_weight(x)]
    if files is not None and all(mark.stored for x in named if (mark := mark_of(x))):
        raise WeightsError(
            f"Weights are given ({files.where}), but the graph asks for none by name: see hidet.distributed.weight."
        )
    for x in named:
        source = source_of(x, files)
        if isinstance(source, Missing):
            raise WeightsError(_missing(source.name))


def read_shard(
    source: Source,
    weight: TensorPlan,
    mesh: DeviceMesh,
    coordinate: Sequence[int],
    part: Sequence[slice] | None = None,
) -> torch.Tensor:
    """The shard of a weight that the device at ``coordinate`` holds, or ``part`` of it; contiguous.

    ``part`` is a slice for each dim, of the shard. What a shard has beyond the weight's end is zero.
    """
    local = weight.spec.local_shape(weight.shape, mesh)
    part = [slice(0, size) for size in local] if part is None else part
    region = [
        slice(own.start + wanted.start, max(own.start + wanted.start, min(own.start + wanted.stop, own.stop)))
        for own, wanted in zip(weight.spec.slices(weight.shape, mesh, coordinate), part, strict=True)
    ]
    data = source.read(region)
    shape = [wanted.stop - wanted.start for wanted in part]
    if list(data.shape) == shape:
        return data
    padded = torch.zeros(shape, dtype=data.dtype)
    padded[tuple(slice(0, size) for size in data.shape)] = data
    return padded


def shard_blocks(
    source: Source, weight: TensorPlan, mesh: DeviceMesh, coordinate: Sequence[int], block_bytes: int = BLOCK_BYTES
) -> Iterator[torch.Tensor]:
    """The shard of :func:`read_shard` row by row, in blocks of at most ``block_bytes`` (but at least one element)."""
    shape = weight.spec.local_shape(weight.shape, mesh)
    if not math.prod(shape):
        return
    size = weight.nbytes // math.prod(weight.shape)
    dim = 0
    while dim < len(shape) and math.prod(shape[dim + 1 :]) * size > block_bytes:
        dim += 1
    if dim >= len(shape):
        dim = len(shape) - 1
    if dim < 0:
        yield read_shard(source, weight, mesh, coordinate)
        return
    rows = max(1, block_bytes // (math.prod(shape[dim + 1 :]) * size))
    whole = [slice(0, extent) for extent in shape[dim + 1 :]]
    for index in itertools.product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            part = [slice(i, i + 1) for i in index]
            yield read_shard(source, weight, mesh, coordinate, [*part, slice(row, min(row + rows, shape[dim])), *whole])
