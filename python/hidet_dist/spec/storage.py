"""How weights lie in the memory of ranks if not in their own dtype: in fewer bits, with scales of groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from hidet_dist.codec import Range
from hidet_dist.errors import SpecError

_BYTE_BITS = 8
_MOST = 2**16  # bits, rows of a group, bytes of its scales, columns of a panel
_Count = Annotated[int, Range(0, _MOST)]
_PositiveCount = Annotated[int, Range(1, _MOST)]


@dataclass(frozen=True)
class WeightStorage:
    """The storage of matrices of a weight, the right operands of products, in a lower precision.

    Attributes
    ----------
    precision: its name, such as ``int4``.
    bits: the bits of an element.
    group: the rows of a column that have scales in common, to a multiple of which each column is padded; 0 if there are
        no scales.
    group_bytes: the bytes of the scales of a group of one column.
    width: a multiple to which matrices with scales are padded by columns.
    transposed: whether the weight has the transposed matrices: its last dim are then their rows.
    exact: whether elements and scales are those that its file has: shards are then of whole groups.
    """

    precision: str
    bits: _PositiveCount
    group: _Count = 0
    group_bytes: _Count = 0
    width: _PositiveCount = 1
    transposed: bool = False
    exact: bool = False

    @property
    def depth_dim(self) -> int:
        """The dim of a weight that is the rows of its matrices, from the end."""
        return -1 if self.transposed else -2

    def nbytes(self, shape: Sequence[int]) -> int:
        """Compute the bytes of a weight, or of a shard of one, of ``shape`` (elements). Raises SpecError."""
        if not self.group:
            return math.prod(shape) * self.bits // _BYTE_BITS
        if len(shape) < 2:
            raise SpecError(f"A weight of the shape {list(shape)} has no matrices to store with scales.")
        depth, columns = shape[self.depth_dim], shape[-3 - self.depth_dim]
        padded = -(-columns // self.width) * self.width
        groups = -(-depth // self.group)
        return math.prod(shape[:-2]) * padded * groups * (self.group * self.bits // _BYTE_BITS + self.group_bytes)
