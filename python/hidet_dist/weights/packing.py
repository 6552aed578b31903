"""Weights in panels: their elements, read from a source and arranged block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from hidet_dist.errors import WeightsError
from hidet_dist.spec import DeviceMesh, TensorPlan
from hidet_dist.weights.panels import FEW_BITS, FewBits, Panels
from hidet_dist.weights.safetensors_file import own_memory
from hidet_dist.weights.sources import Source, read_shard, region_of
from hidet_dist.weights.stored_groups import read_groups

_BLOCK_BYTES = 2**22
_LEAST_RUN_BYTES = 4096  # of a row that is read at once: shorter runs of a file take as long


def packed(weight: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Arrange the elements of a whole weight as panels, in a tensor of shape ``panels.shape``."""
    read = _slicer(weight, panels)
    if panels.precision in FEW_BITS:
        everything = slice(None), slice(None)
        return torch.stack([quantized(read(matrix, *everything), panels) for matrix in range(panels.matrices)])
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
    exact = weight.storage is not None and weight.storage.exact
    if exact and (tuple(shape[-2:]) != sides or not panels.transposed):
        raise WeightsError(f"The weight {weight.name!r} cannot be held as its file has it: its matrices are others.")
    if exact or (tuple(shape[-2:]) == sides and panels.taps == 1 and not panels.winograd):
        read = _reader(source, weight, mesh, coordinate, shape[:-2], panels)
    else:
        read = _slicer(read_shard(source, weight, mesh, coordinate), panels)
    at_once = max(block_bytes // (depth * size), 0 if panels.transposed else _LEAST_RUN_BYTES // size)
    at_once = max(1, at_once // panels.width) * panels.width
    for matrix in range(panels.matrices):
        for first in range(0, columns, at_once):
            last = min(first + at_once, columns)
            if exact:
                part = [*_index_of(matrix, shape[:-2]), slice(first, last), slice(0, depth)]
                yield _taken(source, weight, mesh, coordinate, part, panels)
                continue
            if panels.precision in FEW_BITS:
                yield quantized(read(matrix, slice(0, depth), slice(first, last)), panels)
                continue
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
        part = _index_of(matrix, stack)
        part += [columns, rows] if panels.transposed else [rows, columns]
        block = read_shard(source, weight, mesh, coordinate, part)
        block = block.reshape(block.shape[-2:])
        return block.t() if panels.transposed else block

    return read


def _index_of(matrix: int, stack: Sequence[int]) -> list[slice]:
    """Find the place of a matrix in a stack, by its number."""
    place: list[slice] = []
    for extent in reversed(stack):
        matrix, index = divmod(matrix, extent)
        place.insert(0, slice(index, index + 1))
    return place


def _slicer(whole: torch.Tensor, panels: Panels) -> _Read:
    sides = (panels.columns, panels.depth) if panels.transposed else (panels.depth, panels.columns)
    stored = (winograd_filters(whole) if panels.winograd else whole).reshape(panels.matrices, *sides)
    if panels.taps > 1:
        stored = stored.unflatten(-1, (-1, panels.taps)).mT.flatten(-2)
    matrices = stored.mT if panels.transposed else stored
    return lambda matrix, rows, columns: matrices[matrix][rows, columns]


def winograd_filters(filters: torch.Tensor) -> torch.Tensor:
    """Transform filters [out_channels, channels, 3, 3] to [16, out_channels, channels], computed in float64.

    The transform of each is G f G^T for Winograd's minimal filtering F(2 x 2, 3 x 3) (Lavin and Gray, 2015,
    https://arxiv.org/abs/1509.09308, section 4.1).
    """
    g = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    return torch.einsum("ia,ocab,jb->ijoc", g, filters.double(), g).flatten(0, 1).to(filters.dtype)


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
            dtype = getattr(torch, panels.precision) if panels.precision else part.dtype
            result = own_memory([depth * (last - first)], dtype)
        place = slice(start, start + len(part))
        if whole:
            blocks = result[: depth * whole].view(-1, depth, width)
            blocks[:, place] = part[:, :whole].unflatten(1, (-1, width)).transpose(0, 1)
        if first + whole < last:
            result[depth * whole :].view(depth, -1)[place] = part[:, whole:]
    assert result is not None
    if panels.precision == "float16":
        _check_finite(result, panels)
    return result


def quantized(matrix: torch.Tensor, panels: Panels) -> torch.Tensor:
    """Round columns of a matrix, which begin with a panel's, to panels of few bits; return their bytes in one dim.

    With 8 bits, a group's scale is its largest magnitude / 127. With 4 bits, it is the element of largest magnitude
    / -8, and elements are from -8 to 7 times the scale. With a minimum, the scale is a 15th of the range. These are
    the rules of GGUF's Q8_0, Q4_0 and Q4_1, so that weights that were rounded by the first two in groups of the same
    rows are stored exactly (https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c).

    Parameters
    ----------
    matrix: Tensor
        Float32, of shape [depth, columns].
    panels: Panels
        The arrangement, of a precision with scales.

    Raises
    ------
    WeightsError
        When a group has no finite scale.
    """
    group = panels.group
    groups = -(-panels.depth // group)
    missing, values = groups * group - panels.depth, matrix.float()
    few = FEW_BITS[panels.precision]
    if missing and few.affine:  # what stands behind the last row must not widen its group's range
        values = torch.cat([values, values[-1:].expand(missing, -1)])
    elif missing:
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    padded = values.reshape(groups, group, -1)
    minimums = None
    if few.bits == 8:
        scales = _held(padded.abs().amax(1) / 127, few)
    elif few.affine:
        minimums = _held(padded.amin(1), few)
        scales = _held((padded.amax(1) - minimums) / 15, few)
        _check_finite(minimums, panels)
        padded = padded - minimums[:, None]
    else:
        largest = padded.abs().argmax(1, keepdim=True)
        scales = _held(padded.gather(1, largest)[:, 0] / -8, few)
    _check_finite(scales, panels)
    multiples = padded * torch.where(scales == 0, 0.0, 1 / scales)[:, None]
    if few.bits == 8:
        rounded = multiples.round().clamp(-127, 127).to(torch.int8)
    else:
        begin = 0.5 if minimums is not None else 8.5
        rounded = (multiples + begin).floor().clamp(0, 15).to(torch.uint8)
    return _in_groups(rounded, scales, minimums, panels)


def _held(scales: torch.Tensor, few: FewBits) -> torch.Tensor:
    """Round scales or minimums to the numbers that are stored."""
    return scales if few.wide else scales.half().float()


def _in_groups(
    elements: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, panels: Panels
) -> torch.Tensor:
    """Arrange elements [groups, group, columns] and scales [groups, columns] as panels; return bytes in one dim."""
    groups, group, columns = elements.shape
    width, across = panels.width, -(-columns // panels.width)
    missing = (0, across * width - columns)
    stored = torch.nn.functional.pad(elements.view(torch.uint8), missing)
    if FEW_BITS[panels.precision].bits == 8:
        bytes_ = stored.reshape(groups, group // 4, 4, across, width).permute(3, 0, 1, 4, 2)
    else:
        halves = stored.reshape(groups, group // 8, 2, 4, across, width)
        bytes_ = (halves[:, :, 0] | halves[:, :, 1] << 4).permute(3, 0, 1, 4, 2)
    dtype = torch.float32 if FEW_BITS[panels.precision].wide else torch.float16
    parts = [
        torch.nn.functional.pad(part.to(dtype), missing).reshape(groups, across, width).transpose(0, 1).contiguous()
        for part in (scales, minimums)
        if part is not None
    ]
    return torch.cat([*(part.view(torch.uint8) for part in parts), bytes_.reshape(across, groups, -1)], 2).reshape(-1)


def _taken(
    source: Source,
    weight: TensorPlan,
    mesh: DeviceMesh,
    coordinate: Sequence[int],
    part: Sequence[slice],
    panels: Panels,
) -> torch.Tensor:
    """Arrange a part of a shard, of whole groups of one matrix, as panels, with what its file has.

    The weight has transposed matrices; ``part`` has some of their rows. Rows beyond the end of the weight are zero.
    """
    region = region_of(weight, mesh, coordinate, part)
    rows = part[-2].stop - part[-2].start
    if any(bounds.start >= bounds.stop for bounds in region):
        columns = -(-rows // panels.width) * panels.width
        return torch.zeros(columns * panels.column_bytes, dtype=torch.uint8)  # scales of zero
    read = read_groups(source, region)
    elements = read.elements.reshape(-1, panels.depth)
    scales = read.scales.reshape(len(elements), -1)
    minimums = None if read.minimums is None else read.minimums.reshape(len(elements), -1)
    missing = (0, 0, 0, rows - len(elements))
    pad = torch.nn.functional.pad
    return _in_groups(
        pad(elements, missing).t().contiguous().unflatten(0, (-1, panels.group)),
        pad(scales, missing).t().contiguous(),
        None if minimums is None else pad(minimums, missing).t().contiguous(),
        panels,
    )


def _check_finite(stored: torch.Tensor, panels: Panels) -> None:
    if not bool(stored.isfinite().all()):
        raise WeightsError(
            f"A weight has elements that are not finite or too large for the precision {panels.precision}. Store it in "
            "its own dtype: leave 'precision' out of optimization_config['weights'], or name 'bfloat16'."
        )
