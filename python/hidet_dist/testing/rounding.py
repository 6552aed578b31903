"""The tolerance for differences between two correct programs by rounding.

Rounding errors are assumed to be independent and of mean zero. After n roundings, each of relative size u at most, the
relative error of a value is then at most lambda * sqrt(n) * u, except with a probability of 2 exp(-lambda^2 / 2)
(Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019, theorem
2.4). Here n is counted along the path through the graph with the most roundings, and lambda is chosen such that, by
this bound, one value in :data:`ODDS` outputs has a larger error. Errors are relative to an output's largest value,
which bounds the sizes of cancelled terms in networks with normalized activations.
"""

from __future__ import annotations

import math

import torch
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.cost.work import kernel_class
from hidet_dist.weights.named import is_weight

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoffs of mantissas of 24, 11 and 8 bits."""
ODDS = 1000
"""The number of outputs among which, by the bound, one has a value with an error above the tolerance."""


def tolerance(graph: FlowGraph, precision: str) -> float:
    """Compute the largest error of an output, relative to its largest value, that rounding explains.

    Parameters
    ----------
    graph: FlowGraph
        A float32 graph.
    precision: str
        The dtype of the computation: ``float32``, or ``float16`` or ``bfloat16`` with sums in float32.
    """
    graph.update_nodes()
    variance: dict[Tensor, float] = {}
    for op in graph.nodes:
        reached = max((variance.get(x, 0.0) for x in op.inputs), default=0.0)
        for y in op.outputs:
            variance[y] = reached + _variance(op, precision)
    values = max(math.prod(int(extent) for extent in y.shape) for y in graph.outputs)
    certainty = math.sqrt(2 * math.log(2 * values * ODDS))
    return certainty * math.sqrt(max(variance.get(y, 0.0) for y in graph.outputs))


def _variance(op: Operator, precision: str) -> float:
    """Sum the squares of an operator's unit roundoffs: of its terms, its result, and its half-precision weights."""
    kind = kernel_class(op)
    if kind in ("copy", "lookup") or not op.outputs[0].dtype.is_float():
        return 0.0
    weights = sum(x.storage is not None or is_weight(x) for x in op.inputs) if precision != "float32" else 0
    return _terms(op, kind) * UNIT_ROUNDOFF["float32"] ** 2 + (1 + weights) * UNIT_ROUNDOFF[precision] ** 2


def _terms(op: Operator, kind: str) -> int:
    """Count the terms of the sum in an element of the result."""
    first = [int(extent) for extent in op.inputs[0].shape]
    if kind in ("matmul", "normalization"):
        return first[-1]
    if kind == "convolution":
        return math.prod(int(extent) for extent in op.inputs[1].shape[1:])
    if kind in ("reduction", "pooling"):
        return max(1, math.prod(first) // math.prod(int(extent) for extent in op.outputs[0].shape))
    return 0


def rounded_weight(weight: torch.Tensor, precision: str, group: int) -> torch.Tensor:
    """Round a weight of a product as artifacts store it in 8 or 4 bits: float64, of the same shape.

    Ties are rounded as :func:`hidet_dist.weights.packing.quantized` has it.

    Parameters
    ----------
    weight: Tensor
        Of shape [columns, depth], as that of a linear layer.
    precision: str
        ``int8`` or ``int4``.
    group: int
        The elements of a row that have one scale.
    """
    depth = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -depth % group)).unflatten(1, (-1, group))
    if precision == "int8":
        scales = (padded.abs().amax(2, keepdim=True) / 127).half().float()
        multiples = (padded * (1 / scales)).round().clamp(-127, 127)
    else:
        scales = (padded.gather(2, padded.abs().argmax(2, keepdim=True)) / -8).half().float()
        multiples = (padded * (1 / scales) + 8.5).floor().clamp(0, 15) - 8
    return (multiples.double() * scales.double()).flatten(1)[:, :depth]
