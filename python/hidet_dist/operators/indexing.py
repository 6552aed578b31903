"""Elements by index: gathered, scattered and counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.dtypes import int32, int64
from hidet.ir.expr import Expr, cast, if_then_else, logical_and

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import Scalar, category, constant, to_dtype


def _wrapped(index: Tensor, size: int) -> Tensor:
    """An index counted from the first element; negative ones count from the end."""
    return elementwise.where(elementwise.lt(index, 0), elementwise.add(index, size), index)


def embedding(weight: Tensor, indices: Tensor, *_: object) -> Tensor:
    """Rows of a table ``weight[rows, ...]``: shape ``indices.shape + weight.shape[1:]``."""
    return ops.take(weight, indices, 0)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The slices of ``x`` along ``dim`` that ``index`` (one dim, or none) names."""
    index = index if index.shape else ops.reshape(index, [1])
    return ops.take(x, index, dim % len(x.shape))


def gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """``out[i, j, k] = x[index[i, j, k], j, k]`` for dim 0 of three, and so on; the shape is that of ``index``."""
    rank = len(x.shape)
    if rank == 0:
        return ops.reshape(ops.take(ops.reshape(x, [1]), ops.reshape(index, [1]), 0), list(index.shape))
    dim %= rank
    return ops.gather(_cropped(x, index.shape, [d for d in range(rank) if d != dim]), index, dim)


