"""The products of layers of experts, which a program has in the place of the layers that are planned."""

from __future__ import annotations

from hidet.graph import Tensor

from hidet_dist.operators.expert_layers import LAST, ExpertLayerOp, further
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.rules.local import rebuild
from hidet_dist.spec.extents import extents_of


def separated(layer: ExpertLayerOp) -> Tensor:
    """Compute a layer, which may be that of some experts or some columns, by its products and the steps between them.

    Rows of experts that a device does not have are zeros after the first products, and whatever the steps make of
    zeros before the last one, which leaves them out.
    """
    chosen, labels, scales, last = layer.inputs[: LAST + 1]
    count = layer.attrs["count"]
    products = layer.attrs["products"]
    values = [
        ExpertProductOp(
            layer.inputs[one.rows],
            layer.inputs[one.weight],
            chosen,
            labels,
            count=count,
            transposed=one.transposed,
            is_summed=False,
        ).outputs[0]
        for one in products
    ]
    shape = extents_of(values[0])
    values += further(layer.inputs, products)
    for step in layer.attrs["body"].steps:
        values += rebuild(step.operator, [values[number] for number in step.operands], [shape])
    rows = values[-1]
    return ExpertProductOp(
        rows, last, chosen, labels, scales, count=count, transposed=layer.attrs["transposed"], is_summed=True
    ).outputs[0]
