"""Before each call, the ranks agree to make it: that each has inputs that fit, and all of the same sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hidet_dist.errors import InputError
from hidet_dist.runtime import native
from hidet_dist.runtime.communicator import Communicator

_MOST_REASON_BYTES = 512


def agree(communicator: Communicator, sizes: Mapping[str, int]) -> None:
    """Return if all ranks are about to make a call, with these sizes of symbolic dims.

    One exchange of a few bytes. The communicator must be bound to this thread.

    Raises
    ------
    InputError
        On all ranks alike: where one has refused the call, or has other sizes.
    CommunicationError
        Where a rank does not come.
    """
    everyone = _exchange(communicator, np.array([0, *sizes.values()], np.int32))
    own = everyone[communicator.rank]
    if (everyone == own).all():
        return
    refused = np.flatnonzero(everyone[:, 0])
    if refused.size:
        reasons = _exchange_reasons(communicator, "")
        raise InputError(f"Rank {refused[0]} refused this call: {reasons[refused[0]]}")
    for rank, others in enumerate(everyone):
        for name, size, other in zip(sizes, own[1:], others[1:], strict=True):
            if size != other:
                raise InputError(
                    f"The symbolic dim {name} must be the same on all ranks; it is {size} on rank "
                    f"{communicator.rank} but {other} on rank {rank}."
                )


def refuse(communicator: Communicator, symbols: Sequence[str], error: InputError) -> None:
    """Tell the other ranks that this one cannot make the call; ``symbols`` are the keys of ``agree``'s sizes.

    Returns once all have come to it. Raises ``CommunicationError`` where one does not come.
    """
    _exchange(communicator, np.array([1, *[0] * len(symbols)], np.int32))
    _exchange_reasons(communicator, str(error))


def _exchange_reasons(communicator: Communicator, own: str) -> list[str]:
    room = np.zeros(_MOST_REASON_BYTES, np.uint8)
    text = own.encode()[:_MOST_REASON_BYTES]
    room[: len(text)] = np.frombuffer(text, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in _exchange(communicator, room)]


def _exchange(communicator: Communicator, own: np.ndarray) -> np.ndarray:
    """All ranks' arrays, a row each."""
    everyone = np.empty((communicator.world_size, own.size), own.dtype)
    whole_mesh = (1 << len(communicator.mesh_shape)) - 1
    dtype = native.dtype_code(own.dtype.name)
    native.all_gather(own.ctypes.data, everyone.ctypes.data, own.size, dtype, whole_mesh)
    communicator.check()
    return everyone
