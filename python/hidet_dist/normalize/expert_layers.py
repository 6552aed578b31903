"""The join of layers of experts to one operator each, which can be split by experts alone.

Which is better depends on the machine and the budget. Layers as operators can be split by experts, and their tokens be
dispatched: that moves fewer bytes where tokens choose few experts of many devices. Layers as products can be converted
between the products, and have finer choices where memory is scarce. So it is an option, ``experts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hidet.graph import Operator, Tensor

from hidet_dist.normalize.normal_form import NormalGraph
from hidet_dist.operators.expert_layers import LAST, BodyStep, ExpertLayerOp, LayerBody, is_body_operator, is_operand
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.rewriting import Uses, rewrite, uses_of
from hidet_dist.rules.local import plain_attributes
from hidet_dist.spec import Plan
from hidet_dist.spec.extents import extents_of, same_shape
from hidet_dist.traits import RoutedProduct

_NAME = ExpertLayerOp.__name__.removesuffix("Op")


def join_expert_layers(graph: NormalGraph) -> NormalGraph:
    """Join the products of each layer of experts, and what is computed between them, to one operator.

    A layer ends with a product that sums up the choices of tokens. Its rows are computed element by element from
    products with the same chosen experts, which nothing else reads. Other products stay as they are.
    """
    uses = uses_of(graph)

    def joined(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        layer = _layer_of(op, uses)
        if layer is None:
            return None
        tensors, attributes = layer
        return ExpertLayerOp(*(replaced.get(x, x) for x in tensors), **attributes).outputs[0]

    return NormalGraph.of(rewrite(graph, joined), graph.symbols)


def has_joined_layers(plan: Plan) -> bool:
    """Whether a plan was made for a graph whose layers of experts are joined."""
    return any(op.operator == _NAME for stage in plan.stages for op in stage.operators)


def _layer_of(op: Operator, uses: Uses) -> tuple[list[Tensor], dict[str, Any]] | None:
    """List the tensors and attributes of the layer that a product ends; None if it ends none."""
    if not isinstance(op, ExpertProductOp) or not op.attrs["is_summed"] or len(op.inputs[0].shape) != 3:
        return None
    rows, last, chosen, labels, scales = op.inputs
    between = _Between(op)
    if not between.reaches(rows) or not between.products or not between.is_read_only(uses):
        return None
    position: dict[Tensor, int] = {}
    entries = []
    for product in between.products:
        x, weight = (position.setdefault(y, LAST + 1 + len(position)) for y in product.inputs[:2])
        entries.append(RoutedProduct(weight, bool(product.attrs["transposed"]), x))
    attributes = {
        "count": op.attrs["count"],
        "products": entries,
        "transposed": op.attrs["transposed"],
        "body": between.body(),
    }
    return [chosen, labels, scales, last, *position, *between.others], attributes


class _Between:
    """What computes the rows of a layer's last product, from the products with which the layer begins."""

    def __init__(self, last: ExpertProductOp):
        self.last = last
        self.shape = extents_of(last.inputs[0])
        self.products: list[ExpertProductOp] = []
        self.others: list[Tensor] = []
        self.steps: list[Operator] = []  # each after those that it reads
        self.seen: set[Tensor] = set()

    def reaches(self, x: Tensor) -> bool:
        """Add what computes a tensor; return False if that cannot be a part of a layer."""
        if x in self.seen:
            return True
        self.seen.add(x)
        op = x.op
        if isinstance(op, ExpertProductOp):
            self.products.append(op)
            return self.begins(op)
        if not same_shape(extents_of(x), self.shape):
            self.others.append(x)
            return is_operand(x, self.shape)
        if op is None or not is_body_operator(op, self.shape) or plain_attributes(op) is None:
            return False
        if not all(map(self.reaches, op.inputs)):
            return False
        self.steps.append(op)
        return True

    def begins(self, op: ExpertProductOp) -> bool:
        """Whether a layer may begin with a product: by the same experts, with one row for all choices of a token."""
        same = all(_is_same(x, y) for x, y in zip(op.inputs[2:4], self.last.inputs[2:4], strict=True))
        is_of_tokens = not op.attrs["is_summed"] and len(op.inputs[0].shape) == 2
        return same and is_of_tokens and bool(op.attrs["count"] == self.last.attrs["count"])

    def is_read_only(self, uses: Uses) -> bool:
        """Whether nothing but the layer reads what it computes."""
        within = {self.last, *self.steps}
        return all(user in within for op in (*self.products, *self.steps) for user in uses[op.outputs[0]])

    def body(self) -> LayerBody:
        """Describe the steps."""
        values = [*(op.outputs[0] for op in self.products), *self.others, *(op.outputs[0] for op in self.steps)]
        number = {x: place for place, x in enumerate(values)}
        steps = (
            BodyStep(op, (type(op).__name__, plain_attributes(op)), tuple(number[x] for x in op.inputs))
            for op in self.steps
        )
        return LayerBody(len(self.products), len(self.others), tuple(steps))


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same, or constants of the same integers."""
    if x is y:
        return True
    if x.storage is None or y.storage is None or not (x.dtype == y.dtype and x.dtype.is_integer()):
        return False
    return bool(x.torch().equal(y.torch()))
