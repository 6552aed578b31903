"""Groups of ranks along the axes of a mesh."""

from __future__ import annotations

import itertools
import math


def group_ranks(mesh_shape: tuple[int, ...], rank: int, group: int) -> tuple[int, ...]:
    """List the ranks of a rank's group along the mesh axes whose bits are set in ``group``, by group rank."""
    strides = [math.prod(mesh_shape[axis + 1 :]) for axis in range(len(mesh_shape))]
    coordinate = [rank // stride % extent for stride, extent in zip(strides, mesh_shape, strict=True)]
    choices = [range(extent) if group >> axis & 1 else (coordinate[axis],) for axis, extent in enumerate(mesh_shape)]
    return tuple(
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in itertools.product(*choices)
    )
