"""Files that are mapped into memory, watched for changes."""

from __future__ import annotations

import os

from hidet_dist.runtime.native.library import last_error, library


class MappedFile:
    """A file that is mapped to memory, watched for changes; see mapped_file.h.

    Parameters
    ----------
    descriptor: int
        The file's; it stays open until :meth:`forget`.
    address, nbytes: int
        Where it is mapped, until then.
    name: str
        What to call it in errors.
    """

    def __init__(self, descriptor: int, address: int, nbytes: int, name: str):
        self.handle = library().hidet_dist_mapped_file_watch(descriptor, address, nbytes, os.fsencode(name))
        if not self.handle:
            raise ValueError(last_error())

    @property
    def changed(self) -> bool:
        """Whether it is not what it was, or a page of it could not be read, and was taken for zeros."""
        return bool(library().hidet_dist_mapped_file_changed(self.handle))

    def forget(self) -> None:
        """End the watch. No communicator may rely on it any more."""
        library().hidet_dist_mapped_file_forget(self.handle)
