"""The layout of matrices in panels: the one in which kernels for the CPU read the weights of matrix products.

A panel has some columns of a matrix, row after row, and the panels lie one after the other. The last panel of a matrix
may have fewer columns. The native library multiplies by panels (``hidet_dist/panels.h``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.weights.header import Layout

PANEL_WIDTHS = {"x86-64-v4": 32, "x86-64-v3": 16, "x86-64-v2": 8, "x86-64": 8}
"""The columns of a panel at each level of x86-64: those whose sums the registers hold for a block of rows."""


@dataclass(frozen=True)
class Panels:
    """The arrangement of a weight as panels.

    Attributes
    ----------
    matrices: the number of matrices that lie one after the other.
    depth, columns: the rows and columns of each, as the right operand of a product.
    transposed: whether the weight has the transposed matrices, of shape [columns, depth].
    width: the columns of a panel.
    """

    matrices: int
    depth: int
    columns: int
    transposed: bool
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in which the elements lie: for each matrix, the elements of its panels."""
        return self.matrices, self.depth * self.columns


@dataclass(frozen=True)
class PanelLayout(Layout):
    """A weight in a file whose elements are arranged as panels."""

    panels: Panels
