"""The protocol of targets that programs are compiled for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.machine import Device
from hidet_dist.normalize import NormalGraph
from hidet_dist.partitioning import Program
from hidet_dist.spec.storage import WeightStorage
from hidet_dist.targets import Target
from hidet_dist.weights.panels import Panels, StoredPrecision


@dataclass(frozen=True)
class PackedWeight:
    """A weight whose elements kernels read in panels, and the input of the graph that stands for it."""

    placeholder: Tensor
    panels: Panels


class Backend(Protocol):
    """A target that programs are compiled for. Each target has fields of its own.

    Attributes
    ----------
    record: what all layers know of the target.
    archs: the values of ``optimization_config["arch"]`` for this target.
    options: the class of the target's options (:mod:`hidet_dist.options`), which are the keys of the dict that
        ``optimization_config`` has under the target's name.
    """

    record: ClassVar[Target]
    archs: ClassVar[Sequence[str]]
    options: ClassVar[type]

    @classmethod
    def configured(cls, arch: str | None, options: Any, device: Device) -> Backend:
        """Make the configured target. ``options`` is an object of the target's class; costs are those of ``device``.

        Raises
        ------
        ConfigError
            When the device cannot run code for this target, or for ``arch``.
        """

    @property
    def device(self) -> str:
        """hidet's name of the program's device. The serving process chooses the actual device of this kind."""

    @property
    def arch(self) -> str:
        """The architecture that code is compiled for, such as ``sm_90`` or ``x86-64-v3``."""

    @property
    def gpu_name(self) -> str | None:
        """The GPU that code is compiled for; None for a target without GPUs."""

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The features that a processor must have for the program to run on it, by Linux's names."""

    @property
    def space(self) -> int:
        """The number of hidet's search space: 0 for one candidate per kernel, 1 for some, 2 for many."""

    @property
    def cuda_graph(self) -> bool:
        """Whether a process runs the program as a CUDA graph."""

    def check_compiler(self) -> None:
        """Refuse the target where there is no compiler for it.

        Raises
        ------
        CompileError
            When there is no compiler; the message says how to get one.
        """

    def prepare(self, graph: NormalGraph, devices: int) -> tuple[NormalGraph, Mapping[Tensor, Tensor]]:
        """Rewrite the graph for a number of devices; return it, and the replacement of each replaced weight."""

    def storage(self, precision: StoredPrecision, dims: int, transposed: bool) -> WeightStorage | None:
        """Say how a device holds a weight of products in a lower precision; None if it keeps its own dtype.

        Parameters
        ----------
        precision: StoredPrecision
            The precision, one of the target's ``stored_precisions``.
        dims: int
            The number of the weight's dims.
        transposed: bool
            Whether the weight has the transposed matrices.
        """

    def optimizing(self) -> AbstractContextManager[None]:
        """Make the context in which operators are fused."""

    def building(self) -> AbstractContextManager[None]:
        """Make the context in which kernels are built."""

    def before_fusion(self, program: Program, precisions: Mapping[str, StoredPrecision], frugal: bool) -> FlowGraph:
        """The program's graph, rewritten before hidet fuses its operators.

        ``precisions`` are the lower ones in which weights may be stored, by name. If ``frugal``, nothing is rewritten
        such that it would hold more memory.
        """

    def after_fusion(self, graph: FlowGraph, frugal: bool) -> FlowGraph:
        """The graph, rewritten once its operators are fused.

        If ``frugal``, operators stay apart whose kernel would hold more memory than they do one after the other.
        """

    def pack(
        self,
        graph: FlowGraph,
        weights: Mapping[str, Tensor],
        in_rows: Collection[str],
        precisions: Mapping[str, StoredPrecision],
    ) -> tuple[FlowGraph, dict[str, PackedWeight]]:
        """Rewrite the graph to read some of its weights in another layout, and return it with these by name.

        Parameters
        ----------
        graph: FlowGraph
            The graph, fused.
        weights: mapping
            The inputs of the graph that are weights, by name.
        in_rows: collection of str
            The names of those that stay in rows.
        precisions: mapping
            The lower precision in which a weight is stored, by its name, if its layout allows it.
        """

    def before_build(self) -> None:
        """Prepare to build kernels, within :meth:`building`."""

    def libraries(self, graph: FlowGraph) -> tuple[str, ...]:
        """The libraries that kernels need, besides the runtimes of hidet and hidet_dist."""

    def calls_cublas(self, node: Operator) -> bool:
        """Whether the last candidate of an operator's kernel calls cuBLAS."""
