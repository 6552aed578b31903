"""hidet 0.6.1's optimization is a fixed list of passes, made for GPUs; this puts one into it, and leaves one out.

What is left out turns graphs with float16 convolutions to channels last, for kernels that only CUDA has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hidet.graph import FlowGraph, transforms
from hidet.graph.transforms import GraphPass


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
    """Have ``hidet.graph.optimize`` rewrite graphs once their operators are resolved, before it fuses them."""
    fusion, channel_last = transforms.fuse_operator_pass, transforms.conv_channel_last_pass
    transforms.fuse_operator_pass = lambda: _Before(before_fusion, fusion())
    transforms.conv_channel_last_pass = _Nothing
    try:
        yield
    finally:
        transforms.fuse_operator_pass, transforms.conv_channel_last_pass = fusion, channel_last
