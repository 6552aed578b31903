"""Marks of weights that ranks hold in a lower precision, and the bytes of shards."""

from __future__ import annotations

from collections.abc import Sequence

from hidet.graph import Tensor

from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.weights.named import copy_of

_STORAGE = "_hidet_dist_storage"
_KNOWN = "_hidet_dist_stored_copies"


def stored_as(weight: Tensor, storage: WeightStorage, beside: bool = False) -> Tensor:
    """Make a weight that ranks hold in ``storage`` from another; the same one each time, so that graphs share it.

    One that is held ``beside`` the other has a label of its own: that of the other with ``@`` and the precision.
    """
    known: dict[tuple[WeightStorage, bool], Tensor] = weight.__dict__.setdefault(_KNOWN, {})
    if (storage, beside) not in known:
        known[storage, beside] = copy_of(weight, f"@{storage.precision}" if beside else "")
        setattr(known[storage, beside], _STORAGE, storage)
    return known[storage, beside]


def storage_of(tensor: Tensor) -> WeightStorage | None:
    """Return how ranks hold a weight; None for one in its own dtype, and for any other tensor."""
    storage: WeightStorage | None = getattr(tensor, _STORAGE, None)
    return storage


def shard_nbytes(
    tensor: Tensor,
    shape: Sequence[int],
    spec: TensorShardSpec,
    mesh: DeviceMesh,
    coordinate: Sequence[int] | None = None,
) -> int:
    """Compute the bytes that a shard of a tensor of ``shape`` (elements) takes. Raises SpecError for a misfit."""
    storage = storage_of(tensor)
    if storage is None:
        return spec.local_nbytes(shape, int(tensor.dtype.nbytes), mesh, coordinate)
    return storage.nbytes(spec.local_shape(shape, mesh, coordinate))
