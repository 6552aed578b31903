"""An artifact folder opened for loading: files that are what the manifest says, and stay so while they are used.

Every file is opened once, checked against its SHA-256 through that descriptor, and then loaded or mapped through the
same one. A folder that is replaced meanwhile (as builds do, by renaming) is therefore seen as it was or as it is.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from hidet_dist.artifacts.manifest import NAME, Manifest
from hidet_dist.checks import shown
from hidet_dist.errors import ArtifactError
from hidet_dist.files import open_regular

_CHUNK_BYTES = 2**20
_MOST_THREADS = 16  # beyond that memory, not hashing, is what limits


class OpenedArtifacts:
    """The manifest of a folder, and descriptors of its files; closes those that nobody took.

    Parameters
    ----------
    folder: Path
        The artifact folder.

    Raises
    ------
    ArtifactError
        When it holds no artifacts, or its manifest was altered or is of another format.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        while True:
            try:
                self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise ArtifactError(
                    f"{shown(str(folder))} holds no artifacts: {reason}. Build them with "
                    "hidet.distributed.auto_parallel."
                ) from error
            try:
                self.manifest = Manifest.load(folder, self._directory)
                return
            except ArtifactError:
                replaced = not self.is_current()
                self.close()
                if not replaced:
                    raise
            except BaseException:
                self.close()
                raise

    def is_current(self) -> bool:
        """Whether the folder is still the one that was opened."""
        try:
            return os.path.samestat(os.stat(self.folder), os.fstat(self._directory))
        except (OSError, ValueError):
            return False

    def verify(self, names: Sequence[str], threads: int | None = None) -> None:
        """Open files and check every byte against the manifest's SHA-256, in several threads.

        Raises
        ------
        ArtifactError
            For the first file that is missing, unlisted or altered, by name.
        """
        for name in names:
            self._open(name)
        workers = max(1, min(threads or len(os.sched_getaffinity(0)), len(names), _MOST_THREADS))
        largest_first = sorted(names, key=lambda name: -self.manifest.files[name][0])
        with ThreadPoolExecutor(workers) as pool:
            same = dict(zip(largest_first, pool.map(self._is_same, largest_first), strict=True))
        for name in names:
            if not same[name]:
                raise ArtifactError(
                    f"{self.folder / name} was altered: its SHA-256 is not the manifest's. Build the artifacts again."
                )

    def take(self, name: str) -> int:
        """The descriptor of a verified file, now the caller's to close. Raises ArtifactError where it was changed."""
        file, before = self._files[name]
        now = os.fstat(file)
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ArtifactError(f"{self.folder / name} was changed while it was loaded. Load the artifacts again.")
        del self._files[name]
        return file

    def close(self) -> None:
        """Close the folder and the files that nobody took."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def __enter__(self) -> OpenedArtifacts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str) -> None:
        path = self.folder / name
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.folder / NAME} does not list {name}. Build the artifacts again.")
        try:
            file = _open_beneath(self._directory, name)
        except FileNotFoundError as error:
            raise ArtifactError(f"{path} is missing. Build the artifacts again, or copy the folder whole.") from error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error
            raise ArtifactError(
                f"{path} is not in the folder: links are not followed, nor names that lead elsewhere. Copy the files."
            ) from error
        status = os.fstat(file)
        self._files[name] = file, status

    def _is_same(self, name: str) -> bool:
        size, expected = self.manifest.files[name]
        file, status = self._files[name]
        if status.st_size != size:
            return False
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(size, 1))))
        offset = 0
        while got := os.preadv(file, [chunk], offset):
            digest.update(chunk[:got])
            offset += got
        return digest.hexdigest() == expected


def _open_beneath(directory: int, name: str) -> int:
    """Open a file that lies in a folder, and nothing that a name or a link leads to elsewhere.

    Raises ``ValueError`` or ``OSError``, with ELOOP or ENOTDIR for a link, where it does not.
    """
    *folders, last = name.split("/")
    if any(part in ("", ".", "..") for part in (*folders, last)):
        raise ValueError(f"{name!r} leads elsewhere")
    here = directory
    try:
        for part in folders:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            if here != directory:
                os.close(here)
            here = inner
        return open_regular(last, here, os.O_NOFOLLOW)
    finally:
        if here != directory:
            os.close(here)
