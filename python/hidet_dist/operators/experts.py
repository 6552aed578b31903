"""Products by experts: each row is multiplied with the matrices of the experts that a router chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.dtypes import float32
from hidet.ir.expr import Expr, cast, equal, if_then_else

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.operators.shaping import reshaped
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import Half, Routed, RoutedProduct, has_traits

DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes of rows and matrices, which are summed up in float32."""


def routed_product(op: Operator) -> Routed:
    """Return the routed inputs of a product by experts, or of its kernel."""
    return Routed(2, 3, (RoutedProduct(1, bool(op.attrs["transposed"]), 0),))


@has_traits(
    kernel="matmul",
    half=Half.ALWAYS,
    counted_dims=lambda op: frozenset(),
    routed=routed_product,
)
class ExpertProductOp(Operator):
    """``out[t, c] = x[t, c] @ weight[chosen[t, c]]`` for each token t and each of its choices c; sums in float32.

    The definition is a sum over experts, each multiplied by whether it is the chosen one. So splitting the experts
    leaves partial sums, and tokens, inner dims and columns split as those of any product. A kernel multiplies each row
    with the matrix of its expert alone. A row whose expert there is not is zeros.

    Parameters
    ----------
    tensors: Tensor
        In this order:

        * the rows, [tokens, choices, inner], or [tokens, inner] if the choices of a token share one;
        * the matrices, [experts, inner, columns], or [experts, columns, inner] if ``transposed``;
        * the chosen experts, int32[tokens, choices]; those of a token are different ones;
        * the labels of the experts, int32[experts]: an expert's number + 1, so that padding is no expert's;
        * with ``is_summed``, the scales, float32[tokens, choices] or of the rows' dtype.
    count: int
        The number of experts that choices are among, on all devices together.
    transposed: bool
        Whether the matrices are transposed.
    is_summed: bool
        Whether the choices of a token are summed up, each times its scale: the output is [tokens, columns], and
        otherwise [tokens, choices, columns].

    Raises
    ------
    ValueError
        When the shapes or dtypes of the tensors do not fit.
    """

    def __init__(self, *tensors: Tensor, count: int, transposed: bool, is_summed: bool):
        attributes = {"count": int(count), "transposed": bool(transposed), "is_summed": bool(is_summed)}
        _check(tensors, attributes)
        names = ["x", "weight", "chosen", "labels", *["scales"] * is_summed]
        inputs = [input_like(x, name) for name, x in zip(names, tensors, strict=True)]
        x, weight, chosen, labels = inputs[:4]
        dtype = tensors[0].dtype
        experts, *sides = weight.shape
        columns, inner = sides if transposed else reversed(sides)
        tokens, choices = chosen.shape

        def product(t: Expr, c: Expr, e: Expr, k: Expr, column: Expr) -> Expr:
            row = x[[t, c, k]] if len(x.shape) == 3 else x[[t, k]]
            element = weight[[e, column, k]] if transposed else weight[[e, k, column]]
            value = cast(row, float32) * cast(element, float32)
            if is_summed:
                value = value * cast(inputs[4][[t, c]], float32)
            # Zeros by choice and not by multiplication: what is not a finite number must not reach other rows.
            return if_then_else(equal(labels[e], chosen[[t, c]] + 1), value, float32.zero)

        if is_summed:
            y = compute(
                "y",
                [tokens, columns],
                lambda t, n: cast(
                    reduce([choices, experts, inner], lambda c, e, k: product(t, c, e, k, n), "sum"), dtype
                ),
            )
        else:
            y = compute(
                "y",
                [tokens, choices, columns],
                lambda t, c, n: cast(reduce([experts, inner], lambda e, k: product(t, c, e, k, n), "sum"), dtype),
            )
        super().__init__(list(tensors), attributes, Task("expert_product", inputs, [y], attributes=attributes))


def _check(tensors: Sequence[Tensor], attributes: dict[str, Any]) -> None:
    """Refuse tensors that do not fit. Raises ValueError."""
    is_summed = attributes["is_summed"]
    if len(tensors) != 4 + is_summed:
        raise ValueError(f"A product by experts takes {4 + is_summed} tensors here, and not {len(tensors)}.")
    shapes = [extents_of(x) for x in tensors]
    x, weight, chosen, labels = shapes[:4]
    if len(x) not in (2, 3) or [len(shape) for shape in shapes[1:]] != [3, 2, 1, *[2] * is_summed]:
        raise ValueError(f"The tensors of a product by experts have other numbers of dims: {_shown(shapes)}.")
    if tensors[0].dtype.name not in DTYPES or tensors[1].dtype != tensors[0].dtype:
        raise ValueError(
            f"Products by experts are of two tensors of {', '.join(DTYPES)}, and not of {tensors[0].dtype.name} and "
            f"{tensors[1].dtype.name}."
        )
    if any(one.dtype.name != "int32" for one in tensors[2:4]):
        raise ValueError("The chosen experts and the labels of experts are int32.")
    if is_summed and tensors[4].dtype.name not in ("float32", tensors[0].dtype.name):
        raise ValueError(f"Scales of products are float32 or of the rows' dtype, and not {tensors[4].dtype.name}.")
    inner = weight[2] if attributes["transposed"] else weight[1]
    fits = [
        (x[-1], inner),
        (x[0], chosen[0]),
        (weight[0], labels[0]),
        *([(x[1], chosen[1])] if len(x) == 3 else []),
        *(zip(shapes[4], chosen, strict=True) if is_summed else []),
    ]
    if not all(isinstance(size, int) for size in weight) or not all(same_extent(a, b) for a, b in fits):
        raise ValueError(f"The shapes of a product by experts do not fit: {_shown(shapes)}.")