def _cropped(x: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """The first elements of the dims, as many as ``shape`` has."""
    dims = [d for d in dims if x.shape[d] != shape[d]]
    return ops.strided_slice(x, [0] * len(dims), [shape[d] for d in dims], dims) if dims else x


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[indices]``: the index tensors are broadcast against each other, and ``None`` takes a dim whole.

    Raises ValueError for masks: how many elements they take depends on their values.
    """
    dims, given = _index_tensors(indices)
    if not dims:
        return x
    if len(dims) == 1:
        return ops.take(x, given[0], dims[0])
    x, _ = _leading(x, dims)
    sizes = [x.shape[d] for d in range(len(dims))]
    rows = _flat_index(given, sizes)
    x = ops.reshape(x, [math.prod(sizes), *x.shape[len(dims) :]])
    found = ops.take(x, rows, 0)
    if dims[-1] - dims[0] != len(dims) - 1 or dims[0] == 0:
        return found  # dims of indices come first, as in PyTorch
    rank, before = len(rows.shape), dims[0]
    places = [*range(rank, rank + before), *range(rank), *range(rank + before, len(found.shape))]
    return ops.permute_dims(found, places)


def _index_tensors(indices: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    dims = [d for d, own in enumerate(indices) if own is not None]
    given = [own for own in indices if own is not None]
    if _has_mask(given):
        raise ValueError("An index by a mask has a shape that depends on data: use where, or integer indices.")
    return dims, [to_dtype(own, int64) for own in given]


def _has_mask(tensors: Sequence[Tensor]) -> bool:
    return any(category(x.dtype) == 0 for x in tensors)


def _leading(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, list[int]]:
    """``x`` with the dims in front, and the order of dims that this is."""
    order = [*dims, *(d for d in range(len(x.shape)) if d not in dims)]
    return (x if order == sorted(order) else ops.permute_dims(x, order)), order


def _flat_index(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The place in row-major order of what the indices name, in dims of these sizes."""
    flat = _wrapped(indices[0], sizes[0])
    for own, size in zip(indices[1:], sizes[1:], strict=True):
        flat = elementwise.add(elementwise.mul(flat, size), _wrapped(own, size))
    return flat


class ScatterRowsOp(Operator):
    """Rows of ``x[rows, ...]`` replaced by, or increased by, those of ``values[count, ...]`` that ``index`` names.

    Parameters
    ----------
    x: Tensor
        [rows, ...].
    index: Tensor
        int64[count], the row of each value; one that is none of the rows has no effect.
    values: Tensor
        [count, ...], of the dtype of ``x``.
    reduction: str
        ``"replace"``: the last value of a row stays. ``"sum"``: all are added to what the row has.
    """

    def __init__(self, x: Tensor, index: Tensor, values: Tensor, reduction: str):
        own, places, given = input_like(x, "x"), input_like(index, "index"), input_like(values, "values")
        dtype, count = x.dtype, places.shape[0]

        def element(*place: Expr) -> Expr:
            if reduction == "sum":
                return own[list(place)] + reduce(
                    [count],
                    lambda k: if_then_else(places[k] == place[0], given[[k, *place[1:]]], dtype.zero),
                    "sum",
                    accumulate_dtype=dtype.name,
                )
            last = reduce(
                [count], lambda k: if_then_else(places[k] == place[0], k, int32(-1)), "max", accumulate_dtype="int32"
            )
            return if_then_else(last >= 0, given[[last, *place[1:]]], own[list(place)])

        y = compute("y", own.shape, element)
        attributes = {"reduction": reduction}
        task = Task(f"scatter_rows_{reduction}", [own, places, given], [y], attributes=attributes)
        super().__init__([x, index, values], attributes, task)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``x`` with ``x[indices]`` set to ``values``, or increased by them where ``accumulate``.

    Where indices repeat, the last value stays. A mask may set a single value.

    Raises ValueError for a mask with several values, whose places depend on data.
    """
    values = to_dtype(values, x.dtype)
    given = [own for own in indices if own is not None]
    if len(given) == 1 and _has_mask(given) and math.prod(values.shape) == 1:
        return _put_by_mask(x, indices, values, accumulate)
    dims, given = _index_tensors(indices)
    x_front, order = _leading(x, dims)
    sizes, rest = list(x_front.shape[: len(dims)]), list(x_front.shape[len(dims) :])
    rows = _flat_index(given, sizes)
    together = dims[-1] - dims[0] == len(dims) - 1
    before = dims[0] if together else 0
    shape = [*rest[:before], *rows.shape, *rest[before:]]
    values = ops.broadcast(values, shape)
    if before:
        rank = len(rows.shape)
        values = ops.permute_dims(
            values, [*range(before, before + rank), *range(before), *range(before + rank, len(shape))]
        )
    count = math.prod(rows.shape)
    flat = ScatterRowsOp(
        ops.reshape(x_front, [math.prod(sizes), *rest]),
        ops.reshape(rows, [count]),
        ops.reshape(values, [count, *rest]),
        "sum" if accumulate else "replace",
    ).outputs[0]
    back = ops.reshape(flat, [*sizes, *rest])
    return back if order == sorted(order) else ops.permute_dims(back, [order.index(d) for d in range(len(order))])


def _put_by_mask(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool) -> Tensor:
    (dim,) = (d for d, own in enumerate(indices) if own is not None)
    mask = indices[dim]
    assert mask is not None
    mask = ops.reshape(mask, [*mask.shape, *[1] * (len(x.shape) - dim - len(mask.shape))])
    value = ops.reshape(value, [1])
    return elementwise.where(mask, elementwise.add(x, value) if accumulate else value, x)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Scalar = 1) -> Tensor:
    """``x`` with the slices of ``alpha * source`` added to those along ``dim`` that ``index`` names."""
    source = source if alpha == 1 else elementwise.mul(source, alpha)
    return index_put(x, [*[None] * (dim % len(x.shape)), index], source, accumulate=True)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x`` with the slices along ``dim`` that ``index`` names replaced by those of ``source``."""
    return index_put(x, [*[None] * (dim % len(x.shape)), index], source)


class ScatterElementsOp(Operator):
    """Elements of ``x`` replaced by, or combined with, those of ``source`` that ``index`` names along ``dim``.

    ``index`` and ``source`` have one shape, in no dim but ``dim`` longer than ``x``. ``reduction`` is ``"replace"``
    (the last element of a place stays), ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.
    """

    def __init__(self, x: Tensor, index: Tensor, source: Tensor, dim: int, reduction: str):
        own, places, given = input_like(x, "x"), input_like(index, "index"), input_like(source, "source")
        dtype, count = x.dtype, places.shape[dim]
        others = [d for d in range(len(own.shape)) if d != dim]

        def along(tensor: Expr, place: tuple[Expr, ...], k: Expr) -> Expr:
            return tensor[[*place[:dim], k, *place[dim + 1 :]]]

        def matches(place: tuple[Expr, ...], k: Expr) -> Expr:
            found = along(places, place, k) == place[dim]
            # What the index does not reach is not read, so the bounds are asked first.
            short = [d for d in others if places.shape[d] != own.shape[d]]
            return logical_and(*[place[d] < places.shape[d] for d in short], found) if short else found

        def combined(place: tuple[Expr, ...], neutral: Expr, kind: str) -> Expr:
            return reduce(
                [count],
                lambda k: if_then_else(matches(place, k), along(given, place, k), neutral),
                kind,
                accumulate_dtype=dtype.name,
            )

        def element(*place: Expr) -> Expr:
            old = own[list(place)]
            if reduction == "sum":
                return old + combined(place, dtype.zero, "sum")
            if reduction == "prod":
                return old * combined(place, dtype.one, "prod")
            last = reduce(
                [count], lambda k: if_then_else(matches(place, k), k, int32(-1)), "max", accumulate_dtype="int32"
            )
            if reduction == "replace":
                return if_then_else(last >= 0, along(given, place, last), old)
            bound = combined(place, dtype.min_value if reduction == "max" else dtype.max_value, reduction)
            better = bound > old if reduction == "max" else bound < old
            return if_then_else(logical_and(last >= 0, better), bound, old)

        attributes = {"dim": dim, "reduction": reduction}
        task = Task(
            f"scatter_{reduction}", [own, places, given], [compute("y", own.shape, element)], attributes=attributes
        )
        super().__init__([x, index, source], attributes, task)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Tensor | Scalar, reduction: str) -> Tensor:
    if not x.shape:
        flat = ops.reshape(source, [1]) if isinstance(source, Tensor) else source
        return ops.reshape(_scattered(ops.reshape(x, [1]), 0, ops.reshape(index, [1]), flat, reduction), [])
    dim %= len(x.shape)
    index = to_dtype(index, int64)
    if not isinstance(source, Tensor):
        source = elementwise.where(elementwise.eq(index, index), source, 0)
    source = to_dtype(_cropped(source, index.shape, range(len(index.shape))), x.dtype)
    return ScatterElementsOp(x, index, source, dim, reduction).outputs[0]


