"""The interface of stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(RuntimeError):
    """The store cannot be reached any more, did not answer in time, or refused a request."""


class SecretError(StoreError):
    """The other side of a connection does not know the secret."""


class FullError(OSError):
    """The store's host has no file descriptor for another connection now."""


class Store(Protocol):
    """Values of bytes by key. Every method raises ``StoreError``, and then the store is of no more use."""

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value, in place of an earlier one."""

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one; waits for the store's time-out at most."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all have one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, 0 if there is none, and return the sum; the value is its decimal digits."""

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Give a key a value if it has the expected one, or if it has none and that is empty; return what it has."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have values."""

    def wait(self, keys: Sequence[str], timeout_seconds: float | None = None) -> None:
        """Return once all of the keys have values."""

    def delete(self, key: str) -> bool:
        """Take a key's value away; whether there was one."""

    def prefixed(self, prefix: str) -> Store:
        """The same store, over the same connection, with a prefix before all keys."""

    def clone(self) -> Store:
        """The same store over another connection: one serves one call at a time."""

    def close(self) -> None:
        """Close the connection. A call that is waiting in another thread fails."""

    def abandon(self) -> None:
        """Close this process's copy of a connection that belongs to its parent, which keeps it."""
