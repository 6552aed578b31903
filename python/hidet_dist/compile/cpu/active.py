"""The context in which operators get the CPU target's kernels: while a program for it is optimized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hidet.graph import Operator, PassContext

from hidet_dist.compat.passes import cpu_passes
from hidet_dist.compile.cpu.epilogue import fuse_epilogues

_SWITCH = "hidet_dist.cpu_kernels"
_KNOWN = "hidet_dist.known_kernels"


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Resolve operators on the CPU to this target's kernels while the block runs."""
    current = PassContext.current()
    with PassContext() as context, cpu_passes(before_fusion=fuse_epilogues):
        context.instruments = current.instruments
        context.configs = {**current.configs, _SWITCH: True, _KNOWN: {}}
        yield


def is_active(op: Operator) -> bool:
    """Whether an operator gets a kernel of this target."""
    return bool(PassContext.current().configs.get(_SWITCH, False)) and op.build_target == "cpu"


def known_kernels() -> dict[Any, Operator]:
    """Return the operators with this target's kernels that were made so far, by what decides their definitions.

    Equal layers get copies, because the definition of an operator takes long to build. The map is empty at the
    beginning of :func:`cpu_kernels`, and is lost after it.
    """
    known: dict[Any, Operator] = PassContext.current().configs.get(_KNOWN, {})
    return known
