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
    """Values of bytes by key. Every method may raise ``StoreError``, after which the store cannot be used any more."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, at most for the store's time-out, and return it."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all of the keys have values, and return them."""

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, which is 0 if the key has no value, and return the sum. Values are decimal digits."""

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key's value if its value is ``expected``, where empty means none; return its value afterwards.

        If the key has no value and ``expected`` is not empty, sets nothing and returns ``expected``.
        """

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of the keys have values."""

    def wait(self, keys: Sequence[str], timeout_seconds: float | None = None) -> None:
        """Wait until all of the keys have values."""

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it had a value."""

    def prefixed(self, prefix: str) -> Store:
        """Return a view of the store with a prefix before all keys, over the same connection."""

    def clone(self) -> Store:
        """Open another connection to the store, because a connection serves one call at a time."""

    def close(self) -> None:
        """Close the connection. A call that is waiting in another thread fails."""

    def abandon(self) -> None:
        """Close this forked child's copy of a connection, which its parent keeps."""
