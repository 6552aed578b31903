"""Arrays in .npz files: archives of one file an array, each with a header of its dtype and its shape."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.files import open_regular, writing
from hidet_dist.limits import MOST_DIMS

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_SUFFIX = ".npy"
_MOST_TEXT = 400  # characters of an error of NumPy


@dataclass(frozen=True)
class NpyHeader:
    """The dtype and the shape of an array in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]


class NpzArrays:
    """The arrays of an open .npz file. Nothing in it is unpickled, and headers are believed only where they fit.

    Raises ValueError for an archive with two arrays of one name.
    """

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(_SUFFIX)
            if name in self._entries:
                raise ValueError(f"there are two arrays {name!r} in it")
            self._entries[name] = info

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._entries)

    def header(self, name: str) -> NpyHeader:
        """Read the header of an array. Raises ValueError for one that does not fit the bytes behind it."""
        info = self._entries[name]
        with self._archive.open(info) as entry:
            version = np.lib.format.read_magic(entry)
            if version not in _HEADERS:
                raise ValueError(f"the array {name!r} has a header of version {version}")
            shape, _, dtype = _HEADERS[version](entry)
            if dtype.hasobject:
                raise ValueError(f"the array {name!r} has Python objects, which are not loaded")
            if len(shape) > MOST_DIMS:
                raise ValueError(f"the array {name!r} has {len(shape)} dims; a tensor has at most {MOST_DIMS}")
            needed, held = math.prod(shape) * dtype.itemsize, info.file_size - entry.tell()
            if needed != held or any(size < 0 for size in shape):
                raise ValueError(f"the array {name!r} of the shape {list(shape)} has {held} bytes, not {needed}")
            return NpyHeader(dtype, shape)

    def read(self, name: str) -> np.ndarray:
        """Read an array. Raises ValueError, as :meth:`header` does, before memory is allocated for it."""
        self.header(name)
        with self._archive.open(self._entries[name]) as entry:
            return np.asarray(np.lib.format.read_array(entry, allow_pickle=False))


@contextmanager
def opened_arrays(path: Path) -> Iterator[NpzArrays]:
    """Open a .npz file. Raises ConfigError where it, or an array that the block reads, cannot be read."""
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            yield NpzArrays(archive)
    except HidetDistError:
        raise
    except _UNREADABLE as error:
        text = " ".join(str(error).split())  # NumPy's has the whole header
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
        raise ConfigError(f"Cannot read arrays from {path}: {text}. Write it with numpy.savez.") from error


_UNREADABLE = (
    *(OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error),
    *(NotImplementedError, RuntimeError),  # zipfile's: a kind of compression that it lacks, and encryption
    *(SyntaxError, tokenize.TokenError, TypeError, MemoryError),  # NumPy's, of headers that are no literals
)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a .npz file, atomically, under any names."""
    # numpy.savez has parameters of its own, such as "file".
    with writing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}{_SUFFIX}"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
