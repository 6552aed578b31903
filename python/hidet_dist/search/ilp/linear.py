"""A mixed integer linear program as flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable


class LinearProgram:
    """Columns and rows of a program to be minimised; rows are stored one after the other, without their zeros.

    Attributes
    ----------
    costs, lower, upper: of each column, its cost and bounds.
    integer: the columns that take whole numbers only.
    row_lower, row_upper: the bounds of each row's sum.
    starts: of each row, where its terms begin.
    indices, values: of each term, its column and its coefficient; the columns of a row are distinct.
    """

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.starts: list[int] = []
        self.indices: list[int] = []
        self.values: list[float] = []

    def add_column(self) -> int:
        """Add a column of at least 0, without a cost, and return its number."""
        self.costs.append(0.0)
        self.lower.append(0.0)
        self.upper.append(math.inf)
        return len(self.costs) - 1

    def add_binary(self) -> int:
        """Add a column that is 0 or 1, without a cost, and return its number."""
        column = self.add_column()
        self.upper[column] = 1.0
        self.integer.append(column)
        return column

    def add_row(self, terms: Iterable[tuple[int, float]], lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add a row: the sum of its terms, pairs of a column and its coefficient, is between two bounds."""
        self.starts.append(len(self.indices))
        for column, value in terms:
            if value:
                self.indices.append(column)
                self.values.append(value)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
