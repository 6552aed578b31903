"""Optimizing and building for CUDA: what is in force meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hidet
from hidet.graph.transforms import PassContext

from hidet_dist.compat.cublas_products import cublas_products
from hidet_dist.compat.cuda_build import described_gpu
from hidet_dist.compat.fused_operands import fused_operands
from hidet_dist.compat.half_products import half_products
from hidet_dist.compile.target import Target
from hidet_dist.toolchain.cuda import find_toolkit, link_folder

_REVISION = 4  # one more whenever an operator, or a header, becomes another one: kernels built before are cached


@contextmanager
def cuda_target(target: Target) -> Iterator[None]:
    """Optimize and build for ``target`` while the block runs.

    Raises
    ------
    CompileError
        When there is no nvcc.
    """
    assert target.gpu is not None
    toolkit = find_toolkit()
    caches = Path(hidet.option.get_cache_dir()) / "cuda" / f"nvcc-{toolkit.version}"
    place = hashlib.sha256(str(toolkit.runtime).encode()).hexdigest()[:16]
    libraries = link_folder(toolkit, caches / f"link-{place}")
    cache = caches / f"{target.gpu.arch}-{target.gpu.name}-{_REVISION}{'-cublas' if target.cublas else ''}"
    with (
        described_gpu(target.gpu, toolkit, libraries, cache, target.space),
        half_products(),
        fused_operands(),
        cublas_products(target.cublas),
        _graph_options(target),
    ):
        yield


@contextmanager
def _graph_options(target: Target) -> Iterator[None]:
    current = PassContext.current()
    with PassContext() as context:
        context.instruments = current.instruments
        context.configs = {**current.configs, "mma": target.mma}
        yield
