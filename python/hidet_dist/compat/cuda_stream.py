"""The CUDA stream that hidet 0.6.1 launches kernels on, for native code."""

from __future__ import annotations

import ctypes


def current_stream_function() -> int:
    """The address of the C function that returns the calling thread's current stream; kernels call the same one."""
    from hidet.ffi import ffi

    runtime = ctypes.CDLL(ffi.library_paths["hidet_runtime"])
    address = ctypes.cast(runtime.get_cuda_stream, ctypes.c_void_p).value
    assert address is not None
    return address
