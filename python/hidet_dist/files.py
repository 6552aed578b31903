"""Atomic writing of files, with the umask's permissions, and reading of regular files up to a size limit."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hidet_dist.checks import shown
from hidet_dist.limits import MOST_NESTED


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` atomically when the block succeeds.

    It has the permissions that the process's umask leaves, as any new file. Raises OSError when that is not possible,
    or when ``path`` is something other than a file, such as a device, in whose place a file must not come.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    name = _beside(path)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def folder_beside(path: Path) -> Path:
    """Make a folder of a new hidden name beside ``path``, with the permissions that the process's umask leaves."""
    folder = _beside(path)
    folder.mkdir()
    return folder


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, atomically."""
    with writing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, atomically."""
    write_bytes(path, text.encode("utf-8"))


def open_regular(path: str | Path, directory: int | None = None, flags: int = 0) -> int:
    """Open a regular file for reading, and return its descriptor. Pipes and devices are refused without waiting.

    Parameters
    ----------
    path: str or Path
        The file.
    directory: int, optional
        The descriptor of the folder that the path is relative to.
    flags: int
        Further flags of open(2), such as ``os.O_NOFOLLOW``.

    Raises
    ------
    OSError
        When it cannot be opened, or is anything but a regular file.
    ValueError
        When the path is none, such as one with a null byte.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=directory)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def read_text(path: str | Path, most_bytes: int, directory: int | None = None, flags: int = 0) -> str:
    """Read the text of a regular UTF-8 file. A file of more than ``most_bytes`` is refused before it is read.

    Raises
    ------
    OSError
        As :func:`open_regular`, or when it cannot be read.
    ValueError
        When it is larger, or no UTF-8, or its path is none.
    """
    with os.fdopen(open_regular(path, directory, flags), "rb") as file:
        return read_up_to(file, most_bytes).decode("utf-8")


def read_up_to(file: BinaryIO, most_bytes: int) -> bytes:
    """Read an open file. One of more than ``most_bytes`` is refused with ValueError before it is read."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if size > most_bytes or len(data) > most_bytes:
        raise ValueError(f"it has {max(size, len(data))} bytes, and at most {most_bytes} are read")
    return data


# A string, or what is left of the text after an open one. It matches at once wherever it begins, so that no text takes
# longer than its length.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # to 1 and -1, as signed bytes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_BETWEEN = ",:[{"  # at least one of them is before each value but the first


def parse_json(text: str | bytes, most_values: int | None = None, unique: bool = False) -> Any:
    """Parse a JSON text.

    Parameters
    ----------
    text: str or bytes
        The text.
    most_values: int, optional
        The most values that it may have, with the names in its objects: each takes up to 64 bytes, an empty list
        in a text of three.
    unique: bool
        Whether to refuse an object with a name twice. Python's parser takes the last of its values.

    Raises
    ------
    ValueError
        When it is none, has more values or a name twice, or is nested more deeply than
        :data:`hidet_dist.limits.MOST_NESTED`: Python's parser calls itself for each level, and ends the process where
        the thread's stack ends.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if most_values is not None and sum(map(text.count, _BETWEEN)) >= most_values:
        outside = _STRING.sub("", text)
        if sum(map(outside.count, _BETWEEN)) >= most_values:
            raise ValueError(f"it has more than {most_values} values")
    if text.count("[") + text.count("{") > MOST_NESTED and _depth(text) > MOST_NESTED:
        raise ValueError(f"it is nested more than {MOST_NESTED} levels deep")
    return json.loads(text, object_pairs_hook=_unique if unique else None)  # noqa: TID251 - bounded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its names and values. Raises ValueError for a name that it has twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the name {shown(twice)} twice")
    return made


def _depth(text: str) -> int:
    """Return the most brackets of a JSON text that are open at once, outside strings."""
    outside = _STRING.sub("", text).encode("utf-8", "surrogatepass")
    steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
    return max(itertools.accumulate(steps), default=0)


def state(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change with a file's content; the last one changes with any of the file's metadata, too.

    The time of the last modification may be set by anyone who may write to the file; that of the last status change
    may not, but it changes also when the file is renamed, deleted, or given other permissions.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def json_text(value: Any, levels: int, depth: int = 0) -> str:
    """Write JSON with an entry a line in the first ``levels`` levels of lists and objects, whose keys are strings.

    Deeper values are on one line each. Python's encoder with an indentation, which is not its fast one, takes ten times
    as long.
    """
    if depth == levels or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {json_text(entry, levels, depth + 1)}" for key, entry in value.items()]
        begin, end = "{}"
    else:
        entries = [json_text(entry, levels, depth + 1) for entry in value]
        begin, end = "[]"
    space = "\n" + " " * depth
    return f"{begin}{space} {f',{space} '.join(entries)}{space}{end}"


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(a: Path, b: Path) -> bool:
    """Exchange two files or folders atomically (renameat2(2)); return False if the system cannot."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    if function is None:
        return False
    first, second = os.fsencode(a), os.fsencode(b)
    return bool(function(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_RENAME_EXCHANGE)) == 0)


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
