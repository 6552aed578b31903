"""Tensors in the stand-in's device memory, which is the host's."""

from __future__ import annotations

import numpy as np


class OnDevice:
    """What has DLPack, but says that it is on a CUDA device."""

    def __init__(self, array: np.ndarray, device: int):
        self.array = array
        self._device = device

    def __dlpack__(self, **arguments: object) -> object:
        return self.array.__dlpack__(**arguments)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device
