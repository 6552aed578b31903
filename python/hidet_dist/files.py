"""Files written whole or not at all, beside and then renamed or exchanged; and read within bounds."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import tempfile
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def read_text(path: Path, most_bytes: int) -> str:
    """The content of a UTF-8 file of at most ``most_bytes``, whose size is checked before it is read.

    Raises
    ------
    OSError
        When the file cannot be read, is no regular file (a FIFO, of which the end may never come), or is larger.
    UnicodeDecodeError
        When it is not UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        if status.st_size > most_bytes:
            raise OSError(f"{path} has {status.st_size} bytes, more than the {most_bytes} that such a file may have")
        return file.read(most_bytes).decode("utf-8")


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(a: Path, b: Path) -> bool:
    """Exchange two files or folders in one step (renameat2(2)); False where that cannot be done, and is not."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    if function is None:
        return False
    first, second = os.fsencode(a), os.fsencode(b)
    return bool(function(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_RENAME_EXCHANGE)) == 0)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
