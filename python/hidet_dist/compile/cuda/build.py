"""The context of optimization and builds for CUDA."""

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
from hidet_dist.machine.gpu import Gpu
from hidet_dist.toolchain.cuda import find_toolkit, link_folder

_REVISION = 4  # to be raised with every change of an operator or a header: hidet caches kernels by their names


@contextmanager
def building_for(gpu: Gpu, space: int, mma: str, cublas: bool) -> Iterator[None]:
    """Optimize and build for a GPU while the block runs; the other arguments are those of :class:`CudaTarget`.

    Raises
    ------
    CompileError
        When there is no nvcc.
    """
    toolkit = find_toolkit()
    caches = Path(hidet.option.get_cache_dir()) / "cuda" / f"nvcc-{toolkit.version}"
    place = hashlib.sha256(str(toolkit.runtime).encode()).hexdigest()[:16]
    libraries = link_folder(toolkit, caches / f"link-{place}")
    cache = caches / f"{gpu.arch}-{gpu.name}-{_REVISION}{'-cublas' if cublas else ''}"
    with (
        described_gpu(gpu, toolkit, libraries, cache, space),
        half_products(),
        fused_operands(),
        cublas_products(cublas),
        _graph_options(mma),
    ):
        yield


@contextmanager
def _graph_options(mma: str) -> Iterator[None]:
    current = PassContext.current()
    with PassContext() as context:
        context.instruments = current.instruments
        context.configs = {**current.configs, "mma": mma}
        yield
