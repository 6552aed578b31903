"""The rewrites of a program for CUDA before hidet fuses its operators: fewer launches, the same values."""

from __future__ import annotations

from hidet.graph import FlowGraph

from hidet_dist.compile.cuda.find_attention import attention_in_one_kernel
from hidet_dist.compile.cuda.find_rows import rows_in_one_kernel


def fewer_launches(graph: FlowGraph) -> FlowGraph:
    """Return an equivalent graph with fewer kernels; the given graph is not changed."""
    return rows_in_one_kernel(attention_in_one_kernel(graph))
