"""Protection of the connections between ranks in forked child processes.

``fork`` copies memory and file descriptors, but no threads. A forked child therefore has the connections, shared memory
and locks of its parent, without the threads that serve them. A connection belongs to the process that made it. A child
abandons it: the child closes its copies of descriptors, sends nothing, and writes nothing to shared memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from hidet_dist.errors import ForkError


class Owner:
    """The process that made an object."""

    def __init__(self) -> None:
        self.process = os.getpid()

    @property
    def is_this_process(self) -> bool:
        """True if the owner is the calling process, and not its parent."""
        return os.getpid() == self.process

    def check(self, what: str, remedy: str) -> None:
        """Raise ``ForkError`` in any other process. ``what`` names the object, ``remedy`` says what to do instead."""
        if not self.is_this_process:
            raise ForkError(
                f"{what} belongs to process {self.process}; this is process {os.getpid()}, forked from it. A fork "
                f"copies neither the connections to other ranks nor the threads of kernels: {remedy}"
            )


def keep_forever(thing: Any) -> None:
    """Never run the destructor of an object, not even when the interpreter ends.

    It serves for objects whose destructors wait for threads, which do not exist in a forked child.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
