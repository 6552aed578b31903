"""The backends of targets, each imported when it is needed."""

from __future__ import annotations

from pkgutil import resolve_name

from hidet_dist.compile.backend import Backend
from hidet_dist.targets import DEFAULT_TARGET, TARGETS


def backend_of(target: str) -> type[Backend]:
    """Import the backend of a target, by the target's name."""
    backend: type[Backend] = resolve_name(TARGETS[target].backend)
    return backend


def default_backend() -> Backend:
    """Make the backend of the default target, with its default options."""
    return backend_of(DEFAULT_TARGET)()
