"""Products in half precision with an odd number of columns, such as GPT-2's head of 50257, get a few columns more.

Kernels for tensor cores read and write several columns at once: hidet's take an even number of them, and are fastest
where eight lie at an aligned place; cuBLAS too wants rows of half precision to be a multiple of 16 bytes apart (cuBLAS
Library, "Tensor Core Usage"). So weights are padded with columns of zeros, and the result is cut. They are padded
before anything is planned, so that costs, memory and the program are of the same sizes, and to a multiple that leaves
eight columns' alignment to a shard on any number of the mesh's devices.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import hidet
import torch
from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp

from hidet_dist.normalize.normal_form import as_normal, normalize
from hidet_dist.weights.named import is_weight, padded_weight

_ALIGNMENT = 8  # elements of two bytes, that a thread reads or writes at once
_LEAST_COLUMNS = 32  # with fewer, padding is more than what tensor cores save


@dataclass(frozen=True)
class PaddedGraph:
    """The graph, in normal form, and what has taken the place of each weight that was padded."""

    graph: FlowGraph
    weights: dict[Tensor, Tensor]


def pad_columns(graph: FlowGraph, devices: int) -> PaddedGraph:
    """``graph`` in normal form, with weights padded for the sake of the products that they are in.

    Parameters
    ----------
    graph: FlowGraph
        The graph; it is left as it is.
    devices: int
        The number of devices of the mesh that it is planned for.
    """
    normal = normalize(graph)
    normal.update_nodes()
    multiple = _ALIGNMENT * devices
    wanted = _weights_to_pad(normal)
    if not wanted:
        return PaddedGraph(normal, {})
    weights = {}
    new: dict[Tensor, Tensor] = {}
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        for weight, dim in wanted.items():
            weights[weight] = _padded(weight, dim, -(-int(weight.shape[dim]) // multiple) * multiple)
        for op in normal.nodes:
            if not any(x in new or x in weights for x in op.inputs):
                continue
            moved = copy.copy(op)
            moved.inputs = [weights.get(x, new.get(x, x)) for x in op.inputs]
            if op.inputs[-1] in weights:
                columns = op.outputs[0].shape[-1]
                result = moved.reforward(moved.inputs)[0]
                axis = len(result.shape) - 1
                new[op.outputs[0]] = hidet.ops.strided_slice(result, [0], [int(columns)], [axis])
            else:
                moved.outputs = moved.symbolic_run()
                new.update(zip(op.outputs, moved.outputs, strict=True))
    padded = FlowGraph([new.get(y, y) for y in normal.outputs], normal.inputs)
    padded.update_nodes()
    return PaddedGraph(as_normal(padded), weights)


def _weights_to_pad(graph: FlowGraph) -> dict[Tensor, int]:
    """The dims of columns to pad: of weights that nobody reads but such products."""
    dims: dict[Tensor, int | None] = {}
    for op in graph.nodes:
        for place, x in enumerate(op.inputs):
            dim = _columns_to_pad(op) if place == 1 else None
            dims[x] = dim if x not in dims or dims[x] == dim else None
    for x in (*graph.inputs, *graph.outputs):
        dims[x] = None
    return {x: dim for x, dim in dims.items() if dim is not None}


def _columns_to_pad(op: Operator) -> int | None:
    """Which dim of a product's weight is to be padded, or None."""
    if not isinstance(op, MatmulOp) or not op.outputs[0].dtype.is_any_float16():
        return None
    weight = op.inputs[1]
    if not (weight.storage is not None or is_weight(weight)) or len(weight.shape) < 2:
        return None
    dim = len(weight.shape) - (2 if op.attrs["transpose_b"] else 1)
    columns = int(weight.shape[dim])
    return dim if columns >= _LEAST_COLUMNS and columns % _ALIGNMENT else None


def _padded(weight: Tensor, dim: int, size: int) -> Tensor:
    if is_weight(weight):
        return padded_weight(weight, dim, size)
    behind = [0, 0] * (len(weight.shape) - 1 - dim) + [0, size - int(weight.shape[dim])]
    return hidet.from_torch(torch.nn.functional.pad(weight.torch(), behind))
