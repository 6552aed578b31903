"""The pages of the pools: who refers to them, and which tokens' keys and values they keep.

A page that is full of a sequence's tokens may be *kept* under a key: a digest of these tokens and all before them.
Another sequence with the same beginning shares it. A kept page that nobody refers to stays until a page is needed; then
the one that was released first goes. Pages of one sequence are released from its end, so that what goes first is what
fewest sequences can share.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

Key = bytes
"""The digest of a page's tokens and of all before them."""

START: Key = b""


def page_key(before: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a page with these tokens, behind the page with the key ``before``."""
    return hashlib.blake2b(before + np.array(tokens, np.int64).tobytes(), digest_size=32).digest()


class Pages:
    """The pages of a model's pools.

    Every page is in one of three conditions: *free*, with nothing in it; *used*, by one sequence or several; *kept*,
    used by none, with tokens that a sequence to come may share.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._kept: OrderedDict[int, None] = OrderedDict()  # from the first released to the last
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def used(self) -> int:
        """Pages that sequences refer to."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """Pages that no sequence refers to, with tokens that can be shared."""
        return len(self._kept)

    @property
    def available(self) -> int:
        """Pages that can be taken: the free ones, and those that are only kept."""
        return len(self._free) + len(self._kept)

    def find(self, keys: Iterable[Key]) -> list[int]:
        """Return the pages that hold the longest beginning of ``keys``. They are not referred to yet."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def unused(self, pages: Iterable[int]) -> int:
        """Return how many of the pages no sequence refers to: so many fewer are available once they are shared."""
        return sum(page in self._kept for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Refer to pages that were found."""
        for page in pages:
            self._kept.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int] | None:
        """Refer to ``count`` pages with nothing in them, or to none, and return None, where fewer are available."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._users[page] = 1
            taken.append(page)
        return taken

    def keep(self, page: int, key: Key) -> None:
        """Say which tokens fill a used page. Where another page has the same ones, this changes nothing."""
        if not self._users[page]:
            raise ValueError(f"page {page} is kept by a sequence that does not use it")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """Refer to pages no longer, in the order given."""
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Keep nothing of what no sequence refers to, and share nothing of what is used."""
        for page in self._kept:
            self._free.append(page)
        self._kept.clear()
        self._page_of.clear()
        self._key_of.clear()
