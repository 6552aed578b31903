"""Writing files so that nothing half-written is ever found: beside, then renamed or exchanged."""

from __future__ import annotations

import ctypes
import hashlib
import os
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
