"""hidet 0.6.1 cannot make a tensor without dims with NumPy 2: ``hidet.asarray(1.0)`` reads a missing shape.

hidet's LLaMA and Gemma make such tensors while they are built. While :func:`scalar_tensors` is active, scalars are
converted through PyTorch, which has a shape for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hidet
import numpy as np
import torch


@contextmanager
def scalar_tensors() -> Iterator[None]:
    """Let ``hidet.asarray`` take scalars while the block runs."""
    original = hidet.asarray

    def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None) -> hidet.Tensor:
        if isinstance(obj, bool | int | float):
            kind = hidet.ir.data_type(dtype).name if dtype else "float32" if isinstance(obj, float) else "int64"
            return hidet.from_torch(torch.from_numpy(np.asarray(obj, kind))).to(device=device)
        return original(obj, dtype=dtype, device=device)

    hidet.asarray = asarray
    try:
        yield
    finally:
        hidet.asarray = original
