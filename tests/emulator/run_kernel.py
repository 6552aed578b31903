"""Runs a kernel library on arrays, in a process that a fault may end.

``run_kernel.py LIBRARY ARRAYS.npz [CANDIDATE [SYMBOL=SIZE ...]]``

With the number of a socket as its only argument, it is a process that such ones are forked from (``tests/forked.py``).
The arrays are the kernel's arguments, in their order; the file has them again as the kernel left them. Each array ends
where its pages do, and no page around them may be touched: what reads or writes further ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from forked import await_fork
from hidet_dist.runtime.libraries import hidet_runtime

_ALIGNMENT = 16  # bytes: the widest access of a thread
_GUARD = 256 << 20  # bytes on each side: addresses only, so that what is far off meets no other tensor


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy that pages surround which may not be touched; less than 16 bytes lie between its end and them."""
    size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    used = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, _GUARD + used + _GUARD, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (address, address + _GUARD + used):
        no_access = libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_GUARD), 0)
        assert no_access == 0, ctypes.get_errno()
    own = np.frombuffer(memory, array.dtype, array.size, _GUARD + used - size).reshape(array.shape)
    own[...] = array
    return own


def main(library: str, file: str, candidate: str = "0", *sizes: str) -> None:
    runtime = hidet_runtime()
    for size in sizes:
        name, _, value = size.partition("=")
        runtime.set_symbol_value(name.encode(), int(value))
    runtime.use_torch_cuda_stream(False)
    with np.load(file) as data:
        arrays = [guarded(data[name]) for name in data.files]
    kernel = getattr(ctypes.CDLL(library), f"hidet_launch_{candidate}")
    kernel(*(ctypes.c_void_p(array.ctypes.data) for array in arrays))
    error = runtime.hidet_get_last_error()
    if error is not None:
        raise SystemExit(f"the launch failed: {error.decode()}")
    np.savez(file, *arrays)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        hidet_runtime()
        await_fork(int(sys.argv[1]))
    main(*sys.argv[1:])
