"""CPUs as a target."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.compat.cpu_build import precompile_headers
from hidet_dist.compile.backend import PackedWeight
from hidet_dist.compile.blocks import blocks_in_place
from hidet_dist.compile.cpu.active import cpu_kernels
from hidet_dist.compile.cpu.arch import ARCHS, NATIVE, arch_of
from hidet_dist.compile.cpu.attention import define_attention
from hidet_dist.compile.cpu.attention_kernel import attention_kernels
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.compile.cpu.channels_last import channels_last
from hidet_dist.compile.cpu.collectives import place_shards
from hidet_dist.compile.cpu.kernels.lower import lower_to_kernels
from hidet_dist.compile.cpu.panels import pack_weights
from hidet_dist.compile.cpu.row_attention import row_attention_kernels
from hidet_dist.compile.cpu.tiled import TiledOp
from hidet_dist.compile.guards import guard_graph
from hidet_dist.compile.index_checks import index_checks
from hidet_dist.errors import CompileError
from hidet_dist.machine import Device
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import Program
from hidet_dist.runtime import openblas
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.targets import TARGETS, Target
from hidet_dist.weights.panels import PANEL_WIDTHS, StoredPrecision, storage_in_panels


@dataclass(frozen=True)
class CpuOptions:
    """The options of this target: none."""


@dataclass(frozen=True)
class CpuTarget:
    """The target of x86-64 processors.

    Attributes
    ----------
    level: the processors that code is compiled for, one of :data:`hidet_dist.compile.cpu.arch.ARCHS`.
    """

    record: ClassVar[Target] = TARGETS["cpu"]
    archs: ClassVar[Sequence[str]] = ARCHS
    options: ClassVar[type] = CpuOptions

    level: str = NATIVE

    device: ClassVar[str] = "cpu"
    gpu_name: ClassVar[None] = None
    space: ClassVar[int] = 0
    cuda_graph: ClassVar[bool] = False

    @classmethod
    def configured(cls, arch: str | None, options: CpuOptions, device: Device) -> CpuTarget:
        """Make the target of a level, by default the running processor's; costs may be those of any device."""
        return cls(arch or NATIVE)

    @property
    def arch(self) -> str:
        """The level's name, such as ``x86-64-v3``."""
        return arch_of(self.level).name

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The level's features, by Linux's names."""
        return arch_of(self.level).features

    def check_compiler(self) -> None:
        """Refuse a machine without g++."""
        if shutil.which("g++") is None:
            raise CompileError(
                "Compiling for the CPU needs g++, which is not in PATH; install it (apt-get install g++)."
            )

    def prepare(self, graph: NormalGraph, devices: int) -> tuple[NormalGraph, Mapping[Tensor, Tensor]]:
        """Return the graph unchanged."""
        return graph, {}

    def storage(self, precision: StoredPrecision, dims: int, transposed: bool) -> WeightStorage | None:
        """Hold it in panels of the level's width."""
        return storage_in_panels(precision, PANEL_WIDTHS[self.arch], transposed)

    def optimizing(self) -> AbstractContextManager[None]:
        """Compile for the running processor: constant subgraphs are computed during optimization."""
        return _in_force(NATIVE)

    def building(self) -> AbstractContextManager[None]:
        """Compile for the level."""
        return _in_force(self.level)

    def before_fusion(self, program: Program, precisions: Mapping[str, StoredPrecision], frugal: bool) -> FlowGraph:
        """Define attention, guard lookups that are not checked before the run, fuse collectives, and find blocks.

        Convolutions by weights get their channels last, unless ``frugal``: images are copied at the ends.
        """
        guarded = row_attention_kernels(guard_graph(program, index_checks(program)[1]))
        defined = define_attention(blocks_in_place(place_shards(guarded)))
        graph = attention_kernels(defined, program.planned_sizes())
        return graph if frugal else channels_last(graph, program.weight_placeholders.values())

    def after_fusion(self, graph: FlowGraph, frugal: bool) -> FlowGraph:
        """Give operators the kernels of this target."""
        graph = lower_to_kernels(graph, frugal)
        if _needs_openblas(graph):
            openblas.load_openblas()  # the kernels need it when they are loaded
        return graph

    def pack(
        self,
        graph: FlowGraph,
        weights: Mapping[str, Tensor],
        in_rows: Collection[str],
        precisions: Mapping[str, StoredPrecision],
    ) -> tuple[FlowGraph, dict[str, PackedWeight]]:
        """Bring the weights of matrix products into panels."""
        return pack_weights(graph, weights, PANEL_WIDTHS[self.arch], in_rows, precisions)

    def before_build(self) -> None:
        """Precompile headers."""
        precompile_headers()

    def libraries(self, graph: FlowGraph) -> tuple[str, ...]:
        """OpenBLAS for matrix products and convolutions."""
        return (openblas.NAME,) if _needs_openblas(graph) else ()

    def calls_cublas(self, node: Operator) -> bool:
        """Never."""
        return False


@contextmanager
def _in_force(level: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(cpu_target(level))
        stack.enter_context(cpu_kernels())
        yield


def _needs_openblas(graph: FlowGraph) -> bool:
    return any(isinstance(node, TiledOp) and node.calls_openblas for node in graph.nodes)
