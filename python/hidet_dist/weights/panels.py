"""The layout of matrices in panels: the one in which kernels read the weights of matrix products.

A panel has some columns of a matrix, row after row, and the panels lie one after the other. The last panel of a matrix
may have fewer columns. Elements may be of lower precision than the weight: of half precision, or of 8 or 4 bits in
groups of rows, each with a scale for each column. The native library multiplies by panels, and its header
``hidet_dist/panels.h`` describes the bytes. Kernels for GPUs read panels of few bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from hidet_dist.codec import OMITTED
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.weights.header import StoredLayout

GPU_PANEL_WIDTH = 32
"""The columns of a panel for GPUs: the lanes of a warp."""

PANEL_WIDTHS = {
    **{"x86-64-v4": 32, "x86-64-v3": 16, "x86-64-v2": 8, "x86-64": 8},
    **dict.fromkeys(("sm_80", "sm_89", "sm_90"), GPU_PANEL_WIDTH),
}
"""The columns of a panel, by architecture. For a processor, those whose sums its registers hold for a block of rows."""

GROUPS = (32, 64, 128)
"""The rows that a group of elements with one scale may have."""


@dataclass(frozen=True)
class FewBits:
    """A precision whose elements are whole numbers of few bits, in groups of rows that have scales in common.

    Attributes
    ----------
    bits: those of an element.
    affine: whether a group of a column has a minimum beside its scale.
    wide: whether scales and minimums are float32 instead of float16.
    groups: the rows that a group may have.
    exact_only: whether it is for weights of files alone, to which no weight is rounded.
    """

    bits: int
    affine: bool = False
    wide: bool = False
    groups: tuple[int, ...] = GROUPS
    exact_only: bool = False

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scale, and of the minimum, of a group of one column."""
        return (4 if self.wide else 2) * (2 if self.affine else 1)


FEW_BITS = {
    "int8": FewBits(8),
    "int4": FewBits(4),
    "uint4": FewBits(4, affine=True),
    "wide_int8": FewBits(8, wide=True, groups=(16,), exact_only=True),
    "wide_uint4": FewBits(4, affine=True, wide=True, exact_only=True),
}
"""The precisions with scales."""

STORED = "stored"
"""The name that stands for the precision in which the file of a weight has it, without rounding."""

HALF_PRECISIONS = ("float16", "bfloat16")
"""The lower precisions without scales."""

PRECISIONS = (*HALF_PRECISIONS, *(name for name, few in FEW_BITS.items() if not few.exact_only))
"""The lower precisions to which weights may be rounded."""


def groups_of(precision: str) -> tuple[int, ...]:
    """Return the rows that a group of a precision of few bits may have; 0 for one of half precision."""
    return FEW_BITS[precision].groups if precision in FEW_BITS else (0,)


_HALF_BITS = 16

SIZES = ("matrices", "depth", "columns")
"""The sizes of panels that devices may have unequal parts of."""


@dataclass(frozen=True)
class StoredPrecision:
    """A lower precision of weights in panels; for those of few bits, the rows of a group.

    ``exact``: elements and scales are those that a file has, instead of rounded ones.
    """

    name: str
    group: int = GROUPS[0]
    exact: bool = False


def storage_in_panels(precision: StoredPrecision, width: int, transposed: bool) -> WeightStorage:
    """Describe the bytes of a weight in panels of ``width`` columns, which has transposed matrices or not."""
    name, group = precision.name, precision.group
    if name not in FEW_BITS:
        return WeightStorage(name, _HALF_BITS, transposed=transposed)
    few = FEW_BITS[name]
    return WeightStorage(name, few.bits, group, few.scale_bytes, width, transposed, precision.exact)


@dataclass(frozen=True)
class Panels:
    """The arrangement of a weight as panels.

    Attributes
    ----------
    matrices: the number of matrices that lie one after the other.
    depth, columns: the rows and columns of each, as the right operand of a product.
    transposed: whether the weight has the transposed matrices, of shape [columns, depth].
    width: the columns of a panel.
    precision: that of the elements; empty for the weight's dtype.
    group: for elements of few bits, the rows that have one scale for each column; otherwise 0.
    taps: for the filters of a convolution, the taps of its kernel: the weight has the taps of one row of channels after
        those of another, and the panels have all rows of one tap after those of another. Otherwise 1.
    winograd: whether they are filters of 3 x 3 taps, shape [columns, depth, 3, 3], that are transformed to matrices of
        shape [depth, columns] (:mod:`hidet_dist.patterns.winograd`).
    parts: where the parts of devices are unequal, names of the sizes :data:`SIZES`, each with the name of a part by
        which it is to be multiplied (:mod:`hidet_dist.spec.parts`).
    """

    matrices: int
    depth: int
    columns: int
    transposed: bool
    width: int
    precision: str = ""
    group: int = 0
    taps: int = 1
    winograd: Annotated[bool, OMITTED] = False
    parts: Annotated[tuple[tuple[str, str], ...], OMITTED] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in which the elements lie: for each matrix, the elements of its panels, or their bytes."""
        return self.matrices, self.matrix_size(self.depth, self.columns)

    def matrix_size(self, depth: Any, columns: Any) -> Any:
        """Count the elements of a matrix of these sizes in panels, or their bytes; also for sizes as expressions."""
        if self.precision not in FEW_BITS:
            return depth * columns
        few = FEW_BITS[self.precision]
        across = (columns + (self.width - 1)) // self.width
        groups = (depth + (self.group - 1)) // self.group
        return across * groups * (self.width * (few.scale_bytes + self.group * few.bits // 8))

    @property
    def column_bytes(self) -> int:
        """The bytes of a column of few bits, with its scales."""
        return int(self.matrix_size(self.depth, self.width)) // self.width

    def at(self, parts: Mapping[str, int]) -> Panels:
        """Return the panels of a device with these parts. Raises KeyError for an unknown name."""
        sizes = {name: getattr(self, name) for name in SIZES}
        for name, part in self.parts:
            sizes[name] *= parts[part]
        return replace(self, **sizes, parts=()) if self.parts else self

    def stored_dtype(self, dtype: str) -> str:
        """Name the dtype in which the elements of a weight of ``dtype`` lie."""
        return "uint8" if self.precision in FEW_BITS else self.precision or dtype


@dataclass(frozen=True)
class PanelLayout(StoredLayout):
    """A weight in a file whose elements are arranged as panels.

    Where the parts of devices are unequal, ``shape`` is that of one unit a device.
    """

    panels: Panels

    @classmethod
    def of(cls, dtype: str, panels: Panels) -> PanelLayout:
        """Make the layout of a weight of ``dtype``."""
        return cls(panels.stored_dtype(dtype), panels.shape, panels)

    def at(self, parts: Mapping[str, int]) -> PanelLayout:
        """Return the layout on a device with these parts. Raises KeyError for an unknown name."""
        own = self.panels.at(parts)
        return PanelLayout(self.dtype, own.shape, own)
