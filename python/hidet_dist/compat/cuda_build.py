"""hidet 0.6.1 builds for CUDA only on a machine with a GPU, and for that GPU; here it builds for a described one.

While :func:`described_gpu` is active:

* ``hidet.cuda`` reports a GPU with the described properties. hidet reads those of device 0 when it chooses kernels
  (matrix products split k by the number of multiprocessors), and refuses to compile without libcuda.
* Operators without inputs are not run. hidet runs them on the GPU while it optimizes a graph.
* The processes that build kernels do not query all devices first.
* nvcc is that of the given toolkit, and kernels depend only on libraries that they use: hidet links all of them against
  libcuda, which only a machine with a GPU has. They are compiled as C++17, which the project's own headers need.
* hidet's headers of its runtime, which take nvcc longer than most kernels, are left out. Kernels include one in their
  place that has what they need.
* Each GPU, compiler and set of options has a separate cache of kernels: the key of hidet's cache lacks them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hidet
import hidet.cuda
from hidet.backend.build import NVCC

from hidet_dist import native
from hidet_dist.compat.replacing import replaced
from hidet_dist.machine.gpu import Gpu

if TYPE_CHECKING:
    from hidet_dist.toolchain.cuda import Toolkit

_compiler: Any = importlib.import_module("hidet.backend.build")
_device: Any = importlib.import_module("hidet.cuda.device")
_startup: Any = importlib.import_module("hidet.drivers.utils").lazy_initialize_cuda

RUNTIME = "hidet_dist/kernels/cuda/runtime.h"
"""The header that kernels include in place of those of hidet's runtime."""

# Only launchers of graphs, which are not compiled for CUDA, use the memory planner.
_HIDET_INCLUDES = tuple(
    f"#include <hidet/runtime/{name}.h>\n"
    for name in ("symbols", "memory_planner", "cpu/context", "cuda/context", "logging", "int_fastdiv")
)

HIDET_STANDARD, STANDARD = "-std=c++11", "-std=c++17"
"""The option of nvcc for the version of C++: hidet's, and the one that kernels are compiled with."""


def properties_of(gpu: Gpu) -> SimpleNamespace:
    """Convert the described GPU to the fields of ``cudaDeviceProp`` that hidet reads; reading any other fails."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multiProcessorCount=gpu.multiprocessors,
        sharedMemPerBlock=gpu.shared_memory_per_block_bytes,
        sharedMemPerBlockOptin=gpu.shared_memory_per_block_optin_bytes,
        regsPerMultiprocessor=gpu.registers_per_multiprocessor,
        maxThreadsPerMultiProcessor=gpu.threads_per_multiprocessor,
        warpSize=32,
    )


@contextmanager
def described_gpu(gpu: Gpu, toolkit: Toolkit, link_folder: Path, cache: Path, space: int) -> Iterator[None]:
    """Let hidet optimize and build for ``gpu`` while the block runs, with kernels cached in ``cache``."""
    properties = properties_of(gpu)

    class PatchedNvcc(NVCC):
        _resolve_nvcc_path = staticmethod(lambda: str(toolkit.nvcc))

        def __init__(self) -> None:
            super().__init__()
            self.library_dirs: list[str] = [str(link_folder), *self.library_dirs]
            self.include_dirs: list[str] = [str(native.include_dir()), *self.include_dirs]

        def compile(self, src_path: str, *arguments: Any, **named: Any) -> None:
            source = Path(src_path)
            source.write_text(with_runtime(source.read_text()))
            super().compile(src_path, *arguments, **named)

        def run_compile_command(self, command: str, src_path: str, out_lib_path: str) -> None:
            nvcc = str(toolkit.nvcc)
            linked = command.replace(nvcc, f"{nvcc} -Xlinker --as-needed", 1)
            # A flag of the host compiler: a library linked with it makes its process flush denormal numbers to zero.
            linked = linked.replace(",-ffast-math", "").replace(HIDET_STANDARD, STANDARD, 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nvcc's warnings about hidet's generated code
                super().run_compile_command(linked, src_path, out_lib_path)

    described = {
        "available": lambda: True,
        "is_available": lambda: True,
        "properties": lambda device_id=0: properties,
        "compute_capability": lambda device_id=0: gpu.capability,
    }
    with (
        replaced(hidet.cuda, described),
        replaced(_device, described),
        replaced(_compiler, {"NVCC": PatchedNvcc}),
        replaced(_startup, {"_initialized": True}),
        replaced(hidet.option, {"execution_mode": lambda _=None: _symbolic()}),
        hidet.option.context(),
    ):
        _symbolic()
        hidet.option.cuda.arch(gpu.arch)
        hidet.option.cpu.arch("x86-64")  # for host code: any level will do
        hidet.option.search_space(space)
        hidet.option.cache_dir(str(cache))
        yield


def with_runtime(source: str) -> str:
    """Put one header in the place of hidet's of its runtime."""
    lines = (line for line in source.splitlines(keepends=True) if line not in _HIDET_INCLUDES)
    return "".join([f"#include <{RUNTIME}>\n", *lines])


def _symbolic() -> None:
    hidet.option.set_option("execution_mode", "symbolic")
