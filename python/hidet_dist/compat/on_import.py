"""Acting on hidet once it is imported, without importing it: that takes seconds, which serving need not spend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """Finds one top-level package where it is, and has an action follow its import."""

    def __init__(self, name: str, action: Callable[[], None]):
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package's, ``None`` for every other name. Being looked for is not being imported."""
        if name != self._name:
            return None
        finders = (finder for finder in tuple(sys.meta_path) if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._action()

            # On this one loader, not in another class: whatever else is asked of it stays as it is.
            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def after(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` once the top-level package ``name`` is imported: now, if it is, or at the end of its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))
