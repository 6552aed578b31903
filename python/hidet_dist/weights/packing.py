"""Weights in panels: their elements, read from a source and arranged block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from hidet_dist.spec import DeviceMesh, TensorPlan
from hidet_dist.weights.panels import Panels
from hidet_dist.weights.safetensors_file import own_memory
from hidet_dist.weights.sources import Source, read_shard

_BLOCK_BYTES = 2**22
_LEAST_RUN_BYTES = 4096  # of a row that is read at once: shorter runs of a file take as long


def packed(weight: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Arrange the elements of a whole weight as panels, in a tensor of shape ``panels.shape``."""
    read = _slicer(weight, panels)
    return torch.stack(
        [_arranged(read, matrix, 0, panels.columns, panels, panels.depth) for matrix in range(panels.matrices)]
    )


def panel_blocks(
    source: Source,
    weight: TensorPlan,
    mesh: DeviceMesh,
    coordinate: Sequence[int],
    panels: Panels,
    block_bytes: int = _BLOCK_BYTES,
) -> Iterator[torch.Tensor]:
    """Yield the shard of :func:`hidet_dist.weights.read_shard` as panels, in blocks of whole panels.

    About ``block_bytes`` are read at once. A block has at least a page of each row of a matrix. A shard whose dims are
    not those of the matrices is read as a whole.
    """
    shape = weight.spec.local_shape(weight.shape, mesh, coordinate)
    depth, columns = panels.depth, panels.columns
    sides = (columns, depth) if panels.transposed else (depth, columns)
    size = weight.nbytes // math.prod(weight.shape)
    if tuple(shape[-2:]) == sides:
        read = _reader(source, weight, mesh, coordinate, shape[:-2], panels)
    else:
        read = _slicer(read_shard(source, weight, mesh, coordinate), panels)
    at_once = max(block_bytes // (depth * size), 0 if panels.transposed else _LEAST_RUN_BYTES // size)
    at_once = max(1, at_once // panels.width) * panels.width
    for matrix in range(panels.matrices):
        for first in range(0, columns, at_once):
            last = min(first + at_once, columns)
            rows = depth if panels.transposed else max(1, block_bytes // ((last - first) * size))
            yield _arranged(read, matrix, first, last, panels, rows)


_Read = Callable[[int, slice, slice], torch.Tensor]  # some rows and columns of a matrix, by its number


def _reader(
    source: Source,
    weight: TensorPlan,
    mesh: DeviceMesh,
    coordinate: Sequence[int],
    stack: Sequence[int],
    panels: Panels,
) -> _Read:
    def read(matrix: int, rows: slice, columns: slice) -> torch.Tensor:
        part: list[slice] = []
        for extent in reversed(stack):
            matrix, index = divmod(matrix, extent)
            part.insert(0, slice(index, index + 1))
        part += [columns, rows] if panels.transposed else [rows, columns]
        block = read_shard(source, weight, mesh, coordinate, part)
        block = block.reshape(block.shape[-2:])
        return block.t() if panels.transposed else block

    return read


def _slicer(whole: torch.Tensor, panels: Panels) -> _Read:
    sides = (panels.columns, panels.depth) if panels.transposed else (panels.depth, panels.columns)
    stored = whole.reshape(panels.matrices, *sides)
    matrices = stored.mT if panels.transposed else stored
    return lambda matrix, rows, columns: matrices[matrix][rows, columns]


def _arranged(read: _Read, matrix: int, first: int, last: int, panels: Panels, rows: int) -> torch.Tensor:
    """Arrange columns of a matrix, which begin with a panel's, as panels; return their elements in one dim.

    ``rows`` are read at once.
    """
    depth, width = panels.depth, panels.width
    whole = (last - first) // width * width
    result: torch.Tensor | None = None
    for start in range(0, depth, rows):
        part = read(matrix, slice(start, min(start + rows, depth)), slice(first, last))
        if result is None:
            result = own_memory([depth * (last - first)], part.dtype)
        place = slice(start, start + len(part))
        if whole:
            blocks = result[: depth * whole].view(-1, depth, width)
            blocks[:, place] = part[:, :whole].unflatten(1, (-1, width)).transpose(0, 1)
        if first + whole < last:
            result[depth * whole :].view(depth, -1)[place] = part[:, whole:]
    assert result is not None
    return result
