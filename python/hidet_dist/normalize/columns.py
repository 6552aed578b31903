"""Padding of half-precision products with an odd number of columns, such as GPT-2's head of 50257.

Kernels for tensor cores read and write several columns at once. hidet's need an even number of columns, and are fastest
if eight columns are aligned. cuBLAS, too, requires rows of half precision to be a multiple of 16 bytes apart (cuBLAS
Library, "Tensor Core Usage"). So weights are padded with columns of zeros, and the result is cut. Weights are padded
before planning, so that costs, memory and the program have the same sizes. The multiple keeps shards on any number of
the mesh's devices aligned to eight columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp

from hidet_dist.normalize.normal_form import NormalGraph
from hidet_dist.rewriting import rewrite
from hidet_dist.weights.named import is_weight, padded_weight

_ALIGNMENT = 8  # elements of two bytes that a thread reads or writes at once
_LEAST_COLUMNS = 32  # with fewer, padding costs more than tensor cores save


@dataclass(frozen=True)
class PaddedGraph:
    """A graph with padded weights, and the padded weight of each weight that was replaced."""

    graph: NormalGraph
    weights: dict[Tensor, Tensor]


def pad_columns(graph: NormalGraph, devices: int) -> PaddedGraph:
    """Pad the columns of weights for the products that read them.

    The result is in normal form. It must not be normalized again: that would move the cut of a product's result to the
    weight, and undo the padding.

    Parameters
    ----------
    graph: NormalGraph
        The graph; it is not changed.
    devices: int
        The number of devices of the mesh to plan for.
    """
    graph.update_nodes()
    multiple = _ALIGNMENT * devices
    wanted = _weights_to_pad(graph)
    if not wanted:
        return PaddedGraph(graph, {})
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        weights = {x: _padded(x, -(-int(x.shape[-1]) // multiple) * multiple) for x in wanted}

        def cut(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
            weight = weights.get(op.inputs[-1]) if op.inputs else None
            if weight is None:
                return None
            result = op.reforward([*(replaced.get(x, x) for x in op.inputs[:-1]), weight])[0]
            columns = int(op.outputs[0].shape[-1])
            return hidet.ops.strided_slice(result, [0], [columns], [len(result.shape) - 1])

        padded = rewrite(graph, cut)
    return PaddedGraph(NormalGraph.of(padded), weights)


def _weights_to_pad(graph: FlowGraph) -> list[Tensor]:
    """Find the weights whose only consumers are products that need padding."""
    fit: dict[Tensor, bool] = {}
    for op in graph.nodes:
        for place, x in enumerate(op.inputs):
            fit[x] = fit.get(x, True) and place == 1 and _is_to_pad(op)
    for x in (*graph.inputs, *graph.outputs):
        fit[x] = False
    return [x for x, is_fit in fit.items() if is_fit]


def _is_to_pad(op: Operator) -> bool:
    """Whether a product needs padding. One whose weight is stored column by column takes any number."""
    if not isinstance(op, MatmulOp) or not op.outputs[0].dtype.is_any_float16() or op.attrs["transpose_b"]:
        return False
    weight = op.inputs[1]
    if not (weight.storage is not None or is_weight(weight)) or len(weight.shape) < 2:
        return False
    columns = int(weight.shape[-1])
    return columns >= _LEAST_COLUMNS and columns % _ALIGNMENT != 0


def _padded(weight: Tensor, columns: int) -> Tensor:
    if is_weight(weight):
        return padded_weight(weight, len(weight.shape) - 1, columns)
    return hidet.from_torch(torch.nn.functional.pad(weight.torch(), [0, columns - int(weight.shape[-1])]))
