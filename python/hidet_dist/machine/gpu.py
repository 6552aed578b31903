"""What CUDA code is generated for: the properties of a GPU that a compiler asks for, from NVIDIA's documents.

* Multiprocessors: A100 (Ampere), H100 (Hopper) and Ada GPU Architecture white papers; the H200 has the H100 SXM5's GPU
  (H200 data sheet).
* Shared memory that a block may have, without and with opting in, and registers: CUDA C++ Programming Guide, table
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
    name: as :class:`hidet_dist.machine.Device` has it.
    capability: compute capability, major and minor.
    multiprocessors: streaming multiprocessors.
    shared_memory_per_block_bytes: what a block may have of it unless it opts in to more.
    shared_memory_per_block_optin_bytes: what a block may have of it at most.
    registers_per_multiprocessor: of 32 bits.
    threads_per_multiprocessor: resident threads at most.
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


# Shared memory that a block may opt in to, and resident threads of a multiprocessor.
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
# The machine whose device stands for an architecture where none is named.
MACHINE_OF_ARCH = {"sm_80": "dgx-a100", "sm_89": "pcie-l40s", "sm_90": "dgx-h100"}
