"""What a target must provide, so that programs can be compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.machine import Device
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import Program


class Backend(Protocol):
    """A target: what programs are compiled for, and how. Each has fields of its own.

    Attributes
    ----------
    name: what the configuration calls it; it is hidet's build target, too.
    archs: what ``optimization_config["arch"]`` may be for this target.
    keys: the keys of ``optimization_config`` that are for this target, beside ``arch``.
    overlaps: whether collectives run beside computation.
    """

    name: ClassVar[str]
    archs: ClassVar[Sequence[str]]
    keys: ClassVar[Sequence[str]]
    overlaps: ClassVar[bool]

    @classmethod
    def configured(cls, arch: str | None, options: Mapping[str, Any], device: Device) -> Backend:
        """The target as configured: ``options`` has a value for each of ``keys``, ``device`` is what costs are of.

        Raises
        ------
        ConfigError
            When the device cannot run code for this target, or for ``arch``.
        """

    @property
    def device(self) -> str:
        """hidet's device that the program's tensors are on; which one it is, is the serving process's choice."""

    @property
    def arch(self) -> str:
        """The architecture that code is compiled for, such as ``sm_90`` or ``x86-64-v3``."""

    @property
    def gpu_name(self) -> str | None:
        """The GPU that code is compiled for; None where it is for none."""

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The features that a processor must have for the program to run on it, by Linux's names."""

    @property
    def space(self) -> int:
        """The number of hidet's search space: 0 for one candidate a kernel, 1 and 2 for some and many."""

    @property
    def cuda_graph(self) -> bool:
        """Whether a process runs the program as a CUDA graph."""

    def check_compiler(self) -> None:
        """Refuse the target where there is no compiler for it.

        Raises
        ------
        CompileError
            It says how to get the compiler.
        """

    def prepare(self, graph: NormalGraph, devices: int) -> tuple[NormalGraph, Mapping[Tensor, Tensor]]:
        """Rewrite the graph for a number of devices; return it with the replacement of each weight that has one."""

    def optimizing(self) -> AbstractContextManager[None]:
        """What is in force while operators are fused."""

    def building(self) -> AbstractContextManager[None]:
        """What is in force while kernels are built."""

    def building_launcher(self) -> AbstractContextManager[None]:
        """What is in force while the launch function is built, and asked here how much memory it needs."""

    def before_fusion(self, program: Program) -> FlowGraph:
        """The program's graph, rewritten before hidet fuses its operators."""

    def after_fusion(self, graph: FlowGraph) -> FlowGraph:
        """The graph, rewritten once its operators are fused."""

    def before_build(self, folders: Sequence[Path]) -> None:
        """Prepare to build the kernels in these folders, within :meth:`building`."""

    def libraries(self, graph: FlowGraph) -> tuple[str, ...]:
        """What kernels need to be loaded, besides the runtimes of hidet and hidet_dist."""

    def calls_cublas(self, node: Operator) -> bool:
        """Whether the last candidate of an operator's kernel calls cuBLAS."""
