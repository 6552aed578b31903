"""What a program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

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
    mma: ``mma`` for float32 matrix products on tensor cores (as tf32, of 10 bits of mantissa), ``simt`` for none.
    cuda_graph: whether a process runs the program as a CUDA graph.
    """

    kind: str = "cpu"
    gpu: Gpu | None = None
    space: int = 0
    mma: str = "simt"
    cuda_graph: bool = False

    @property
    def device(self) -> str:
        """hidet's device that the program's tensors are on. Which GPU it is, is the serving process's choice."""
        return "cpu" if self.gpu is None else "cuda:0"

    @property
    def arch(self) -> str | None:
        """The architecture of the GPU, such as ``sm_90``; None for the CPU."""
        return None if self.gpu is None else self.gpu.arch


CPU = Target()
