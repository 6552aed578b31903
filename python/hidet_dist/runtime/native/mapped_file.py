"""Files that are mapped into memory, watched for changes."""

from __future__ import annotations

import os
from enum import IntEnum

from hidet_dist.runtime.native.library import last_error, library


class Change(IntEnum):
    """The change of a mapped file; the values are those of mapped_file.h."""

    NONE = 0
    CONTENT = 1
    STATUS = 2


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
    def change(self) -> Change:
        """``CONTENT`` if the content has changed, or a page could not be read and was replaced by zeros.

        ``STATUS`` where it may be what it was: its status was changed, such as by renaming it, or by putting back the
        modification time after writing to it.
        """
        return Change(library().hidet_dist_mapped_file_change(self.handle))

    def renew(self) -> None:
        """Accept the file's present status as the known one. The caller must check the content after that."""
        library().hidet_dist_mapped_file_renew(self.handle)

    def condemn(self) -> None:
        """Treat the file's content as changed from now on."""
        library().hidet_dist_mapped_file_condemn(self.handle)

    def forget(self) -> None:
        """End the watch. No communicator may rely on it any more."""
        library().hidet_dist_mapped_file_forget(self.handle)
