"""Access to users' tensors: NumPy arrays, torch and hidet tensors, and others that support DLPack.

This module imports neither torch nor hidet for reading: a torch tensor can only come from a program that has imported
torch.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hidet_dist.errors import InputError
from hidet_dist.runtime import dlpack

NUMPY, TORCH, HIDET = "numpy", "torch", "hidet"


@dataclass(frozen=True)
class TensorBuffer:
    """A tensor in memory.

    Attributes
    ----------
    address: the address of the first element.
    shape: in elements.
    dtype: hidet's name of the dtype, such as ``bfloat16``.
    nbytes: the bytes of all elements, without gaps.
    contiguous: whether the elements are in row-major order without gaps, each at a multiple of its size.
    device: the DLPack device type and number.
    read_only: whether it must not be written to; None where that is unknown.
    owner: an object that keeps the memory alive.
    strides: in bytes; empty for a contiguous tensor.
    negated: whether its numbers are the negatives of those in memory, as in some views of torch. Such a tensor counts
        as not contiguous.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    contiguous: bool
    device: tuple[int, int]
    read_only: bool | None
    owner: Any
    strides: tuple[int, ...] = ()
    negated: bool = False

    def packed(self) -> TensorBuffer:
        """Return the tensor if it is contiguous in host memory, or else a copy that is."""
        if self.contiguous:
            return self
        if self.negated:
            return buffer_of(self.owner[0].detach().resolve_neg().contiguous(), "A copy")
        itemsize = self.nbytes // math.prod(self.shape)
        low = sum(min(0, (n - 1) * step) for n, step in zip(self.shape, self.strides, strict=True))
        high = sum(max(0, (n - 1) * step) for n, step in zip(self.shape, self.strides, strict=True)) + itemsize
        memory = (ctypes.c_char * (high - low)).from_address(self.address + low)
        view = np.ndarray(self.shape, np.dtype((np.void, itemsize)), memoryview(memory), -low, self.strides)
        copy = view.copy(order="C")
        return TensorBuffer(
            copy.ctypes.data, self.shape, self.dtype, self.nbytes, True, (dlpack.CPU, 0), False, (copy, self.owner)
        )

    def overlaps(self, other: TensorBuffer) -> bool:
        """Tell whether two contiguous tensors share bytes."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


def kind_of(x: Any) -> str:
    """Return the library of a tensor: ``torch``, ``hidet``, or ``numpy`` for all others."""
    for name in (TORCH, HIDET):
        tensor_type = getattr(sys.modules.get(name), "Tensor", None)
        if tensor_type is not None and isinstance(x, tensor_type):
            return name
    return NUMPY


def buffer_of(x: Any, what: str, to_write: bool = False) -> TensorBuffer:
    """Describe the memory of a tensor, without copying it.

    Parameters
    ----------
    x: object
        A NumPy array, or any tensor with ``__dlpack__``.
    what: str
        Its name in error messages, such as ``Input 0``.
    to_write: bool
        Whether it will be written to.

    Raises
    ------
    InputError
        When it cannot be read in place.
    """
    if isinstance(x, np.ndarray):
        flags = x.flags
        contiguous = flags.c_contiguous and flags.aligned
        return TensorBuffer(
            x.ctypes.data,
            x.shape,
            _numpy_name(x.dtype),
            x.nbytes,
            contiguous,
            (dlpack.CPU, 0),
            not flags.writeable,
            x,
            () if contiguous else x.strides,
        )
    kind = kind_of(x)
    negated = False
    try:
        device = dlpack.device_of(x)
        if kind == TORCH:
            _check_torch(x, what, to_write)
            negated = x.is_neg()
            export = dlpack.Export(x.detach())
        else:
            export = dlpack.Export(x)
    except InputError:
        raise
    except Exception as error:  # whatever the library raises
        raise InputError(
            f"{what} is a {type(x).__name__} that cannot be read through DLPack ({error}). Give a NumPy array, a torch "
            "or a hidet tensor."
        ) from error
    shape = export.shape
    nbytes = math.prod(shape) * export.itemsize
    if nbytes > 0 and export.address == 0:
        raise InputError(
            f"{what} is a {type(x).__name__} without memory, such as a fake tensor or one whose storage was freed. "
            "Give a tensor with data."
        )
    expected = dlpack.row_major(shape)
    contiguous = export.address % export.itemsize == 0 and (
        export.strides == expected
        or 0 in shape
        or all(n == 1 or a == b for n, a, b in zip(shape, export.strides, expected, strict=True))
    )
    return TensorBuffer(
        export.address,
        shape,
        export.dtype,
        nbytes,
        contiguous and not negated,
        device,
        # Neither torch nor hidet has read-only tensors.
        export.read_only if kind == NUMPY else False,
        (x, export),
        () if contiguous and not negated else tuple(step * export.itemsize for step in export.strides),
        negated,
    )


def _check_torch(x: Any, what: str, to_write: bool) -> None:
    """Raise InputError where the numbers of a torch tensor differ from those in its memory, and copying cannot help."""
    if to_write and x.requires_grad:
        raise InputError(f"{what} requires a gradient, so it cannot be written to; give x.detach().")
    if x.is_conj():
        raise InputError(f"{what} is a conjugate view, which cannot be read in place; give x.resolve_conj().")
    if x.is_neg() and (to_write or x.device.type != "cpu"):
        raise InputError(f"{what} is a negative view, which cannot be used in place; give x.resolve_neg().")
    if x.layout is not _strided():
        return  # its export will be refused
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    nbytes = (x.storage_offset() + last + 1) * x.element_size() if last >= 0 else 0
    if x.untyped_storage().nbytes() < nbytes:
        raise InputError(
            f"{what} needs {nbytes} bytes of its storage, which has only {x.untyped_storage().nbytes()}: the storage "
            "was resized. Give a tensor with data."
        )


@functools.cache
def _strided() -> Any:
    import torch

    return torch.strided


@functools.cache
def _numpy_name(dtype: np.dtype) -> str:
    """Return a dtype's name; for a byte order unlike this machine's, a name that no program accepts."""
    return dtype.name if dtype.isnative else dtype.str


def has_dtype(kind: str, dtype: str) -> bool:
    """Tell whether a library (``numpy``, ``torch`` or ``hidet``) has a dtype, by hidet's name."""
    if kind == TORCH:
        import torch

        return isinstance(getattr(torch, dtype, None), torch.dtype)
    if kind == HIDET:
        return True
    try:
        return np.dtype(dtype).isbuiltin == 1  # excludes dtypes that a package adds, which another rank may lack
    except TypeError:
        return False


def host_tensor(kind: str, shape: Sequence[int], dtype: str, memory: np.ndarray | None = None) -> Any:
    """Make an uninitialized tensor of a library (``numpy``, ``torch`` or ``hidet``) in host memory.

    If given, ``memory``, uint8[bytes], becomes the tensor's memory, which keeps it alive; not possible for hidet.
    """
    if kind == TORCH:
        import torch

        torch_dtype = getattr(torch, dtype)
        if memory is None:
            return torch.empty(tuple(shape), dtype=torch_dtype)
        return torch.from_numpy(memory).view(torch_dtype).view(tuple(shape))
    if kind == HIDET:
        import hidet

        return hidet.empty(list(shape), dtype, device="cpu")
    if memory is None:
        return np.empty(tuple(shape), np.dtype(dtype))
    return memory.view(np.dtype(dtype)).reshape(tuple(shape))
