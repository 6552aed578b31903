"""The program of artifacts that a command is about."""

from __future__ import annotations

from pathlib import Path

from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.errors import ConfigError


def folder_of(path: Path, program: str | None) -> Path:
    """Return the folder with the plan and the reports of a program of artifacts; a plan file is returned as it is.

    Raises
    ------
    ArtifactError
        When there are no artifacts with programs by name.
    ConfigError
        When there is no such program, there are several and none is named, or one is named of a plan file.
    """
    if not path.is_dir():
        if program is not None:
            raise ConfigError(f"{path} is a plan, not an artifact folder: leave out --program.")
        return path
    if program is None and not (path / "programs").is_dir():
        return path
    manifest = Manifest.load(path)
    return path / manifest.folder_of(manifest.program(program))
