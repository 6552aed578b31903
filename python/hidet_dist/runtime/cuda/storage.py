"""Device memory that kernels ask hidet's runtime for, as matrix products that split k do.

hidet's runtime asks functions that Python registers. hidet registers its own when it is imported; a process that only
serves does not import it, and gets these.
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
    """Let hidet's runtime take device memory from the driver, unless hidet gives it. Once a process."""
    if "hidet" in sys.modules:
        return ()
    runtime = hidet_runtime()

    @_Allocate
    def allocate(nbytes: int) -> int:
        try:
            return driver.allocate(nbytes)
        except DeviceError as error:  # the runtime takes 0 for an address: the kernel fails, and this says why
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
    return tuple(functions.values())  # kept: the runtime has their addresses
