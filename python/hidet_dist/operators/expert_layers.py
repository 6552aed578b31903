"""Layers of experts as one operator: products by the chosen experts, what is computed between them, and their sum.

Apart, the products of a layer cannot be split by experts alone: after the first products, a device lacks the rows of
other devices' experts. Partial results would be summed up before an activation, which is not linear. The definition of
the layer as one operator sums over experts what each of them computes. So splitting the experts leaves partial sums of
the layer's output alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.compute import GridCompute, TensorInput
from hidet.ir.dtypes import float32, int32
from hidet.ir.expr import Expr, TensorElement, Var, cast, equal, if_then_else
from hidet.ir.tools import collect, rewrite

from hidet_dist.operators.experts import DTYPES
from hidet_dist.spec.extents import Extent, extents_of, same_extent, same_shape
from hidet_dist.traits import Half, Routed, RoutedMatrices, RoutedProduct, has_traits, traits_of

T = TypeVar("T")

ElementOf: TypeAlias = Callable[[Expr, Expr, Expr], Expr]
"""An element of what an expert computes, by the token, the expert and the column."""


@dataclass(frozen=True)
class BodyStep:
    """One element-wise operator between the products of a layer.

    Attributes
    ----------
    operator: an operator of the class, of which copies on other shapes are made.
    key: what decides the operator: its class and attributes.
    operands: the numbers of the values that it reads (:class:`LayerBody`).
    """

    operator: Operator = field(compare=False, repr=False)
    key: Any
    operands: tuple[int, ...]


@dataclass(frozen=True)
class LayerBody:
    """What a layer computes between its products, element by element.

    Values are numbered: first the results of the products, then further tensors, then the results of ``steps``. The
    last value is multiplied by the last matrices.
    """

    products: int
    others: int
    steps: tuple[BodyStep, ...]

    def most_live(self) -> int:
        """Count the values that are held at once, at most, if the results of products are made first."""
        first = self.products + self.others
        last_read = {value: number for number, step in enumerate(self.steps) for value in step.operands}
        held = most = self.products
        for number, step in enumerate(self.steps):
            most = max(most, held + 1)
            read = [value for value in {*step.operands} if value < self.products or value >= first]
            held += 1 - sum(last_read[value] == number for value in read)
        return most


CHOSEN, LABELS, SCALES, LAST = range(4)
"""The positions of the tensors that every layer has; the last one are the matrices of its last product."""


def _routed(op: Operator) -> Routed:
    return Routed(CHOSEN, LABELS, op.attrs["products"], RoutedMatrices(LAST, op.attrs["transposed"]))


def _scratch_elements(op: Operator, shapes: Sequence[Sequence[int]]) -> int:
    tokens, choices = shapes[CHOSEN]
    inner = shapes[LAST][2 if op.attrs["transposed"] else 1]
    body: LayerBody = op.attrs["body"]
    return body.most_live() * tokens * choices * inner


@has_traits(
    kernel="matmul",
    half=Half.ALWAYS,
    counted_dims=lambda op: frozenset(),
    routed=_routed,
    whole_dims=lambda op: frozenset({(LAST, 1 if op.attrs["transposed"] else 2)}),  # of the columns of its output
    scratch_elements=_scratch_elements,
)
class ExpertLayerOp(Operator):
    """``out[t] = sum over choices c of scales[t, c] * expert[chosen[t, c]](rows[t])``.

    An expert multiplies rows by one or several matrices, computes a value of the products' elements at each column, and
    multiplies these by its last matrix. It stands in graphs that are planned. Programs have its products instead, see
    :mod:`hidet_dist.partitioning.expert_layers`.

    Parameters
    ----------
    tensors: Tensor
        In this order:

        * the chosen experts, int32[tokens, choices]; those of a token are different ones;
        * the labels of the experts, int32[experts]: an expert's number + 1, so that padding is no expert's;
        * the scales of choices, float32[tokens, choices] or of the rows' dtype;
        * the last matrices, [experts, inner, columns], or [experts, columns, inner] if ``transposed``;
        * the rows of the first products, [tokens, size] each, their matrices, [experts, size, inner] or transposed, and
          the further tensors of the body, all of whose dims but the last have one element.
    count: int
        The number of experts that choices are among, on all devices together.
    products: sequence of RoutedProduct
        The first products, each with its rows.
    transposed: bool
        Whether the last matrices are transposed.
    body: LayerBody
        What is computed between the products.

    Raises
    ------
    ValueError
        When the shapes or dtypes of the tensors do not fit.
    """

    def __init__(
        self, *tensors: Tensor, count: int, products: Sequence[RoutedProduct], transposed: bool, body: LayerBody
    ):
        attributes: dict[str, Any] = {
            "count": int(count),
            "products": tuple(products),
            "transposed": bool(transposed),
            "body": body,
        }
        _check(tensors, products, transposed)
        inputs = [input_like(x, f"x{number}") for number, x in enumerate(tensors)]
        chosen, labels, scales, last = inputs[: LAST + 1]
        dtype = tensors[LAST].dtype
        experts, *sides = last.shape
        columns, inner = sides if transposed else reversed(sides)
        tokens, choices = chosen.shape
        results = [
            _result(inputs[one.rows], inputs[one.weight], one.transposed, f"product{number}", tensors[one.weight].dtype)
            for number, one in enumerate(products)
        ]
        value = compute("value", [tokens, experts, inner], _inlined(body, results, further(inputs, products)))

        def chose(t: Expr, e: Expr, c: Expr) -> Expr:
            return equal(labels[e], chosen[[t, c]] + 1)

        count_of = compute(
            "count",
            [tokens, experts],
            lambda t, e: reduce([choices], lambda c: if_then_else(chose(t, e, c), int32.one, int32.zero), "sum"),
        )
        scale = compute(
            "scale",
            [tokens, experts],
            lambda t, e: reduce(
                [choices],
                lambda c: if_then_else(chose(t, e, c), cast(scales[[t, c]], float32), float32.zero),
                "sum",
            ),
        )

        def product(t: Expr, column: Expr, e: Expr, k: Expr) -> Expr:
            element = last[[e, column, k]] if transposed else last[[e, k, column]]
            scaled = cast(value[[t, e, k]], float32) * cast(element, float32) * scale[[t, e]]
            # Zeros by choice and not by multiplication: what is not a finite number must not reach other rows.
            return if_then_else(count_of[[t, e]] > 0, scaled, float32.zero)

        y = compute(
            "y",
            [tokens, columns],
            lambda t, n: cast(reduce([experts, inner], lambda e, k: product(t, n, e, k), "sum"), dtype),
        )
        super().__init__(list(tensors), attributes, Task("expert_layer", inputs, [y], attributes={}))


def further(tensors: Sequence[T], products: Sequence[RoutedProduct]) -> list[T]:
    """Select a layer's tensors that only its body reads: those which are no operands of products."""
    read = {*range(LAST + 1), *(position for one in products for position in (one.rows, one.weight))}
    return [x for position, x in enumerate(tensors) if position not in read]


