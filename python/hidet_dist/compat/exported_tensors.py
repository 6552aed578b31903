"""hidet 0.6.1 crashes the process at its end where arrays of NumPy or torch share the memory of its tensors.

Such an array gives its memory back by calling a function of hidet's. When the interpreter ends, hidet's list of these
functions may be deleted before the last of the arrays, which then call freed memory. The list is kept for the whole
process here.
"""

from __future__ import annotations

import ctypes
import functools

from hidet.graph.impl.dlpack import DLManagedTensorContext


@functools.cache
def install() -> None:
    """Keep hidet's list of exported tensors to the very end of the process, from now on."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(DLManagedTensorContext.allocated))
