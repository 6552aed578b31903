"""The ranks' store as a store of PyTorch, for its process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hidet_dist.runtime.store.interface import Store


class TorchStore(dist.Store):
    """A ``torch.distributed.Store`` that asks another store. It must live as long as whatever uses it."""

    def __init__(self, store: Store):
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Give a key a value if it has the expected one."""
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have values."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all of the keys have values."""
        self._store.wait(keys, None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Take a key's value away."""
        return self._store.delete(key)
