"""hidet 0.6.1's optimization is a fixed list of passes; this puts one into it."""

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


@contextmanager
def before_fusion(rewrite: Callable[[FlowGraph], FlowGraph]) -> Iterator[None]:
    """Have ``hidet.graph.optimize`` rewrite graphs once their operators are resolved, before it fuses them."""
    fusion = transforms.fuse_operator_pass
    transforms.fuse_operator_pass = lambda: _Before(rewrite, fusion())
    try:
        yield
    finally:
        transforms.fuse_operator_pass = fusion
