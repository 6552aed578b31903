"""hidet 0.6.1 takes most of the time of planning to build operators; while this package plans and builds, it is quick.

Each of the modules below replaces functions of hidet by others that give the same results. Outside of the block hidet
has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hidet_dist.compat import lookups, quick_layouts, quick_types, simplest_forms, simplifier_rules, task_inputs
from hidet_dist.compat.replacing import replaced

_MODULES = (lookups, quick_layouts, quick_types, simplest_forms, simplifier_rules, task_inputs)


class _Blocks:
    """The blocks that run now, in all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.replaced = ExitStack()


_blocks = _Blocks()


@contextmanager
def quick_hidet() -> Iterator[None]:
    """While a block runs, in any thread, hidet builds operators quickly. Decorates functions, too."""
    blocks = _blocks
    with blocks.lock:
        if not blocks.count:
            for module in _MODULES:
                for owner, values in module.SUBSTITUTES:
                    blocks.replaced.enter_context(replaced(owner, values))
        blocks.count += 1
    try:
        yield
    finally:
        with blocks.lock:
            blocks.count -= 1
            if not blocks.count:
                blocks.replaced.close()
