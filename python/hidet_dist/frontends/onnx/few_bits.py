"""Lowering of products by matrices of few bits, in blocks of a row's elements, as ONNX Runtime's tools write them.

The matrix becomes a weight that has its elements as the file has them (:mod:`hidet_dist.weights.grouped_matrix`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.initializers import tensor_of
from hidet_dist.frontends.onnx.nodes import MICROSOFT, Node, lowers, rank_of, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise
from hidet_dist.operators.dtypes import constant
from hidet_dist.weights.grouped_matrix import Elements, GroupedMatrix, PackedNumbers, places_in_order
from hidet_dist.weights.named import InMemory, mark_of, part_of_weight, weight_as, weight_of
from hidet_dist.weights.safetensors_file import StoredTensor

_BITS = (4, 8)
_BYTE = 8


@lowers("MatMulNBits", domains=(MICROSOFT,))
def _matmul_n_bits(node: Node) -> Tensor:
    x, weight = node.tensor(0), _matrix(node)
    if static(x, rank_of(x) - 1, "the depth of a product") != weight.shape[1]:
        raise Invalid(f"the depth of the product is {x.shape[-1]}, and the matrix has {weight.shape[1]} columns")
    y = operators.matmul(x, weight, transposed=True)
    return y if node.value(5) is None else elementwise.add(y, node.tensor(5))


def _matrix(node: Node) -> Tensor:
    """Make the weight [N, K], in the dtype of the first input.

    Raises
    ------
    Invalid
        When the sizes and the tensors of the node do not fit one another.
    Refused
        When the matrix has other bits than 4 or 8, depends on the model's inputs, or its blocks are not of neighbouring
        columns.
    """
    rows, columns = int(node.attributes["N"]), int(node.attributes["K"])
    bits, block = int(node.get("bits", 4)), int(node.attributes["block_size"])
    if bits not in _BITS:
        raise Refused(f"a matrix of {bits} bits is not supported")
    if min(rows, columns, block) < 1 or block * bits % _BYTE:
        raise Invalid(f"a matrix of {bits} bits is {rows} by {columns}, in blocks of {block}")
    if node.value(4) is not None:
        raise Refused("a matrix whose columns are in an order of their own (g_idx) is not supported")
    blocks = -(-columns // block)
    places = places_in_order(bits, _BYTE)
    numbers = PackedNumbers(_elements(node, 1, "uint8", (rows, blocks * block * bits // _BYTE)), 1, bits, places)
    scales = _elements(node, 2, "", (rows, blocks))
    zeros = None
    if node.value(3) is not None:
        zeros = PackedNumbers(_elements(node, 3, "uint8", (rows, -(-blocks * bits // _BYTE))), 1, bits, places)
    matrix = GroupedMatrix(numbers, scales, zeros, block)
    dtype, mark = node.tensor(0).dtype.name, mark_of(node.value(1)) if isinstance(node.value(1), Tensor) else None
    if mark is None:  # so small that its elements are known
        return constant(matrix.read([slice(0, rows), slice(0, columns)]).numpy(), dtype, node.like)
    weight = weight_of(mark.name, matrix, matrix.shape, "float32")
    weight = weight if columns == matrix.shape[1] else part_of_weight(weight, 1, 0, columns)
    return weight if dtype == "float32" else weight_as(weight, dtype)


def _elements(node: Node, position: int, dtype: str, shape: tuple[int, ...]) -> Elements:
    """Return the elements of an input that is part of the model, in another shape. An empty ``dtype`` is any float."""
    value = node.value(position)
    if value is None:
        raise Invalid(f"input {position} is missing")
    mark = mark_of(value) if isinstance(value, Tensor) else None
    if mark is None and not isinstance(value, np.ndarray):
        raise Refused(f"input {position} depends on the model's inputs, and must be known while it is traced")
    found = value.dtype.name
    if found != dtype if dtype else found not in ("float32", "float16", "bfloat16"):
        raise Refused(f"input {position} of {found} is not supported")
    if math.prod(map(int, value.shape)) != math.prod(shape):
        raise Invalid(
            f"input {position} has the shape {list(map(int, value.shape))}, and must have that of {list(shape)}"
        )
    if mark is None:
        return InMemory(tensor_of(np.ascontiguousarray(value)).reshape(shape))
    if isinstance(mark.stored, InMemory):
        return InMemory(mark.stored.data.reshape(shape))
    return replace(cast(StoredTensor, mark.stored), shape=shape)
