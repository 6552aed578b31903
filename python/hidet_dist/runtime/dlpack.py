"""Access to tensors of any library through DLPack, in place: address, shape, strides, dtype and device.

The structures are those of dlpack.h, version 1 (https://dmlc.github.io/dlpack/latest/c_api.html), and the protocol is
the array API standard's (``__dlpack__`` and ``__dlpack_device__``). NumPy's reader of DLPack does not know bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

CPU = 1
CUDA = 2
CUDA_HOST = 3
"""Device types of dlpack.h (kDLCPU, kDLCUDA, kDLCUDAHost)."""

DEVICE_NAMES = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cuda_pinned", 10: "rocm", 13: "cuda_managed"}

_MAJOR = 1
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_valid = _function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# Capsules keep the address of their name, so these bytes must not be freed.
_PLAIN, _PLAIN_USED = b"dltensor", b"used_dltensor"
_VERSIONED, _VERSIONED_USED = b"dltensor_versioned", b"used_dltensor_versioned"


class Export:
    """A tensor that its library has exported. The memory lives as long as this object.

    Parameters
    ----------
    x: object
        A tensor with ``__dlpack__``.

    Attributes
    ----------
    address: the address of the first element.
    shape, strides: in elements.
    dtype: hidet's name of the dtype, such as ``bfloat16``.
    itemsize: bytes of an element.
    read_only: whether it must not be written to; None where the library does not say.

    Raises
    ------
    BufferError, TypeError, ValueError
        When the object cannot be exported, or is not a dense tensor of numbers. Errors of its library are passed on.
    """

    def __init__(self, x: Any):
        self._managed: _Managed | _ManagedVersioned | None = None
        try:
            capsule = x.__dlpack__(max_version=(_MAJOR, 0))
        except TypeError:  # a library of before DLPack 1.0
            capsule = x.__dlpack__()
        if _is_valid(capsule, _VERSIONED):
            versioned = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
            if versioned.major != _MAJOR:
                raise BufferError(f"its DLPack version is {versioned.major}, not {_MAJOR}")
            _rename(capsule, _VERSIONED_USED)
            self._managed = versioned
            self.read_only: bool | None = bool(versioned.flags & _READ_ONLY)
        elif _is_valid(capsule, _PLAIN):
            managed = _Managed.from_address(_pointer(capsule, _PLAIN))
            _rename(capsule, _PLAIN_USED)
            self._managed = managed
            self.read_only = None
        else:
            raise BufferError("__dlpack__ did not return a DLPack capsule")
        tensor = self._managed.tensor
        ndim = tensor.ndim
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.shape: tuple[int, ...] = tuple(tensor.shape[:ndim]) if ndim else ()
        self.strides = tuple(tensor.strides[:ndim]) if ndim and tensor.strides else row_major(self.shape)
        self.dtype = _name(tensor.dtype)
        self.itemsize = tensor.dtype.bits // 8

    def __del__(self) -> None:
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def device_of(x: Any) -> tuple[int, int]:
    """Return the DLPack device type and number of a tensor."""
    kind, number = x.__dlpack_device__()
    return int(kind), int(number)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the strides, in elements, of a contiguous tensor in row-major order."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _name(dtype: _DataType) -> str:
    if dtype.lanes != 1 or dtype.bits % 8:
        raise ValueError(f"its elements are {dtype.lanes} times {dtype.bits} bits")
    if dtype.code == _BOOL:
        return "bool"
    if dtype.code not in _KINDS:
        raise ValueError(f"its dtype has the unknown DLPack code {dtype.code}")
    return f"{_KINDS[dtype.code]}{dtype.bits}"
