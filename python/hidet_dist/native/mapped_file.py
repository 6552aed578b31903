"""Watches over files that are mapped into memory."""

from __future__ import annotations

import os
from enum import IntEnum

from hidet_dist.native.library import last_error, library


class Change(IntEnum):
    """The kinds of changes of a mapped file, with the values of mapped_file.h."""

    NONE = 0
    CONTENT = 1
    STATUS = 2


class MappedFile:
    """A watch over a file that is mapped into memory; see mapped_file.h.

    Parameters
    ----------
    descriptor: int
        The file's descriptor, which must stay open until :meth:`forget`.
    address, nbytes: int
        The mapped memory, which must stay mapped until then.
    name: str
        The file's name in error messages.
    """

    def __init__(self, descriptor: int, address: int, nbytes: int, name: str):
        self.handle = library().hidet_dist_mapped_file_watch(descriptor, address, nbytes, os.fsencode(name))
        if not self.handle:
            raise ValueError(last_error())

    @property
    def change(self) -> Change:
        """``CONTENT`` if the content has changed, or if a page could not be read and was replaced by zeros.

        ``STATUS`` if only the file's status is known to have changed, such as by renaming it. The content may have
        changed too, if its modification time was reset after writing.
        """
        return Change(library().hidet_dist_mapped_file_change(self.handle))

    def renew(self) -> None:
        """Accept the file's present status as the reference. The caller must then check the content."""
        library().hidet_dist_mapped_file_renew(self.handle)

    def condemn(self) -> None:
        """Treat the file's content as changed from now on."""
        library().hidet_dist_mapped_file_condemn(self.handle)

    def forget(self) -> None:
        """End the watch. No communicator may rely on it any more."""
        library().hidet_dist_mapped_file_forget(self.handle)
