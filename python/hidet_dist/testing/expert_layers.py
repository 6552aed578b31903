"""A layer of experts to try, of any form that the rules know."""

from __future__ import annotations

import hidet
import numpy as np
import torch

from hidet_dist import operators
from hidet_dist.operators.expert_layers import ExpertLayerOp

TOKENS, SIZE, INNER, COLUMNS = 12, 8, 6, 10
"""The sizes of the layer: tokens, what they have, what an expert computes between its products, and what it returns."""


def expert_layer(
    experts: int = 5,
    choices: int = 2,
    tokens: int = TOKENS,
    gated: bool = True,
    biased: bool = False,
    transposed: bool = False,
) -> tuple[hidet.FlowGraph, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Make the graph of a layer, and inputs for it, in which no token chose the last expert.

    Its inputs are the tokens, float32[tokens, SIZE], the chosen experts, int32[tokens, choices], and their scales,
    float32[tokens, choices].
    """
    generator = torch.Generator().manual_seed(experts)
    x, chosen, scales = (
        hidet.symbol([tokens, SIZE], "float32"),
        hidet.symbol([tokens, choices], "int32"),
        hidet.symbol([tokens, choices], "float32"),
    )

    def weight(size: int, columns: int) -> hidet.Tensor:
        values = torch.randn(experts, size, columns, generator=generator)
        return hidet.from_torch(values.mT.contiguous() if transposed else values)

    def product(x: hidet.Tensor, size: int, columns: int, *scales: hidet.Tensor) -> hidet.Tensor:
        return operators.expert_product(x, weight(size, columns), chosen, *scales, transposed=transposed)

    y = product(x, SIZE, INNER)
    if biased:
        ones = hidet.ones([tokens, 1], "float32")
        bias = hidet.from_torch(torch.randn(experts, 1, INNER, generator=generator))
        y = y + operators.expert_product(ones, bias, chosen)
    y = hidet.ops.silu(y) * product(x, SIZE, INNER) if gated else hidet.ops.relu(y) + 1.0
    graph = hidet.trace_from(product(y, INNER, COLUMNS, scales), [x, chosen, scales])
    numbers = [torch.randperm(experts - 1, generator=generator)[:choices] for _ in range(tokens)]
    inputs = (
        torch.randn(tokens, SIZE, generator=generator).double().numpy(),
        torch.stack(numbers).int().numpy(),
        torch.rand(tokens, choices, generator=generator).double().numpy(),
    )
    return graph, inputs


def layer_of(graph: hidet.FlowGraph) -> tuple[int, ExpertLayerOp]:
    """Return the number and the operator of a graph's only layer that is one operator."""
    (found,) = ((number, op) for number, op in enumerate(graph.nodes) if isinstance(op, ExpertLayerOp))
    return found
