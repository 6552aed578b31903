"""Device memory that kernels request from hidet's runtime, as matrix products that split k do.

hidet's runtime calls functions that Python registers. hidet registers such functions when it is imported. A process
that only serves does not import hidet; it registers the functions of this module.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import CFUNCTYPE, c_int32, c_uint64

from hidet_dist.runtime.cuda.driver import DeviceError, Driver
from hidet_dist.runtime.libraries import hidet_runtime

_Allocate = CFUNCTYPE(c_uint64, c_uint64)
_Free = CFUNCTYPE(None, c_uint64)
_Clear = CFUNCTYPE(None, c_uint64, c_int32, c_uint64)


@functools.cache
def provide_storage(driver: Driver) -> tuple[object, ...]:
    """Register functions by which hidet's runtime allocates device memory, unless hidet did. Once per process."""
    if "hidet" in sys.modules:
        return ()
    runtime = hidet_runtime()

    @_Allocate
    def allocate(nbytes: int) -> int:
        try:
            return driver.allocate(nbytes)
        except DeviceError as error:  # the runtime does not check for 0: the kernel fails, and this message says why
            runtime.hidet_set_last_error(str(error).encode())
            return 0

    @_Free
    def free(address: int) -> None:
        if address:
            driver.free(address)

    @_Clear
    def clear(address: int, value: int, nbytes: int) -> None:
        driver.clear(address, value, nbytes, runtime.get_cuda_stream() or 0)

    functions = {b"allocate_cuda_storage": allocate, b"free_cuda_storage": free, b"cuda_memset": clear}
    for name, function in functions.items():
        runtime.register_callback(name, ctypes.cast(function, ctypes.c_void_p))
    return tuple(functions.values())  # kept alive by the cache: the runtime has their addresses
