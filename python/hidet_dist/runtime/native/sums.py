"""Least sums of tables, computed by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64

import numpy as np
import numpy.typing as npt

from hidet_dist.runtime.native.library import library

Table = npt.NDArray[np.float64]


def lower_by_sums(tables: Sequence[Table], shape: Sequence[int], kept: Sequence[int], result: Table) -> None:
    """Lower the entries of ``result`` to the least sums of tables over all dims but ``kept``.

    Parameters
    ----------
    tables: sequence of array
        Tables with as many dims as ``shape``, each of the size in ``shape`` or of size 1. No entry is NaN.
    kept: sequence of int
        The dims of the result, in ascending order.
    result: array
        The table to lower, of the sizes of the dims ``kept``.

    Raises
    ------
    MemoryError
        When memory runs out.
    """
    dims, itemsize = len(shape), result.itemsize
    strides = [
        0 if size == 1 else stride // itemsize
        for table in tables
        for size, stride in zip(table.shape, table.strides, strict=True)
    ]
    lowered = [0] * dims
    for dim, stride in zip(kept, result.strides, strict=True):
        lowered[dim] = stride // itemsize
    status = library().hidet_dist_least_sums(
        dims,
        (c_int64 * max(1, dims))(*shape),
        len(tables),
        (c_int64 * max(1, len(tables)))(*(table.ctypes.data for table in tables)),
        (c_int64 * max(1, len(strides)))(*strides),
        (c_int64 * max(1, dims))(*lowered),
        ctypes.cast(result.ctypes.data, POINTER(c_double)),
    )
    if status:
        raise MemoryError("sums of tables need more memory than there is")
