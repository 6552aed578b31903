"""Dominance among partial plans, computed by the native library."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int64, c_uint8

import numpy as np
import numpy.typing as npt

from hidet_dist.runtime.native.library import library


def undominated(
    group: npt.NDArray[np.int64], values: npt.NDArray[np.float64], comparisons: int
) -> npt.NDArray[np.int64] | None:
    """Select the lines of ``values`` that no other line of the same group equals or undercuts in every column.

    Parameters
    ----------
    group: array
        The group of each line.
    values: array
        The lines, of shape (lines, columns).
    comparisons: int
        The most pairs of lines to compare.

    Returns
    -------
    The numbers of the lines, by group and then in lexicographic order; None if that takes more comparisons. Of equal
    lines, the first is selected.
    """
    order = np.lexsort((*values.T[::-1], group))
    lines, groups = np.ascontiguousarray(values[order]), np.ascontiguousarray(group[order])
    keep = np.empty(len(order), dtype=np.uint8)
    left: int = library().hidet_dist_undominated(
        *lines.shape,
        groups.ctypes.data_as(POINTER(c_int64)),
        lines.ctypes.data_as(POINTER(c_double)),
        comparisons,
        keep.ctypes.data_as(POINTER(c_uint8)),
    )
    return None if left < 0 else order[keep.astype(bool)]
