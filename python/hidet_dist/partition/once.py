"""Tasks that are made once for the tensors and attributes that they are for: to build a definition is slow."""

from __future__ import annotations

from typing import Any

from hidet.graph.ops.utils import TensorInput
from hidet.ir.task import Task


class MadeOnce(type(Task)):  # type: ignore[misc]
    """The metaclass of such tasks; a call with equal arguments gives the same task."""

    def __init__(cls, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        cls._made: dict[str, Task] = {}

    def __call__(cls, *arguments: Any) -> Any:
        """The task for these tensors (by name, dtype and shape) and attributes."""
        key = "; ".join(
            f"{a.name} {a.type.dtype.name}{list(map(str, a.shape))}" if isinstance(a, TensorInput) else repr(a)
            for a in arguments
        )
        if key not in cls._made:
            cls._made[key] = super().__call__(*arguments)
        return cls._made[key]