def _shown(shapes: Sequence[Sequence[Extent]]) -> str:
    return ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)


Once = Callable[[Any, Callable[[], Tensor]], Tensor]
"""Returns the tensor that a function makes, which is called once per graph and key."""


def expert_product(
    x: Tensor,
    weight: Tensor,
    chosen: Tensor,
    scales: Tensor | None = None,
    *,
    transposed: bool = False,
    once: Once = lambda _, make: make(),
) -> Tensor:
    """Multiply each row with the matrices of its chosen experts.

    Parameters
    ----------
    x: Tensor
        [tokens, choices, inner], or [tokens, inner]: one row for all choices of a token.
    weight: Tensor
        [experts, inner, columns], or [experts, columns, inner] if ``transposed``.
    chosen: Tensor
        Integers [tokens, choices]: the experts of each token, different ones. Another number gives zeros.
    scales: Tensor, optional
        [tokens, choices]: the choices of a token are summed up, each times its scale.
    transposed: bool
        Whether the matrices are transposed.
    once: callable, optional
        Shares what the layers of a graph have in common.

    Returns
    -------
    Tensor
        [tokens, choices, columns], or [tokens, columns] with scales; of the dtype of ``x``.

    Raises
    ------
    ValueError
        When shapes or dtypes do not fit.
    """
    experts = extents_of(weight)[0]
    if not isinstance(experts, int):
        raise ValueError(f"The number of experts must be known, and not {experts}.")
    labels = once(("labels of experts", experts), lambda: constant(np.arange(1, experts + 1), "int32", x))
    if chosen.dtype.name != "int32":
        wide = chosen
        chosen = once(("int32", wide), lambda: to_dtype(wide, "int32"))
    others = [] if scales is None else [scales]
    return ExpertProductOp(
        x, weight, chosen, labels, *others, count=experts, transposed=transposed, is_summed=scales is not None
    ).outputs[0]


def grouped_product(x: Tensor, weight: Tensor, offs: Tensor, *, transposed: bool = False, once: Once) -> Tensor:
    """Multiply consecutive rows with a matrix each: ``out[s] = x[s] @ weight[e]`` for the expert e of row s.

    Parameters
    ----------
    x: Tensor
        [rows, inner]; the rows of expert 0 first, and so on.
    weight: Tensor
        [experts, inner, columns], or [experts, columns, inner] if ``transposed``.
    offs: Tensor
        int[experts], ascending: the row behind the last one of each expert. Rows behind the last of all are zeros.
    transposed: bool
        Whether the matrices are transposed.
    once: callable
        Shares what products of a graph have in common.

    Returns
    -------
    Tensor
        [rows, columns].

    Raises
    ------
    ValueError
        For operands of other ranks.
    """
    if (len(x.shape), len(weight.shape)) != (2, 3):
        raise ValueError(
            "Grouped products are supported of x[rows, inner] and weight[experts, inner, columns], and not of "
            f"{list(x.shape)} and {list(weight.shape)}."
        )
    rows = extents_of(x)[0]

    def experts_of_rows() -> Tensor:
        """The number of groups that end at or before each row."""
        row = reshaped(_counted_to(rows, x), [rows, 1])
        ends = reshaped(to_dtype(offs, "int32"), [1, *extents_of(offs)])
        return reductions.sum(to_dtype(elementwise.le(ends, row), "int32"), 1, keepdim=True, dtype="int32")

    chosen = once(("experts of rows", offs, str(rows)), experts_of_rows)
    columns = extents_of(weight)[1 if transposed else 2]
    return reshaped(expert_product(x, weight, chosen, transposed=transposed, once=once), [rows, columns])


def _counted_to(count: Extent, like: Tensor) -> Tensor:
    """The integers from 0 to before ``count``."""
    if isinstance(count, int):
        return constant(np.arange(count), "int32", like)
    return ops.arange(0, count, 1, dtype="int32")
