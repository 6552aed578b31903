"""Temporary replacement of an object's attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Substitutes = tuple[tuple[Any, Mapping[str, Any]], ...]
"""Objects, such as modules and classes, each with attributes that replace its own."""


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of an object, such as a module, while the block runs."""
    missing = object()
    before = {name: getattr(owner, name, missing) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
