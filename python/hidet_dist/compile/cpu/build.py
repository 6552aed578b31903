"""The context of builds for the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hidet_dist import native
from hidet_dist.compat.cpu_build import compiled_with
from hidet_dist.compile.cpu.arch import NATIVE, arch_of
from hidet_dist.compile.generators import GENERATORS

# Not those of convolutions and products: reading them takes longer than it saves, as most kernels are none.
_HEADERS = (
    "hidet_dist/kernels/runtime.h",
    "hidet_dist/kernels/functions.h",
    "hidet_dist/kernels/workspace.h",
    "hidet_dist/kernels/tiles.h",
    "vector",
)
_LARGE = ("hidet_dist/kernels/row_attention.h",)  # it includes immintrin.h


def cpu_target(arch: str = NATIVE) -> AbstractContextManager[None]:
    """Build for one of :data:`hidet_dist.compile.cpu.arch.ARCHS` while the block runs; each has a separate cache."""
    native.library()  # hidet loads what it builds, which calls this library
    return compiled_with(arch_of(arch).flags, [str(native.include_dir())], _HEADERS, GENERATORS, _LARGE)
