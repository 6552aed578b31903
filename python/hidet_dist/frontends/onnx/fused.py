"""Lowerings of operators that ONNX Runtime's optimizer fuses others into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.arithmetic import gemm
from hidet_dist.frontends.onnx.layers import convolved
from hidet_dist.frontends.onnx.nodes import MICROSOFT, Node, lowers, rank_of, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.spec.extents import extents_of


def _with_bias(node: Node) -> Tensor:
    """The first input, with the second one added if it is given."""
    x = node.tensor(0)
    return x if node.value(1) is None else elementwise.add(x, node.tensor(1))


@lowers("Gelu", "BiasGelu", domains=(MICROSOFT,))
def _gelu(node: Node) -> Tensor:
    return elementwise.gelu(_with_bias(node))


@lowers("FastGelu", domains=(MICROSOFT,))
def _fast_gelu(node: Node) -> Tensor:
    return elementwise.gelu(_with_bias(node), "tanh")


@lowers("QuickGelu", domains=(MICROSOFT,))
def _quick_gelu(node: Node) -> Tensor:
    x = node.tensor(0)
    return elementwise.mul(x, elementwise.sigmoid(elementwise.mul(x, node.get("alpha", 1.702))))


@lowers("FusedMatMul", "TransposeMatMul", domains=(MICROSOFT,))
def _fused_matmul(node: Node) -> Tensor:
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        raise Refused("a product whose batch is transposed is not supported")
    a, b = node.tensor(0), node.tensor(1)
    if node.get("transA", 0) and rank_of(a) > 1:
        a = ops.permute_dims(a, [*range(rank_of(a) - 2), rank_of(a) - 1, rank_of(a) - 2])
    y = operators.matmul(a, b, transposed=bool(node.get("transB", 0)) and rank_of(b) > 1)
    alpha = node.get("alpha", 1.0)
    return y if alpha == 1 else elementwise.mul(y, alpha)


# Activations that are fused into products, with the number of their parameters.
_ACTIVATIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "": (0, lambda x: x),
    "Relu": (0, elementwise.relu),
    "Sigmoid": (0, elementwise.sigmoid),
    "Tanh": (0, elementwise.tanh),
    "LeakyRelu": (1, elementwise.leaky_relu),
    "Clip": (2, elementwise.clamp),
    "HardSigmoid": (
        2,
        lambda x, alpha, beta: elementwise.clamp(elementwise.add(elementwise.mul(x, alpha), beta), 0.0, 1.0),
    ),
}


def _activated(x: Tensor, name: str, parameters: list[float]) -> Tensor:
    """Apply an activation. As in ONNX Runtime, one without parameters ignores those that are given."""
    if name not in _ACTIVATIONS:
        raise Refused(f"the activation {name!r} is not supported")
    count, function = _ACTIVATIONS[name]
    if len(parameters) < count:
        raise Invalid(f"the activation {name} has {len(parameters)} of {count} parameters")
    return function(x, *parameters[:count])


@lowers("FusedGemm", domains=(MICROSOFT,))
def _fused_gemm(node: Node) -> Tensor:
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    parameters = [float(node.attributes[name]) for name in names if name in node.attributes]
    return _activated(gemm(node), node.text("activation", ""), parameters)


@lowers("FusedConv", domains=(MICROSOFT,))
def _fused_conv(node: Node) -> Tensor:
    y = convolved(node)
    y = y if node.value(3) is None else elementwise.add(y, node.tensor(3))
    return _activated(y, node.text("activation", ""), [float(p) for p in node.get("activation_params", [])])


# Normalization


def _normalized(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    return operators.layer_norm(x, [extents_of(x)[-1]], gamma, beta, eps)


@lowers("SimplifiedLayerNormalization", domains=(MICROSOFT,))
def _simplified_layer_normalization(node: Node) -> Tensor:
    x = node.tensor(0)
    shape = list(extents_of(x)[node.get("axis", -1) % rank_of(x) :])
    return operators.rms_norm(x, shape, node.tensor(1), node.get("epsilon", 1e-5))


@lowers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domains=(MICROSOFT,))
def _skip_layer_normalization(node: Node) -> tuple[Tensor | None, ...]:
    if any(node.outputs[1:3]):
        raise Refused("the mean and the deviation of a fused layer norm are not supported")
    simplified = node.operator == "SkipSimplifiedLayerNormalization"
    total, eps = elementwise.add(node.tensor(0), node.tensor(1)), node.get("epsilon", 1e-12)
    bias = node.optional(3 if simplified else 4)
    total = total if bias is None else elementwise.add(total, bias)
    if simplified:
        y = operators.rms_norm(total, [extents_of(total)[-1]], node.tensor(2), eps)
    else:
        y = _normalized(total, node.tensor(2), node.optional(3), eps)
    return y, None, None, total


@lowers("EmbedLayerNormalization", domains=(MICROSOFT,))
def _embed_layer_normalization(node: Node) -> tuple[Any, ...]:
    ids, words, places = node.tensor(0), node.tensor(2), node.tensor(3)
    total = ops.take(words, ids, 0)
    if node.value(8) is not None:
        where = ops.take(places, node.tensor(8), 0)
    else:
        where = ops.strided_slice(places, [0], [static(ids, 1, "the length of a sequence")], [0])
    total = elementwise.add(total, where)
    if node.value(1) is not None:
        total = elementwise.add(total, ops.take(node.tensor(4), node.tensor(1), 0))
    y = _normalized(total, node.tensor(5), node.tensor(6), node.get("epsilon", 1e-12))
    if node.value(7) is None:
        counts = constant(np.zeros(static(ids, 0, "the batch")), "int32", ids)
    else:
        counts = to_dtype(reductions.sum(node.tensor(7), [1]), "int32")
    return y, counts, total
