"""GPUs as targets of CUDA code: the properties that a compiler needs, from NVIDIA's documents.

* Multiprocessors: A100 (Ampere), H100 (Hopper) and Ada GPU Architecture white papers; the H200 has the H100 SXM5's GPU
  (H200 data sheet).
* Shared memory of a block, without and with opting in to more, and registers: CUDA C++ Programming Guide, table
  "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes
    ----------
    name: the name of the :class:`hidet_dist.machine.Device`.
    capability: compute capability, major and minor.
    multiprocessors: streaming multiprocessors.
    shared_memory_per_block_bytes: the limit of a block that does not opt in to more.
    shared_memory_per_block_optin_bytes: the limit of a block that opts in.
    registers_per_multiprocessor: 32-bit registers.
    threads_per_multiprocessor: the limit of resident threads.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int

    @property
    def arch(self) -> str:
        """The architecture as nvcc names it, such as ``sm_80``."""
        major, minor = self.capability
        return f"sm_{major}{minor}"


def _gpu(name: str, capability: tuple[int, int], multiprocessors: int) -> Gpu:
    optin, threads = _BY_CAPABILITY[capability]
    return Gpu(name, capability, multiprocessors, 48 * _KIB, optin, 64 * _KIB, threads)


# By compute capability: shared memory that a block may opt in to (bytes), resident threads of a multiprocessor.
_BY_CAPABILITY = {(8, 0): (163 * _KIB, 2048), (8, 9): (99 * _KIB, 1536), (9, 0): (227 * _KIB, 2048)}

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-SXM4-80GB", (8, 0), 108),
        _gpu("A100-PCIE-80GB", (8, 0), 108),
        _gpu("L40S-48GB", (8, 9), 142),
        _gpu("H100-SXM5-80GB", (9, 0), 132),
        _gpu("H100-PCIE-80GB", (9, 0), 114),
        _gpu("H200-SXM5-141GB", (9, 0), 132),
    )
}
