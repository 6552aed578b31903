"""hidet 0.6.1 builds a graph's launch function only for graphs whose weights are constants with storage.

Here weights are data: placeholders that every rank fills with its own shards. ``build_graph_module`` needs no storage
for what it calls weights, but takes each graph input for a parameter of the launch function, so the placeholders must
not be among the inputs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hidet.drivers.build_graph import build_graph_module
from hidet.graph import FlowGraph, Tensor


def build_launcher(
    graph: FlowGraph, inputs: Sequence[Tensor], weights: Sequence[Tensor], kernel_of_node: list[int]
) -> Path:
    """Build the library that launches a whole graph; ``inputs`` are call arguments, ``weights`` are set once.

    ``kernel_of_node[i]`` is the place of node i's kernel in the table that the launch function gets. Returns the path
    of the library in hidet's cache. Its functions are ``hidet_init``, ``hidet_get_workspace_size`` (which writes three
    int64: hidet's own binding passes two), ``hidet_set_workspace`` and ``hidet_launch``.
    """
    whole = graph.inputs
    nodes = graph.nodes  # analysed with all inputs; the analysis is kept while they are hidden
    try:
        graph.inputs = list(inputs)
        assert graph.nodes is nodes
        module = build_graph_module(graph, list(weights), kernel_of_node)
    finally:
        graph.inputs = whole
    return Path(module.shared_library.lib_path)