def _check(tensors: Sequence[Tensor], products: Sequence[RoutedProduct], transposed: bool) -> None:
    """Refuse tensors that do not fit. Raises ValueError."""
    shapes = [extents_of(x) for x in tensors]
    chosen, labels, scales, last = shapes[: LAST + 1]
    experts = last[0]
    inner = last[2 if transposed else 1]
    fits = [(labels[0], experts), *zip(scales, chosen, strict=True)]
    for one in products:
        rows, (of, *own) = shapes[one.rows], shapes[one.weight]
        columns, size = own if one.transposed else reversed(own)
        fits += [(rows[0], chosen[0]), (rows[1], size), (of, experts), (columns, inner)]
    dtypes = {tensors[position].dtype.name for one in products for position in (one.rows, one.weight)}
    if not products or {*dtypes, tensors[LAST].dtype.name} - {*DTYPES} or len({*dtypes}) > 1:
        raise ValueError(f"The rows and matrices of a layer of experts have one of the dtypes {', '.join(DTYPES)}.")
    if any(tensors[position].dtype.name != "int32" for position in (CHOSEN, LABELS)):
        raise ValueError("The chosen experts and the labels of experts are int32.")
    # As kernels of products need them as numbers.
    sides = [size for position in (LAST, *(one.weight for one in products)) for size in shapes[position]]
    if not all(isinstance(size, int) for size in sides) or not all(same_extent(a, b) for a, b in fits):
        shown = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
        raise ValueError(f"The shapes of a layer of experts do not fit: {shown}.")


