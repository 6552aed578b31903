"""What was computed for sizes that calls had before, and need not be computed again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MOST = 1024  # values: calls of more sizes than this compute some of them again


class Kept(Generic[Key, Value]):
    """Values by what they were computed from. Where there are too many, all are forgotten."""

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}

    def get(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, which is computed if it is not known. Errors of ``compute`` are passed on."""
        value = self._values.get(key)
        if value is None:
            value = compute()
            if len(self._values) >= _MOST:
                self._values.clear()
            self._values[key] = value
        return value
