"""hidet 0.6.1's optimization is a fixed list of passes, made for GPUs; here one is added and some are skipped.

The skipped passes convert graphs with float16 convolutions to channels last, for kernels that only CUDA has, and look
for operators to quantize, which takes time even if there are none.

Its fusion has no limit on the size of a fused operator, and the time of inferring its types grows more than
quadratically: a chain of 200 element-wise operators did not finish in 200 s. A limit makes the time linear.

Kernels are lowered by a fixed list of passes, too; those for CUDA's tensor cores are skipped as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hidet.transforms
from hidet.graph import FlowGraph, Operator, transforms
from hidet.graph.transforms import GraphPass, fuse_operator
from hidet.ir.module import IRModule
from hidet.transforms.base import Pass

from hidet_dist.compat.replacing import replaced

_FOR_TENSOR_CORES = (
    "lower_cute_dialect_pass",
    "instantiate_auto_annotation_pass",
    "vectorize_elementwise_pass",
    "instruction_selection_pass",
    "resolve_bank_conflict_pass",
    "annotate_mbarrier_pass",
    "tma_fallback_copy_pass",
    "shared_memory_allocation_pass",
)


MOST_FUSED = 32
"""The most operators that are fused into one."""


class _Before(GraphPass):
    def __init__(self, first: Callable[[FlowGraph], FlowGraph], then: GraphPass):
        super().__init__()
        self.first = first
        self.then = then

    def process_graph(self, graph: FlowGraph) -> FlowGraph:
        return self.then(self.first(graph))


class _Nothing(GraphPass):
    def process_graph(self, graph: FlowGraph) -> FlowGraph:
        return graph


@contextmanager
def cpu_passes(before_fusion: Callable[[FlowGraph], FlowGraph]) -> Iterator[None]:
    """Let ``hidet.graph.optimize`` rewrite graphs by ``before_fusion``, between resolving and fusing operators."""
    fusion = transforms.fuse_operator_pass
    with (
        replaced(transforms, {"fuse_operator_pass": lambda: _Before(before_fusion, fusion())}),
        replaced(transforms, dict.fromkeys(("conv_channel_last_pass", "selective_quantize_pass"), _Nothing)),
    ):
        yield


class _UntilFull:
    """hidet's map from operators to fusion groups; once a group is full, every operator appears to have a group.

    hidet adds an operator to a group only if it has none.
    """

    def __init__(self, groups: dict[Operator, Any], group: Any):
        self.groups = groups
        self.group = group

    def __contains__(self, op: Operator) -> bool:
        return op in self.groups or len(self.group.operators) >= MOST_FUSED

    def __getitem__(self, op: Operator) -> Any:
        return self.groups.get(op)

    def __setitem__(self, op: Operator, group: Any) -> None:
        self.groups[op] = group


Fuse = Callable[[Sequence[Operator], Any, Any], None]


def _bounded(fuse: Fuse) -> Fuse:
    def fuse_until_full(anchors: Sequence[Operator], usage: Any, groups: dict[Operator, Any]) -> None:
        for anchor in anchors:
            fuse([anchor], usage, _UntilFull(groups, groups[anchor]))

    return fuse_until_full


_FUSED_BY = ("fuse_epilogue_operators", "fuse_prologue_operators")


@contextmanager
def bounded_fusion() -> Iterator[None]:
    """Let hidet fuse at most :data:`MOST_FUSED` operators into one while the block runs."""
    with replaced(fuse_operator, {name: _bounded(getattr(fuse_operator, name)) for name in _FUSED_BY}):
        yield


class _NothingLower(Pass):
    def process_module(self, ir_module: IRModule) -> IRModule:
        return ir_module


@contextmanager
def cpu_lowering() -> Iterator[None]:
    """Lower kernels without the passes for CUDA's tensor cores while the block runs."""
    with replaced(hidet.transforms, dict.fromkeys(_FOR_TENSOR_CORES, lambda *_: _NothingLower())):
        yield
