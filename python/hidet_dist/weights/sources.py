"""The source of a graph's weight: memory or a file; and shards cut from it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.spec import DeviceMesh, TensorPlan
from hidet_dist.weights.combined import Cast, Padded, SlicedSource, Source
from hidet_dist.weights.named import InMemory, Mark, is_weight, mark_of
from hidet_dist.weights.safetensors_file import SafetensorsFiles

BLOCK_BYTES = 2**24
"""The bytes of a shard that are held at once while it is written."""


class Constant:
    """A weight in memory: a constant of the graph."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @functools.cached_property
    def elements(self) -> torch.Tensor:
        """The same memory as a tensor of PyTorch."""
        return self.tensor.torch()

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``; without a copy if they are contiguous."""
        return self.elements[tuple(region)].contiguous()


class Missing:
    """A weight with a name but without data."""

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


def source_of(tensor: Tensor, files: SafetensorsFiles | None = None) -> Source:
    """Find the source of a weight's data: the weight itself, the file that it was made from, or else ``files``.

    Raises
    ------
    WeightsError
        When ``files`` lack it, or have it in another shape or dtype; the message names the tensor and the file.
    """
    mark = mark_of(tensor)
    if mark is None:
        return Constant(tensor)
    stored = mark.stored
    if stored is None and files is not None:
        stored = files.find(mark.name, mark.dtype or tensor.dtype.name, mark.shape)
    if stored is None:
        return Missing(mark.name)
    source: Source = SlicedSource(stored, mark.part)
    if mark.dtype is not None:
        source = Cast(source, getattr(torch, tensor.dtype.name))
    extents = [len(range(bounds.start, bounds.stop, bounds.step or 1)) for bounds in mark.part]
    return source if extents == list(tensor.shape) else Padded(source, extents)


def same_elements(a: Tensor, b: Tensor, files: SafetensorsFiles | None = None) -> bool:
    """Whether two weights with data, in memory or in files, have the same elements, bit by bit.

    What is the same memory or the same part of a file is not read; other weights are read in blocks.

    Raises
    ------
    WeightsError
        When a file cannot be read.
    """
    if a.dtype.name != b.dtype.name or list(a.shape) != list(b.shape):
        return False
    if a is b or _same_place(mark_of(a), mark_of(b)):
        return True
    shape = [int(size) for size in a.shape]
    of_a, of_b = source_of(a, files), source_of(b, files)
    rest = [slice(0, size) for size in shape[1:]]
    rows = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * a.dtype.nbytes))
    for row in range(0, shape[0], rows) if shape else (0,):
        region = [slice(row, min(row + rows, shape[0])), *rest] if shape else []
        x, y = (source.read(region).reshape(-1).view(torch.uint8) for source in (of_a, of_b))
        if not torch.equal(x, y):
            return False
    return True


def _same_place(a: Mark | None, b: Mark | None) -> bool:
    """Whether the data of two weights by name is in the same place."""
    if a is None or b is None:
        return False
    if isinstance(a.stored, InMemory) and isinstance(b.stored, InMemory) and same_memory(a.stored, b.stored):
        b = replace(b, stored=a.stored)
    return a == b


def same_memory(a: InMemory, b: InMemory) -> bool:
    """Whether two weights in memory are the same memory."""
    x, y = a.data, b.data
    if x is y:
        return True
    places = ((z.data_ptr(), z.dtype, z.shape, z.stride(), z.device) for z in (x, y) if z.device.type == "cpu")
    first, second = next(places, None), next(places, None)
    return first is not None and first == second


def check_weights(weights: Iterable[Tensor], files: SafetensorsFiles | None) -> None:
    """Refuse weights without data.

    Raises
    ------
    WeightsError
        When a weight has no data and ``files`` lack it, or have it in another shape or dtype; or when ``files`` are
        given for a graph without weights by name.
    """
    named = [x for x in weights if is_weight(x)]
    if files is not None and all(mark.stored for x in named if (mark := mark_of(x))):
        raise WeightsError(
            f"Weights are given ({files.where}), but the graph has none by name: see hidet.distributed.weight."
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
    """Read the shard of a weight for the device at ``coordinate``, or ``part`` of it; contiguous.

    ``part`` is a slice of the shard for each dim. A shard is zero beyond the end of the weight.
    """
    local = weight.spec.local_shape(weight.shape, mesh, coordinate)
    part = [slice(0, size) for size in local] if part is None else part
    data = source.read(region_of(weight, mesh, coordinate, part))
    shape = [part_slice.stop - part_slice.start for part_slice in part]
    if list(data.shape) == shape:
        return data
    padded = torch.zeros(shape, dtype=data.dtype)
    padded[tuple(slice(0, size) for size in data.shape)] = data
    return padded


def region_of(weight: TensorPlan, mesh: DeviceMesh, coordinate: Sequence[int], part: Sequence[slice]) -> list[slice]:
    """Find the region of a weight that is ``part`` of the shard for the device at ``coordinate``, without padding."""
    return [
        slice(
            shard_slice.start + part_slice.start,
            max(shard_slice.start + part_slice.start, min(shard_slice.start + part_slice.stop, shard_slice.stop)),
        )
        for shard_slice, part_slice in zip(weight.spec.slices(weight.shape, mesh, coordinate), part, strict=True)
    ]


def shard_blocks(
    source: Source, weight: TensorPlan, mesh: DeviceMesh, coordinate: Sequence[int], block_bytes: int = BLOCK_BYTES
) -> Iterator[torch.Tensor]:
    """Yield the shard of :func:`read_shard` in row-major blocks of at most ``block_bytes`` (at least one element)."""
    shape = weight.spec.local_shape(weight.shape, mesh, coordinate)
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
    rest = [slice(0, extent) for extent in shape[dim + 1 :]]
    for index in itertools.product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            part = [slice(i, i + 1) for i in index]
            yield read_shard(source, weight, mesh, coordinate, [*part, slice(row, min(row + rows, shape[dim])), *rest])
