"""Weights that files have in few bits, taken as they are: the elements of each group, with its scale and minimum.

The groups are along the last dim. Sources of such weights have ``stored_precision``, the precision that holds them
without rounding, and ``groups``, which reads a region that consists of whole groups. So do parts of them, and sources
that are joined or stacked of them along another dim, such as the matrices of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.weights.combined import Joined, SlicedSource, Source, Stacked
from hidet_dist.weights.named import mark_of
from hidet_dist.weights.panels import StoredPrecision


@dataclass(frozen=True)
class Groups:
    """Matrices in groups along their last dim.

    Attributes
    ----------
    elements: uint8 or int8 of the shape of the matrices: from 0 to 15 for 4 bits, and from -128 to 127 for 8.
    scales: float32[..., groups].
    minimums: float32[..., groups], what is added to the multiples of scales; None for none. Without them, 8 is taken
        from elements of 4 bits.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Compute the float32 values."""
        group = self.elements.shape[-1] // self.scales.shape[-1]
        elements = self.elements.float().unflatten(-1, (-1, group))
        if self.elements.dtype == torch.uint8 and self.minimums is None:
            elements = elements - 8
        values = elements * self.scales[..., None]
        return (values if self.minimums is None else values + self.minimums[..., None]).flatten(-2)

    def select(self, rows: torch.Tensor | slice) -> Groups:
        """Select some indices of the slowest dim."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return Groups(self.elements[rows], self.scales[rows], minimums)


def joined(parts: Sequence[Groups], dim: int) -> Groups:
    """Join groups along a dim that is not the last."""
    return _combined(parts, lambda tensors: torch.cat(tensors, dim))


def stacked(parts: Sequence[Groups], dim: int) -> Groups:
    """Stack groups along a new dim that is not the last."""
    return _combined(parts, lambda tensors: torch.stack(tensors, dim))


def _combined(parts: Sequence[Groups], combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> Groups:
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Groups(
        combine([part.elements for part in parts]),
        combine([part.scales for part in parts]),
        combine(minimums) if minimums else None,
    )


def stored_precision_of(weight: Tensor) -> StoredPrecision | None:
    """Return the precision that holds a weight as its file has it; None if there is none, or the file is not known."""
    mark = mark_of(weight)
    if mark is None or mark.dtype is not None:
        return None
    if mark.stored is None or list(weight.shape) != [part.stop - part.start for part in mark.part]:
        return None  # with zeros behind it
    return _precision_of(SlicedSource(mark.stored, mark.part), len(mark.part))


def _precision_of(source: Source, dims: int) -> StoredPrecision | None:
    """Return the precision that holds a source of so many dims without rounding; None if there is none."""
    precision: StoredPrecision | None
    if isinstance(source, SlicedSource):
        precision = _precision_of(source.whole, dims)
        last = source.part[-1]
        is_whole = precision is not None and not (last.start % precision.group or last.stop % precision.group)
        return precision if is_whole and all((bounds.step or 1) == 1 for bounds in source.part) else None
    if isinstance(source, Joined | Stacked):
        of_parts = {_precision_of(part, dims - isinstance(source, Stacked)) for part in source.parts}
        return of_parts.pop() if len(of_parts) == 1 and source.dim < dims - 1 else None
    precision = getattr(source, "stored_precision", None)
    return precision


def read_groups(source: Source, region: Sequence[slice]) -> Groups:
    """Read a region of whole groups. Raises WeightsError when the source has none, or as its ``read`` does."""
    if isinstance(source, SlicedSource):
        inner = [
            slice(bounds.start + part.start, bounds.start + part.stop)
            for bounds, part in zip(source.part, region, strict=True)
        ]
        return read_groups(source.whole, inner)
    if isinstance(source, Joined):
        return joined([read_groups(part, inner) for part, inner in source.within(region)], source.dim)
    if isinstance(source, Stacked):
        inner = [bounds for dim, bounds in enumerate(region) if dim != source.dim]
        return stacked([read_groups(part, inner) for part in source.parts[region[source.dim]]], source.dim)
    read = getattr(source, "groups", None)
    if read is None:
        raise WeightsError(
            "A weight is to be held as its file has it, and its file has no groups of few bits: leave the precision "
            "'stored' out of optimization_config['weights']."
        )
    groups: Groups = read(region)
    return groups
