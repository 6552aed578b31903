"""Weights that files have in few bits, taken as they are: the elements of each group, with its scale and minimum.

The groups are along the last dim. Sources of such weights have ``stored_precision``, the precision that holds them
without rounding, and ``groups``, which reads a region that consists of whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.weights.combined import Part, Source
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


def stored_precision_of(weight: Tensor) -> StoredPrecision | None:
    """Return the precision that holds a weight as its file has it; None if there is none, or the file is not known."""
    mark = mark_of(weight)
    if mark is None or mark.dtype is not None:
        return None
    precision: StoredPrecision | None = getattr(mark.stored, "stored_precision", None)
    if precision is None or list(weight.shape) != [part.stop - part.start for part in mark.part]:
        return None  # with zeros behind it
    last = mark.part[-1]
    whole = last.start % precision.group == 0 and (last.stop - last.start) % precision.group == 0
    return precision if whole else None


def read_groups(source: Source, region: Sequence[slice]) -> Groups:
    """Read a region of whole groups. Raises WeightsError when the source has none, or as its ``read`` does."""
    if isinstance(source, Part):
        inner = [
            slice(bounds.start + part.start, bounds.start + part.stop)
            for bounds, part in zip(source.part, region, strict=True)
        ]
        return read_groups(source.whole, inner)
    read = getattr(source, "groups", None)
    if read is None:
        raise WeightsError(
            "A weight is to be held as its file has it, and its file has no groups of few bits: leave the precision "
            "'stored' out of optimization_config['weights']."
        )
    groups: Groups = read(region)
    return groups
