"""Actions after the import of a module, without importing it: hidet takes seconds, and serving does without."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """Finds one module in the usual way, and runs an action after its import."""

    def __init__(self, name: str, action: Callable[[], None]):
        self._name = name
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module's spec; None for every other name. A search alone does not run the action."""
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

            # Patch this loader instead of wrapping it, so that its other methods stay the same.
            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def after(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` once the module ``name`` is imported: at once if it is, else after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))
