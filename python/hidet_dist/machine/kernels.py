"""Measured costs of classes of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from hidet_dist.checks import is_finite, shown
from hidet_dist.errors import ConfigError

PRODUCT = "matmul"
"""The class of products, of operands of one dtype."""

STORED_PRODUCTS = ("matmul_float16", "matmul_bfloat16", "matmul_int8", "matmul_int4", "matmul_uint4")
"""The classes of products by weights of a lower precision. Where one is not known, it has the costs of ``PRODUCT``."""

ATTENTION = "attention"
"""The class of attention as one kernel, on CPUs. Where it is not known, its operators have the costs of their own."""

_COSTS_AS = {"wide_int8": "int8", "wide_uint4": "uint4"}  # products by the same elements, with other scales

KERNEL_CLASSES = (
    PRODUCT,
    *STORED_PRODUCTS,
    ATTENTION,
    "convolution",
    "normalization",
    "reduction",
    "pooling",
    "lookup",
    "copy",
    "elementwise",
    "function",
)
"""The classes of kernels; kernels of one class share a cost formula. Kernels of ``copy`` only move elements.
``function`` is not a kernel: its operations are the calls of functions, such as exp, in element-wise kernels."""


def product_class(precision: str) -> str:
    """Name the class of products of float32 by weights of a lower precision."""
    return f"{PRODUCT}_{_COSTS_AS.get(precision, precision)}"


@dataclass(frozen=True)
class Work:
    """The work of a kernel: its class, scalar operations, bytes moved, and calls of itself or of a library in it.

    ``weight_bytes`` are the bytes of weights among those moved. They are read from memory, because a model has more
    weights than a cache holds. ``functions`` are operations without an instruction of the processor, such as exp.
    """

    kernel: str
    operations: int
    moved_bytes: int
    weight_bytes: int = 0
    calls: int = 1
    functions: int = 0

    def __post_init__(self) -> None:
        if self.kernel not in KERNEL_CLASSES:
            raise ValueError(f"Unknown class of kernels {self.kernel!r}; the classes are {', '.join(KERNEL_CLASSES)}.")


@dataclass(frozen=True)
class KernelCost:
    """The seconds that kernels of one class take for each operation, each byte from or to a cache, and each call.

    The times are added: the cores that compute also wait for memory, and a library packs operands before it multiplies.
    """

    seconds_per_operation: float
    seconds_per_byte: float
    seconds_per_call: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (is_finite(value) and value >= 0):
                raise ConfigError(f"A kernel's {field.name} is a number of 0 or more; got {shown(value)}.")


def slowest_kernel(costs: Sequence[KernelCost]) -> KernelCost:
    """Take the greatest of each cost."""
    return KernelCost(*(max(getattr(cost, one.name) for cost in costs) for one in fields(KernelCost)))


def check_kernels(kernels: Mapping[str, KernelCost]) -> None:
    """Raise ConfigError unless every key is a class of kernels and every value its cost."""
    if not isinstance(kernels, Mapping):
        raise ConfigError(f"A device's kernels must map classes of kernels to their costs; got {shown(kernels)}.")
    for name, cost in kernels.items():
        if name not in KERNEL_CLASSES or not isinstance(cost, KernelCost):
            raise ConfigError(
                f"A device's kernels map {', '.join(KERNEL_CLASSES)} to their costs; got {shown(name)}: {shown(cost)}."
            )
