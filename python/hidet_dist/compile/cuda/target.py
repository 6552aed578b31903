"""NVIDIA's GPUs as a target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.compile.backend import PackedWeight
from hidet_dist.compile.blocks import blocks_in_place
from hidet_dist.compile.guards import guard_graph
from hidet_dist.compile.kept import check_kept
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Device
from hidet_dist.machine.gpu import GPUS, Gpu
from hidet_dist.normalize import NormalGraph
from hidet_dist.normalize.columns import pad_columns
from hidet_dist.options.option import BOOL, one_of, option, or_none
from hidet_dist.partitioning import Program
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.targets import TARGETS, Target
from hidet_dist.toolchain.cuda import find_toolkit
from hidet_dist.weights.panels import GPU_PANEL_WIDTH, StoredPrecision, storage_in_panels

WIDEST_READ_BYTES = 16
"""The bytes that a thread reads at once at most; their address must be a multiple of it (CUDA C++ Programming Guide,
"Device Memory Accesses")."""


@dataclass(frozen=True)
class CudaOptions:
    """The options of this target."""

    space: int = option(
        0,
        "int",
        "The candidates of a kernel: 0 for one, 1 and 2 for hidet's small and large search spaces. A serving process "
        "measures the fastest when it first loads the artifacts.",
        one_of((0, 1, 2)),
    )
    mma: str = option(
        "simt",
        "str",
        "``mma`` to compute float32 matrix products on tensor cores, which round their operands to tf32 (10 bits of "
        "mantissa), or ``simt``. Half precision always uses tensor cores.",
        one_of(("mma", "simt")),
    )
    cublas: bool | None = option(
        None,
        "bool, optional",
        "Whether cuBLAS is another candidate for each matrix product, whatever ``space`` is: by default for those in "
        "float32. The products of half precision, by hidet's kernels, sum a row in one order whatever rows are beside "
        "it, and have what follows them in their kernels. Processes without cuBLAS use another candidate.",
        or_none(BOOL),
    )
    cuda_graph: bool = option(
        False,
        "bool",
        "Whether serving processes run the program as a CUDA graph: captured at the second run with the same sizes of "
        "symbolic dims, and replayed from then on. Inputs and outputs are then copied, on the device. A program "
        "that dispatches tokens to experts is launched kernel by kernel: the host must know how many rows there are.",
        BOOL,
    )


@dataclass(frozen=True)
class CudaTarget:
    """The target of NVIDIA's GPUs of one kind.

    Attributes
    ----------
    gpu: the GPU that code is compiled for.
    space: the candidates of a kernel: 0 for one, 1 and 2 for hidet's small and large search spaces.
    mma: ``mma`` to compute float32 matrix products on tensor cores (as tf32, with 10 bits of mantissa), else ``simt``.
    cuda_graph: whether a process runs the program as a CUDA graph.
    cublas: whether cuBLAS is a candidate for matrix products in the serving process; None for those in float32.
    """

    record: ClassVar[Target] = TARGETS["cuda"]
    archs: ClassVar[Sequence[str]] = ("auto", *TARGETS["cuda"].machines)
    options: ClassVar[type] = CudaOptions

    gpu: Gpu
    space: int = 0
    mma: str = "simt"
    cuda_graph: bool = False
    cublas: bool | None = False

    device: ClassVar[str] = "cuda:0"
    cpu_features: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def configured(cls, arch: str | None, options: CudaOptions, device: Device) -> CudaTarget:
        """Make the target of the device's GPU.

        Raises
        ------
        ConfigError
            When the device is not a known GPU, or has another architecture.
        """
        gpu = GPUS.get(device.name)
        if gpu is None:
            raise ConfigError(
                f"The target 'cuda' needs a machine with GPUs, but the machine's device is {device.name!r}. Name one "
                "in distributed_config['machine'] (`hidet-dist machines`), or an architecture in "
                f"optimization_config['arch'] ({', '.join(cls.record.machines)}). Devices of a machine file are known "
                f"by their names: {', '.join(GPUS)}."
            )
        if arch not in (None, "auto", gpu.arch):
            raise ConfigError(
                f"optimization_config['arch'] = {arch!r}, but the machine's device {gpu.name} is {gpu.arch}."
            )
        return cls(gpu, options.space, options.mma, options.cuda_graph, options.cublas)

    @property
    def arch(self) -> str:
        """The GPU's architecture, such as ``sm_90``."""
        return self.gpu.arch

    @property
    def gpu_name(self) -> str:
        """The GPU's name."""
        return self.gpu.name

    def check_compiler(self) -> None:
        """Refuse a machine without nvcc."""
        find_toolkit()

    def prepare(self, graph: NormalGraph, devices: int) -> tuple[NormalGraph, Mapping[Tensor, Tensor]]:
        """Pad the columns of weights, so that kernels can read them 16 bytes at a time."""
        padded = pad_columns(graph, devices)
        return padded.graph, padded.weights

    def storage(self, precision: StoredPrecision, dims: int, transposed: bool) -> WeightStorage | None:
        """Hold a matrix in panels of a warp's width; stacks of matrices keep their dtype."""
        return storage_in_panels(precision, GPU_PANEL_WIDTH, transposed) if dims == 2 else None

    def optimizing(self) -> AbstractContextManager[None]:
        """Compile for the GPU."""
        return self.building()

    def building(self) -> AbstractContextManager[None]:
        """Compile for the GPU."""
        # hidet takes a second to import its kernels for GPUs, which planning does without.
        from hidet_dist.compile.cuda.build import building_for

        return building_for(self.gpu, self.space, self.mma, self._cublas_dtypes)

    def before_fusion(self, program: Program, precisions: Mapping[str, StoredPrecision], frugal: bool) -> FlowGraph:
        """Guard all lookups, as inputs on a GPU are not checked, fuse operators to have fewer kernels, find blocks."""
        from hidet_dist.compile.cuda.experts import define_experts
        from hidet_dist.compile.cuda.joined import apart_for_joining
        from hidet_dist.compile.cuda.launches import fewer_launches
        from hidet_dist.compile.cuda.quantized import quantized_products
        from hidet_dist.compile.cuda.row_attention import row_attention_kernels
        from hidet_dist.compile.cuda.row_exchange import pack_row_exchanges

        guarded = row_attention_kernels(define_experts(guard_graph(program, ())), self.gpu.multiprocessors)
        guarded = quantized_products(guarded, program.weight_placeholders, precisions, self.gpu.multiprocessors)
        graph = blocks_in_place(fewer_launches(guarded), WIDEST_READ_BYTES)
        if not frugal:  # results that a neighbour would read as they are computed are held
            graph = apart_for_joining(graph, program.planned_sizes(), self.gpu.multiprocessors)
        check_kept(program.graph, graph)
        return pack_row_exchanges(graph)

    def after_fusion(self, graph: FlowGraph, frugal: bool) -> FlowGraph:
        """Let products of one left operand be one launch."""
        from hidet_dist.compile.cuda.joined import joint_products

        return joint_products(graph)

    def pack(
        self,
        graph: FlowGraph,
        weights: Mapping[str, Tensor],
        in_rows: Collection[str],
        precisions: Mapping[str, StoredPrecision],
    ) -> tuple[FlowGraph, dict[str, PackedWeight]]:
        """Give products by weights of few bits their panels; other kernels for GPUs read weights row by row."""
        from hidet_dist.compile.cuda.quantized import pack_weights

        return pack_weights(graph, weights)

    def before_build(self) -> None:
        """Do nothing."""

    def libraries(self, graph: FlowGraph) -> tuple[str, ...]:
        """The CUDA runtime."""
        return (find_toolkit().runtime_name,)

    def calls_cublas(self, node: Operator) -> bool:
        """Whether it is a matrix product, and cuBLAS may compute it."""
        if not self._cublas_dtypes:
            return False
        from hidet_dist.compile.cuda.joined import calls_cublas

        return calls_cublas(node.task, self._cublas_dtypes)

    @property
    def _cublas_dtypes(self) -> tuple[str, ...]:
        """The dtypes of products that cuBLAS is a candidate for."""
        from hidet_dist.compat.cublas_products import DTYPES

        return DTYPES if self.cublas else ("float32",) if self.cublas is None else ()
