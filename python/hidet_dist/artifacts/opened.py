"""Opening of artifact folders: files are verified against the manifest, and loaded from the descriptors verified.

Each file is opened once, checked against its SHA-256 through that descriptor, and then loaded or mapped through the
same descriptor. A file that may have been written to in between is checked again. If a build replaces the folder
meanwhile, by renaming, either all old files or all new files are read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hidet_dist.artifacts.manifest import NAME, Manifest
from hidet_dist.checks import shown
from hidet_dist.errors import ArtifactError
from hidet_dist.files import open_regular, state

_CHUNK_BYTES = 2**20
_MOST_THREADS = 16  # with more threads, memory bandwidth limits hashing


@dataclass
class VerifiedFile:
    """An open file that a manifest lists; see :meth:`has_digest` and :meth:`is_unchanged`.

    Attributes
    ----------
    descriptor: int
        The file's descriptor, open for reading.
    path: Path
        The file's path, for errors.
    nbytes: int
        Its size by the manifest.
    sha256: str
        The SHA-256 of its content by the manifest, in hex.
    known: tuple of int
        Its state (:func:`hidet_dist.files.state`) before its content was last read.
    """

    descriptor: int
    path: Path
    nbytes: int
    sha256: str
    known: tuple[int, ...]

    def has_digest(self, abandoned: threading.Event | None = None) -> bool:
        """Tell whether its size and content are those in the manifest. Once ``abandoned`` is set, the answer is no."""
        if os.fstat(self.descriptor).st_size != self.nbytes:
            return False
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(self.nbytes, 1))))
        offset = 0
        while got := os.preadv(self.descriptor, [chunk], offset):
            digest.update(chunk[:got])
            offset += got
            if abandoned is not None and abandoned.is_set():
                return False
        return digest.hexdigest() == self.sha256

    def is_unchanged(self) -> bool:
        """Tell whether its content is unchanged.

        If only the time of its last status change differs, the file was renamed or deleted, or its permissions were
        changed, or it was written to and its modification time was reset. The content is read again only in this case.
        """
        while (now := state(os.fstat(self.descriptor))) != self.known:
            if now[:-1] != self.known[:-1] or not self.has_digest():
                return False
            self.known = now
        return True


class OpenedArtifacts:
    """The manifest of a folder, and descriptors of its files. Closing it closes those that were not taken.

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
        self._files: dict[str, VerifiedFile] = {}
        self._checks: dict[str, Future[bool]] = {}
        self._pools: list[ThreadPoolExecutor] = []
        self._abandoned = threading.Event()
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
        """Tell whether the path still leads to the opened folder."""
        try:
            return os.path.samestat(os.stat(self.folder), os.fstat(self._directory))
        except (OSError, ValueError):
            return False

    def start_to_verify(self, names: Sequence[str], threads: int | None = None) -> None:
        """Open files, and start to check them as :meth:`verify`, which waits for that.

        Raises
        ------
        ArtifactError
            For the first file that is missing or unlisted, by name.
        """
        names = [name for name in names if name not in self._checks]
        for name in names:
            self._open(name)
        if not names:
            return
        pool = ThreadPoolExecutor(max(1, min(threads or len(os.sched_getaffinity(0)), len(names), _MOST_THREADS)))
        self._pools.append(pool)
        for name in sorted(names, key=lambda name: -self.manifest.files[name][0]):  # the largest first
            self._checks[name] = pool.submit(self._files[name].has_digest, self._abandoned)

    def verify(self, names: Sequence[str], threads: int | None = None) -> None:
        """Open files, and check every byte against the manifest's SHA-256, in several threads.

        Raises
        ------
        ArtifactError
            For the first file that is missing, unlisted or altered, by name.
        """
        self.start_to_verify(names, threads)
        for name in names:
            if not self._checks[name].result():
                raise ArtifactError(
                    f"{self.folder / name} was altered: its SHA-256 is not the manifest's. Build the artifacts again."
                )

    def take(self, name: str) -> VerifiedFile:
        """Return a verified file, whose descriptor the caller must close. Raises ArtifactError if it was changed."""
        file = self._files[name]
        if not file.is_unchanged():
            raise ArtifactError(f"{file.path} was changed while it was loaded. Load the artifacts again.")
        del self._files[name]
        return file

    def close(self) -> None:
        """Close the folder and the files that were not taken."""
        self._abandoned.set()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)  # no thread reads a descriptor any more
        self._pools.clear()
        for file in self._files.values():
            os.close(file.descriptor)
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
                f"{path} is a link, or lies outside the folder, which is refused. Copy the files into the folder."
            ) from error
        self._files[name] = VerifiedFile(file, path, *self.manifest.files[name], state(os.fstat(file)))


def _open_beneath(directory: int, name: str) -> int:
    """Open a file in a folder, without following links or leaving the folder.

    Raises ``ValueError`` for a name that leaves the folder, and ``OSError``, with ELOOP or ENOTDIR for a link.
    """
    *folders, last = name.split("/")
    if any(part in ("", ".", "..") for part in (*folders, last)):
        raise ValueError(f"{name!r} leads out of the folder")
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
