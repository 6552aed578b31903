"""The context of optimization and builds for CUDA."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hidet
from hidet.graph.transforms import PassContext

from hidet_dist import native
from hidet_dist.compat.cpu_build import compiler_version, content_of, gcc
from hidet_dist.compat.cublas_products import cublas_products
from hidet_dist.compat.cuda_build import STANDARD, described_gpu
from hidet_dist.compat.fast_divisions import fast_divisions
from hidet_dist.compat.fused_operands import fused_operands
from hidet_dist.compat.half_products import half_products
from hidet_dist.compat.joint_launches import joint_launches
from hidet_dist.compat.symbolic_tiles import symbolic_tiles
from hidet_dist.compile.generators import GENERATORS
from hidet_dist.machine.gpu import Gpu
from hidet_dist.toolchain.cuda import Toolkit, find_toolkit, link_folder

_FLAG_OPTIONS = ("cuda.build.ftz", "cuda.build.prec_div")  # hidet's options that decide flags of nvcc


def kernel_key(gpu: Gpu, cublas: Sequence[str], toolkit: Toolkit, generators: Sequence[str] = GENERATORS) -> str:
    """Digest what a kernel for CUDA depends on besides its operator: kernels of different keys are cached apart.

    These are the GPU, both compilers, the flags, the native library's headers, and the Python sources in the folders
    ``generators``. hidet's own files are covered by its version, which hidet stores with each kernel.
    """
    parts = [
        repr(gpu),
        f"cublas={','.join(cublas)}",
        STANDARD,
        f"nvcc-{toolkit.version}",
        f"g++-{compiler_version(gcc())}",
        *(f"{name}={hidet.option.get_option(name)}" for name in _FLAG_OPTIONS),
        content_of(str(native.include_dir())),
        *(content_of(folder, ".py") for folder in generators),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def building_for(gpu: Gpu, space: int, mma: str, cublas: Sequence[str]) -> Iterator[None]:
    """Optimize and build for a GPU while the block runs; ``space`` and ``mma`` are those of :class:`CudaTarget`.

    ``cublas`` are the dtypes of products that cuBLAS is a candidate for.

    Raises
    ------
    CompileError
        When there is no nvcc.
    """
    toolkit = find_toolkit()
    caches = Path(hidet.option.get_cache_dir()) / "cuda" / f"nvcc-{toolkit.version}"
    place = hashlib.sha256(str(toolkit.runtime).encode()).hexdigest()[:16]
    libraries = link_folder(toolkit, caches / f"link-{place}")
    cache = caches / f"{gpu.arch}-{gpu.name}-{kernel_key(gpu, cublas, toolkit)}"
    with (
        described_gpu(gpu, toolkit, libraries, cache, space),
        fast_divisions(),
        half_products(),
        fused_operands(),
        cublas_products(cublas),
        joint_launches(),
        symbolic_tiles(),
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
