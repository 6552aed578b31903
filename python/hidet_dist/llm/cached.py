"""The cache of models that were built, by the content of their checkpoints and the options that they were built with.

A folder of the cache is named by a digest of everything that decides what is in it. So what is found is what would be
built; nothing is ever replaced, and a folder may be removed at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.files import folder_beside, parse_json, read_text, sha256, state, write_text
from hidet_dist.limits import MOST_CONFIGURATION_BYTES
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.stored import StoredModel
from hidet_dist.runtime.candidates import user_cache
from hidet_dist.runtime.processor import best_level

_SOURCES = (".py", ".h")
_MODELS = "models"
_DIGESTS = "digests.json"
_READ = (".json", ".safetensors", ".jinja")
"""The endings of the files of a transformers folder that decide what is built."""


def found_or_built(path: Path, name: str, options: LoadOptions, cache: Path | None = None) -> Path:
    """Return the folder of a model in the cache, which is built if it is not there.

    Parameters
    ----------
    path: Path
        The checkpoint: a transformers folder or a GGUF file.
    name: str
        The name of the model.
    options: LoadOptions
        The options, checked.
    cache: Path, optional
        The cache; by default ``$XDG_CACHE_HOME/hidet_dist/models``, or ``~/.cache/hidet_dist/models``.

    Raises
    ------
    ConfigError
        When there is no such checkpoint, or the cache cannot be written.
    HidetDistError
        As :func:`hidet_dist.llm.building.build`.
    """
    cache = user_cache() / _MODELS if cache is None else cache
    folder = cache / _key(path, name, options, cache)
    if StoredModel.is_in(folder):
        return folder
    from hidet_dist.llm.building import build  # it imports hidet and PyTorch, which loading does without

    try:
        cache.mkdir(parents=True, exist_ok=True)
        staging = folder_beside(folder)
    except OSError as error:
        raise ConfigError(f"Models cannot be built in {cache}: {error}. Name another cache.") from error
    try:
        build(path, name, options, staging)
        try:
            os.rename(staging, folder)
        except OSError:
            if not StoredModel.is_in(folder):  # another process has built it meanwhile
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _key(path: Path, name: str, options: LoadOptions, cache: Path) -> str:
    """Compute the name of a model's folder. Raises ConfigError."""
    decided = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del decided["timeout_seconds"]  # of loading
    kept = _Digests(cache)
    parts = {
        "name": name,
        "checkpoint": {
            file.relative_to(path).as_posix() if path.is_dir() else "": kept.of(file) for file in _files(path)
        },
        "options": {**decided, "ranks": options.rank_count},
        "code": kept.of_code(),
        "processor": [platform.machine(), best_level()],
    }
    kept.write()
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=_plain).encode()).hexdigest()
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).lstrip(".")
    return f"{stem[:64] or 'model'}-{options.rank_count}-{digest[:24]}"


def _plain(value: Any) -> Any:
    """Convert a value of a configuration, such as a machine, to one that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return repr(value)


def _files(path: Path) -> Iterable[Path]:
    """List the files that a checkpoint is read from. Raises ConfigError if there are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"There is no {path}: name a folder with config.json and safetensors, or a GGUF file.")
    found = (*path.iterdir(), *path.glob("*/config.json"))  # an encoder's modules have folders of their own
    files = sorted(file for file in found if file.suffix in _READ and file.is_file())
    if not files:
        raise ConfigError(f"{path} has no files of a model: name a folder with config.json and safetensors.")
    return files


def _sources(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """List the sources below a folder, with their states. It takes a third of the time that pathlib takes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _sources(entry.path)
            elif entry.name.endswith(_SOURCES):
                yield entry.path, entry.stat()


class _Digests:
    """Digests of files, which are kept in the cache by the files' states, so that a large file is read once.

    A state is a file's device, inode, size and times of change.
    """

    def __init__(self, cache: Path):
        self._cache = cache
        self._kept = self._read()
        self._read_code = self._read_file = False

    def of(self, file: Path) -> str:
        """Return the SHA-256 of a file."""
        key = f"{file.resolve()} {' '.join(map(str, state(file.stat())))}"
        if key not in self._kept:
            self._kept[key] = sha256(file)
            self._read_file = True
        return self._kept[key]

    def of_code(self) -> str:
        """Return a digest of what decides what is built of a checkpoint: this package, and the headers of kernels."""
        roots = Path(__file__).parents[1], native.include_dir()
        files = [(root, name, status) for root in roots for name, status in sorted(_sources(str(root)))]
        states = hashlib.sha256()
        for _, name, status in files:
            states.update(f"{name} {' '.join(map(str, state(status)))}\0".encode())
        key = f"{roots[0]} {states.hexdigest()}"
        if key not in self._kept:
            digest = hashlib.sha256()
            for root, name, _ in files:
                digest.update(Path(name).relative_to(root).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(Path(name).read_bytes()).digest())
            self._kept[key] = digest.hexdigest()
            self._read_code = True
        return self._kept[key]

    def write(self) -> None:
        """Keep what was computed. Raises ConfigError where digests of a checkpoint cannot be written."""
        if not (self._read_code or self._read_file):
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            write_text(self._cache / _DIGESTS, json.dumps(self._kept, indent=1))
        except OSError as error:
            if self._read_file:
                raise ConfigError(f"The cache {self._cache} cannot be written: {error}. Name another one.") from error

    def _read(self) -> dict[str, str]:
        """Read what was computed before; nothing if that cannot be read."""
        try:
            kept = parse_json(read_text(self._cache / _DIGESTS, MOST_CONFIGURATION_BYTES))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}
