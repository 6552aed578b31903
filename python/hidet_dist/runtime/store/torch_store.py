"""An adapter that makes the ranks' store a store of PyTorch, for its process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hidet_dist.runtime.store.interface import Store


class TorchStore(dist.Store):
    """A ``torch.distributed.Store`` that delegates to another store. It must outlive its users."""

    def __init__(self, store: Store):
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a key's value if it has the expected one; return its value afterwards."""
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of the keys have values."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of the keys have values."""
        self._store.wait(keys, None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it had a value."""
        return self._store.delete(key)