_REDUCTIONS = {"add": "sum", "sum": "sum", "multiply": "prod", "prod": "prod", "amax": "max", "amin": "min"}


def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor | Scalar, reduce: str | None = None) -> Tensor:
    """``out[index[i, j]][j] = source[i, j]`` for dim 0 of two; the last of several stays, unless they are reduced.

    Raises ValueError for a reduction other than ``"add"`` and ``"multiply"``.
    """
    if reduce not in (None, "add", "multiply"):
        raise ValueError(f"scatter has no reduction {reduce!r}: give None, 'add' or 'multiply'.")
    return _scattered(x, dim, index, source, "replace" if reduce is None else _REDUCTIONS[reduce])


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x`` with ``source`` added at the places that ``index`` names along ``dim``."""
    return _scattered(x, dim, index, source, "sum")


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """``x`` reduced with ``source`` at the places that ``index`` names: sum, prod, amax or amin.

    Raises ValueError for other reductions, and where what ``x`` has is to be left out.
    """
    if reduce not in ("sum", "prod", "amax", "amin") or not include_self:
        raise ValueError(f"scatter_reduce of {reduce!r} with include_self={include_self} is not supported.")
    return _scattered(x, dim, index, source, _REDUCTIONS[reduce])


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """``x`` with slice ``index`` along ``dim`` replaced by ``source``."""
    dim %= len(x.shape)
    index %= x.shape[dim]
    return slice_scatter(x, ops.unsqueeze(source, dim), dim, index, index + 1)


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """``x`` with ``x[start:end:step]`` along ``dim`` replaced by ``source``."""
    dim %= len(x.shape)
    size = int(x.shape[dim])
    first, last, step = slice(start, end, step).indices(size)
    source = to_dtype(source, x.dtype)
    if step == 1:
        parts = [part for part in (_part(x, dim, 0, first), source, _part(x, dim, last, size)) if part is not None]
        return parts[0] if len(parts) == 1 else ops.concat(parts, dim)
    places = constant(list(range(first, last, step)), int64, x)
    return index_copy(x, dim, places, source)


def _part(x: Tensor, dim: int, start: int, end: int) -> Tensor | None:
    return ops.strided_slice(x, [start], [end], [dim]) if start < end else None


def one_hot(x: Tensor, num_classes: int) -> Tensor:
    """int64 of shape ``x.shape + [num_classes]``: 1 where the last index is the value of ``x``, else 0.

    Raises ValueError when the number of classes is not given, which would depend on data.
    """
    if num_classes < 1:
        raise ValueError("one_hot needs the number of classes: without it the shape depends on data.")
    classes = constant(list(range(num_classes)), int64, x)
    return to_dtype(elementwise.eq(ops.unsqueeze(x, len(x.shape)), classes), int64)


class HistogramOp(Operator):
    """How many elements of ``x`` are in each of ``bins`` equal parts of [low, high], in the dtype of ``x``."""

    def __init__(self, x: Tensor, bins: int, low: float, high: float):
        own, dtype = input_like(x, "x"), x.dtype

        def count(part: Expr) -> Expr:
            def counts(*place: Expr) -> Expr:
                v = own[list(place)]
                inside = logical_and(v >= dtype(low), v <= dtype(high))
                # The greatest value belongs to the last part, which has no other upper end.
                position = cast((v - dtype(low)) * dtype(float(bins)) / dtype(high - low), int32)
                position = if_then_else(v == dtype(high), int32(bins - 1), position)
                return if_then_else(logical_and(inside, position == part), dtype.one, dtype.zero)

            return reduce(list(own.shape), counts, "sum", accumulate_dtype=dtype.name)

        attributes = {"bins": bins, "low": low, "high": high}
        task = Task("histogram", [own], [compute("y", [bins], count)], attributes=attributes)
        super().__init__([x], attributes, task)


def histc(x: Tensor, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Tensor:
    """How many elements are in each of ``bins`` equal parts of [min, max], in the dtype of ``x``.

    Raises ValueError where the range is empty: PyTorch then takes it from the data.
    """
    if not float(min) < float(max):  # type: ignore[arg-type]
        raise ValueError(f"histc needs min < max, and not {min} and {max}: other ranges depend on data.")
    return HistogramOp(x, bins, float(min), float(max)).outputs[0]  # type: ignore[arg-type]


def bincount(x: Tensor, weights: Tensor | None = None, *, length: int) -> Tensor:
    """How often, or with which total weight, each value below ``length`` is in ``x``: [length]."""
    values = constant(list(range(length)), int64, x)
    equal = elementwise.eq(ops.unsqueeze(x, 1), values)
    if weights is None:
        return reductions.sum(equal, 0)
    return reductions.sum(elementwise.where(equal, ops.unsqueeze(weights, 1), 0), 0)
