"""The memory that an operator holds while it runs, beside its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hidet.graph import Operator, Tensor

from hidet_dist.spec import DeviceMesh, OpShardSpec
from hidet_dist.traits import traits_of


def scratch_nbytes(
    op: Operator,
    spec: OpShardSpec,
    shape_of: Callable[[Tensor], Sequence[int]],
    mesh: DeviceMesh,
    coordinate: Sequence[int] | None = None,
) -> int:
    """Count the bytes that the local operator holds while it runs; ``shape_of`` returns that of a whole one.

    With a dispatch, these include the tokens of all ranks of the group, for which there is room whatever ranks want,
    and a byte for each rank and token, which says whether the rank wants it.

    ``coordinate`` is that of the device; by default, all shards are the largest ones. Raises SpecError for a spec that
    does not fit.
    """
    count, dispatch = traits_of(op).scratch_elements, spec.dispatch
    if count is None and dispatch is None:
        return 0
    local = spec.local_shapes(map(shape_of, op.inputs), mesh, coordinate)
    nbytes = 0 if count is None else count(op, local) * int(op.outputs[0].dtype.nbytes)
    if dispatch is not None:
        gathered = sum(math.prod(local[number]) * int(op.inputs[number].dtype.nbytes) for number in dispatch.inputs)
        wanted = mesh.group_size(dispatch.mesh_axes) * local[dispatch.inputs[0]][0]
        nbytes += gathered + wanted
    return nbytes
