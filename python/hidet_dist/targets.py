"""The targets: what all layers know of each kind of device that programs run on.

A target is an entry of :data:`TARGETS`, and a folder with the code that the entry names. No other code depends on which
target it is. The entry names code by its module and attribute, as in ``package.module:attribute``: planning, building
and serving each import what they need, and a serving process imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Target:
    """One kind of device that programs run on.

    Attributes
    ----------
    name: its name in the configuration and in manifests.
    memory: hidet's name of its memory, and of the build target of its kernels; one of :data:`KINDS_OF_MEMORY`.
    backend: the :class:`hidet_dist.compile.Backend`, which compiles programs.
    device: the :class:`hidet_dist.runtime.device.DeviceKind`, by which serving processes open devices.
    transport: the function that opens a rank's transport (:func:`hidet_dist.runtime.transports.open_transport`).
    machine: the machine for which costs are predicted where none is named.
    machines: the same for each ``arch`` that has one of its own.
    manifest_fields: the fields of a manifest, and of its stages, that only some targets have: ``gpu``, ``cuda_graph``
        and ``cublas``. Those of other targets are empty.
    precisions: the values of ``optimization_config["precision"]``.
    stored_precisions: the lower precisions in which weights of products may be stored
        (``optimization_config["weights"]["precision"]``), and ``quantized_dtypes`` those of such weights.
    unequal_parts: whether devices may have unequal parts of a dim.
    symbolic_pipelines: whether graphs with symbolic dims may be cut into stages.
    overlaps: whether collectives run beside computation.
    computes_constants: whether operators without inputs are computed while a program is partitioned. That needs a
        device, which a machine that compiles for GPUs may lack.
    keeps_nan: whether collectives keep NaN in maxima and minima of floats.
    state_kernels: the header of the native library with the kernels that update states in the target's memory; empty
        if programs keep no states.
    resolves_locally: whether the rules that resolve operators to kernels look only at an operator, and at those whose
        results it reads.
    """

    name: str
    memory: str
    backend: str
    device: str
    transport: str
    machine: str
    machines: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    manifest_fields: frozenset[str] = frozenset()
    precisions: tuple[str, ...] = ()
    stored_precisions: tuple[str, ...] = ()
    quantized_dtypes: tuple[str, ...] = ("float32",)
    unequal_parts: bool = False
    symbolic_pipelines: bool = False
    overlaps: bool = False
    computes_constants: bool = False
    keeps_nan: bool = False
    state_kernels: str = ""
    resolves_locally: bool = False

    @property
    def keeps_states(self) -> bool:
        """Whether programs keep states from call to call."""
        return bool(self.state_kernels)


KINDS_OF_MEMORY = ("cpu", "cuda", "hip")
"""hidet's kinds of memory, in the order in which a launcher reports its workspace."""

DEFAULT_TARGET = "cpu"
"""The target where none is named."""

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "cpu",
            memory="cpu",
            backend="hidet_dist.compile.cpu.target:CpuTarget",
            device="hidet_dist.runtime.device:HOST",
            transport="hidet_dist.runtime.transports.choose:open_for_host",
            machine="cpu",
            precisions=("bfloat16",),
            stored_precisions=("float16", "bfloat16", "int8", "int4", "uint4", "stored"),
            unequal_parts=True,
            symbolic_pipelines=True,
            computes_constants=True,
            keeps_nan=True,
            state_kernels="hidet_dist/kernels/states.h",
        ),
        Target(
            "cuda",
            memory="cuda",
            backend="hidet_dist.compile.cuda.target:CudaTarget",
            device="hidet_dist.runtime.cuda.device:GPU",
            transport="hidet_dist.runtime.transports.nccl:NcclTransport",
            machine="cpu",  # which the backend refuses: users name their GPUs
            machines=MappingProxyType({"sm_80": "dgx-a100", "sm_89": "pcie-l40s", "sm_90": "dgx-h100"}),
            manifest_fields=frozenset({"gpu", "cuda_graph", "cublas"}),
            precisions=("float16", "bfloat16"),
            stored_precisions=("int8", "int4"),
            quantized_dtypes=("float32", "float16", "bfloat16"),
            unequal_parts=True,
            overlaps=True,
            state_kernels="hidet_dist/kernels/cuda/states.h",
            resolves_locally=True,
        ),
    )
}
"""The targets, by name."""


def targets_with(capability: str) -> str:
    """Name the targets that have a capability, such as ``unequal_parts``, for errors."""
    return ", ".join(name for name, target in TARGETS.items() if getattr(target, capability))


def target_of_memory(memory: str) -> Target:
    """Return the target whose programs have their buffers in a kind of memory.

    Raises ValueError if there is none.
    """
    for target in TARGETS.values():
        if target.memory == memory:
            return target
    raise ValueError(f"There is no target with memory {memory!r}.")
