"""Forked processes: a child owns nothing of what its parent shares with other ranks, and must leave all of it alone.

``fork`` copies memory and file descriptors, but no threads. A child made by it therefore sees the connections, shared
memory and locks of its parent, without the threads that serve them. What a rank shares with others belongs to the
process that made it; in a child it is abandoned: the child closes its copies of descriptors, sends nothing, and writes
nothing to shared memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from hidet_dist.errors import ForkError


class Owner:
    """The process that made something."""

    def __init__(self) -> None:
        self.process = os.getpid()

    @property
    def is_this_process(self) -> bool:
        """Whether it is the calling process, and not its parent."""
        return os.getpid() == self.process

    def check(self, what: str, remedy: str) -> None:
        """Raise ``ForkError``, which names the thing and says what to do instead, in any other process."""
        if not self.is_this_process:
            raise ForkError(
                f"{what} belongs to process {self.process}; this is process {os.getpid()}, forked from it. A fork "
                f"copies neither the connections to other ranks nor the threads of kernels: {remedy}"
            )


def keep_forever(thing: Any) -> None:
    """Never run the destructor of an object, not even when the interpreter ends.

    For objects whose destructors wait for threads that a child made by ``fork`` does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
