"""C++ text: indented lines and unique names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager


class Code:
    """Lines of C++."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.fresh = itertools.count()

    def put(self, line: str) -> None:
        """Add a line."""
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """Add a statement whose body is the lines that the block adds."""
        self.put(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")
