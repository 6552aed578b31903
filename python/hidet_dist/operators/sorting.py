"""Sorting by ranks: the rank of an element is the number of elements that come before it.

Ranks need a comparison of each pair along the dim. In return, all other dims of the definition shard, and it reads no
intermediate result at data-dependent indices. Equal elements keep their order, and NaN is greater than all numbers, as
in PyTorch.
"""

from __future__ import annotations

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.dtypes import int32, int64
from hidet.ir.expr import Expr, cast, if_then_else, logical_and, logical_not, logical_or

from hidet_dist.operators.dtypes import to_dtype
from hidet_dist.traits import has_traits


@has_traits(kernel="reduction")
class ArgsortOp(Operator):
    """The indices of the first ``count`` elements along ``dim`` in sorted order: int64."""

    def __init__(self, x: Tensor, dim: int, count: int, descending: bool):
        data, is_float = input_like(x, "x"), x.dtype.is_float()
        length = data.shape[dim]

        def along(tensor: Expr, position: tuple[Expr, ...], index: Expr) -> Expr:
            return tensor[[*position[:dim], index, *position[dim + 1 :]]]

        def less(a: Expr, b: Expr) -> Expr:
            if not is_float:
                return a < b
            return logical_or(a < b, logical_and(primitives.isnan(b), logical_not(primitives.isnan(a))))

        def before(a: Expr, b: Expr) -> Expr:
            return less(b, a) if descending else less(a, b)

        def rank(*position: Expr) -> Expr:
            def counts(j: Expr) -> Expr:
                a, b = along(data, position, j), data[list(position)]
                return if_then_else(j < position[dim], logical_not(before(b, a)), before(a, b))

            return reduce([length], lambda j: if_then_else(counts(j), int32(1), int32(0)), "sum", "int32")

        ranks = compute("rank", data.shape, rank)

        def index(*position: Expr) -> Expr:
            def is_at(i: Expr) -> Expr:
                return if_then_else(along(ranks, position, i) == position[dim], i, int32(0))

            return cast(reduce([length], is_at, "sum", "int32"), int64)

        shape = [*data.shape[:dim], count, *data.shape[dim + 1 :]]
        attributes = {"dim": dim, "count": count, "descending": descending}
        task = Task("argsort", [data], [compute("index", shape, index)], attributes=attributes)
        super().__init__([x], attributes, task)


def argsort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices of the elements along ``dim`` in sorted order: int64. The order is always stable."""
    return sort(x, dim, descending)[1]


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Tensor, Tensor]:
    """The elements along ``dim`` in sorted order, and their indices (int64). The order is always stable."""
    return topk(x, x.shape[dim] if x.shape else 1, dim, largest=descending)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The ``k`` largest or smallest elements along ``dim`` in sorted order, and their indices (int64).

    Equal elements keep their order in ``x``; PyTorch leaves their order open.
    """
    if not x.shape:
        return x, to_dtype(ops.less(x, x), int64)  # 0, for NaN as well
    dim %= len(x.shape)
    keys = to_dtype(x, int32) if x.dtype.is_boolean() else x
    places = ArgsortOp(keys, dim, k, largest).outputs[0]
    return ops.gather(x, places, dim), places
