"""What a program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from hidet_dist.compile.cpu.arch import NATIVE, arch_of
from hidet_dist.machine.gpu import Gpu

MMA = ("mma", "simt")


@dataclass(frozen=True)
class Target:
    """What a program is compiled for, and how.

    Attributes
    ----------
    kind: hidet's build target, ``cpu`` or ``cuda``.
    gpu: the GPU that CUDA code is for; None for the CPU.
    space: how many candidates there are of a kernel: 0 for one, 1 and 2 for hidet's small and large search spaces.
    cpu: what code for the CPU is compiled for, one of :data:`hidet_dist.compile.cpu.arch.ARCHS`.
    mma: ``mma`` for float32 matrix products on tensor cores (as tf32, of 10 bits of mantissa), ``simt`` for none.
    cuda_graph: whether a process runs the program as a CUDA graph.
    cublas: whether matrix products may be cuBLAS's where they run.
    """

    kind: str = "cpu"
    gpu: Gpu | None = None
    space: int = 0
    mma: str = "simt"
    cuda_graph: bool = False
    cublas: bool = False
    cpu: str = NATIVE

    @property
    def device(self) -> str:
        """hidet's device that the program's tensors are on. Which GPU it is, is the serving process's choice."""
        return "cpu" if self.gpu is None else "cuda:0"

    @property
    def arch(self) -> str:
        """What code is compiled for: the architecture of the GPU, such as ``sm_90``, or of the CPU: ``x86-64-v3``."""
        return arch_of(self.cpu).name if self.gpu is None else self.gpu.arch

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The features that a processor must have for the program to run on it, by Linux's names."""
        return arch_of(self.cpu).features if self.gpu is None else ()


CPU = Target()