def _result(rows: TensorInput, weight: TensorInput, transposed: bool, name: str, dtype: Any) -> ElementOf:
    """Define the product of all rows by the matrices of all experts, of which those that are chosen are used."""
    experts, *sides = weight.shape
    columns, inner = sides if transposed else reversed(sides)

    def product(t: Expr, e: Expr, n: Expr) -> Expr:
        def element(k: Expr) -> Expr:
            matrix = weight[[e, n, k]] if transposed else weight[[e, k, n]]
            return cast(rows[[t, k]], float32) * cast(matrix, float32)

        return cast(reduce([inner], element, "sum"), dtype)

    y = compute(name, [rows.shape[0], experts, columns], product)
    return lambda t, e, n: y[[t, e, n]]


def _inlined(body: LayerBody, results: Sequence[ElementOf], others: Sequence[TensorInput]) -> ElementOf:
    """Define the value that a body computes."""

    def of_other(x: TensorInput) -> ElementOf:
        return lambda t, e, k: x[[*[0] * (len(x.shape) - 1), k if not same_extent(x.shape[-1], 1) else 0]]

    values = [*results, *map(of_other, others)]

    def at(t: Expr, e: Expr, k: Expr) -> Expr:
        known: dict[int, Expr] = {}

        def value(number: int) -> Expr:
            if number not in known:
                if number < len(values):
                    known[number] = values[number](t, e, k)
                else:
                    step = body.steps[number - len(values)]
                    known[number] = _of_step(step, [value(one) for one in step.operands])
            return known[number]

        return value(len(values) + len(body.steps) - 1)

    return at


def _of_step(step: BodyStep, operands: Sequence[Expr]) -> Expr:
    """Write an element of an operator's result by the elements that it reads."""
    task = step.operator.task
    grid = task.outputs[0]
    assert isinstance(grid, GridCompute)
    elements: dict[Any, Expr] = {
        element: operands[task.inputs.index(element.base)]
        for element in collect(grid.value, TensorElement)
        if element.base in task.inputs
    }
    return rewrite(grid.value, elements)


def is_body_operator(op: Operator, shape: Sequence[Extent]) -> bool:
    """Whether an operator may be a step of a body: each element of its result is computed from those at its index.

    ``shape`` is that of the products, [tokens, choices, columns]. Operands have this shape, or none of its dims but the
    last.
    """
    if not traits_of(op).elementwise or len(op.outputs) != 1 or not same_shape(extents_of(op.outputs[0]), shape):
        return False
    grid = op.task.outputs[0]
    if not isinstance(grid, GridCompute) or not all(is_operand(x, shape) for x in op.inputs):
        return False
    elements = [one for one in collect(grid.value, TensorElement) if one.base in op.task.inputs]
    # What is left beside the elements must not depend on where they are.
    left = collect(rewrite(grid.value, {one: Var("element", op.outputs[0].dtype) for one in elements}), Var)
    return not any(axis is var for var in left for axis in grid.axes)


def is_operand(x: Tensor, shape: Sequence[Extent]) -> bool:
    """Whether a tensor has the shape [tokens, choices, columns] of products, or none of its dims but the last."""
    own = extents_of(x)
    whole = same_shape(own, shape)
    of_columns = all(same_extent(size, 1) for size in own[:-1]) and (
        not own or same_extent(own[-1], 1) or same_extent(own[-1], shape[-1])
    )
    return whole or of_columns
