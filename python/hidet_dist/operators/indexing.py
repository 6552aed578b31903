"""Access by index: gather, scatter and count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import BroadcastOp
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.compute import ReduceOperation
from hidet.ir.dtypes import int32, int64
from hidet.ir.expr import Expr, cast, if_then_else, logical_and

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import Scalar, category, constant, to_dtype
from hidet_dist.operators.shaping import expanded, reshaped
from hidet_dist.operators.states import write_rows
from hidet_dist.spec.extents import Extent, extents_of, same_extent
from hidet_dist.traits import has_traits
from hidet_dist.weights.states import is_value_of_state


def _wrapped(index: Tensor, size: int) -> Tensor:
    """Convert negative indices, which count from the end, to indices from the first element."""
    return elementwise.where(elementwise.lt(index, 0), elementwise.add(index, size), index)


def embedding(weight: Tensor, indices: Tensor, *_: object) -> Tensor:
    """Look up rows of a table ``weight[rows, ...]``; the shape is ``indices.shape + weight.shape[1:]``."""
    return ops.take(weight, indices, 0)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    bags: Tensor,
    count: int,
    mode: str,
    weights: Tensor | None = None,
    padding_idx: int = -1,
) -> Tensor:
    """Look up rows of a table ``weight[rows, columns]``, and reduce those of each bag: [count, columns].

    Parameters
    ----------
    indices, bags: Tensor
        int[n]: rows of the table, and the bag that each is in.
    count: int
        The number of bags; an empty one is 0.
    mode: str
        ``"sum"``, ``"mean"`` or ``"max"``.
    weights: Tensor, optional
        [n], factors of the rows.
    padding_idx: int
        A row that is in no bag; -1 for none.
    """
    found = embedding(weight, indices)
    if weights is not None:
        found = elementwise.mul(found, ops.unsqueeze(weights, 1))
    bags = to_dtype(bags, int64)
    if padding_idx >= 0:
        bags = elementwise.where(elementwise.eq(indices, padding_idx), -1, bags)  # what is out of range has no effect
    none = ops.full([count, *found.shape[1:]], weight.dtype.zero, weight.dtype)
    if mode == "max":
        wide = ops.broadcast(ops.unsqueeze(bags, 1), list(found.shape))
        return scatter_reduce(none, 0, wide, found, "amax", include_self=False)
    y = ScatterRowsOp(none, bags, found, "sum").outputs[0]
    if mode == "sum":
        return y
    ones = ops.full(list(bags.shape), weight.dtype.one, weight.dtype)
    sizes = ScatterRowsOp(ops.full([count], weight.dtype.zero, weight.dtype), bags, ones, "sum").outputs[0]
    return elementwise.div(y, ops.unsqueeze(elementwise.clamp_min(sizes, 1), 1))


MOST_PLACES = 2**16
"""Places of a mask, above which :func:`masked_scatter` would count those before each for too long."""


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replace the elements of ``x`` at which ``mask`` is true by those of ``source``, in order.

    ``mask``, of booleans, is broadcast to the shape of ``x``. Dims of ``x`` at the end over which it is broadcast are
    moved as a whole, as the features of images are that take the places of token embeddings. ``source`` must have an
    element for each true one: an index that is out of range is refused when the kernel runs.

    Raises
    ------
    ValueError
        For more than MOST_PLACES places, each of which counts those before it, and where elements are left over.
    """
    extents = extents_of(x)
    while isinstance(mask.op, BroadcastOp):
        mask = mask.op.inputs[0]
    own = extents_of(mask)
    own = (*[1] * (len(extents) - len(own)), *own)
    moved = len(extents)
    while moved and same_extent(own[moved - 1], 1):
        moved -= 1
    outer, inner = extents[:moved], extents[moved:]
    places, width = math.prod(outer), math.prod(inner)
    if isinstance(places, int) and places > MOST_PLACES:
        raise ValueError(
            f"a mask of {places} places, each of which counts those before it; {MOST_PLACES} are supported"
        )
    count = math.prod(extents_of(source))
    if isinstance(count, int) and isinstance(width, int) and count % width:
        raise ValueError(f"{count} elements, which are no whole number of the {width} that the mask takes at once")
    flat = reshaped(expanded(reshaped(mask, own[:moved]), outer), [places])
    before = elementwise.sub(reductions.cumsum(flat, 0), 1)
    rows = ops.take(reshaped(source, [count // width, width]), elementwise.clamp_min(before, 0), 0)
    chosen = elementwise.where(ops.unsqueeze(flat, [1]), rows, reshaped(x, [places, width]))
    return reshaped(chosen, extents)


def _as_row(x: Tensor) -> Tensor:
    """Give a tensor without dims one of one element, as which PyTorch indexes it."""
    return x if x.shape else ops.reshape(x, [1])


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Select the slices of ``x`` along ``dim`` at ``index`` (of one dim, or none)."""
    row = _as_row(x)
    found = ops.take(row, _as_row(index), dim % len(row.shape))
    return found if row is x else ops.reshape(found, [])


def gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """``out[i, j, k] = x[index[i, j, k], j, k]`` for dim 0 of three, and so on; the shape is that of ``index``."""
    if not (x.shape and index.shape):
        return reshaped(index_select(_as_row(x), 0, index), list(index.shape))
    rank = len(x.shape)
    dim %= rank
    return ops.gather(_cropped(x, index.shape, [d for d in range(rank) if d != dim]), index, dim)


def _cropped(x: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Crop the dims to the extents of ``shape``."""
    dims = [d for d in dims if _shorter(shape[d], extents_of(x)[d])]
    return ops.strided_slice(x, [0] * len(dims), [shape[d] for d in dims], dims) if dims else x


def _shorter(part: Extent, whole: Extent) -> bool:
    """Whether a dim of an index differs from that of what it indexes. Raises ValueError if a symbolic dim decides."""
    if same_extent(part, whole):
        return False
    if not isinstance(part, int) or not isinstance(whole, int):
        raise ValueError(f"an index with a dim of {part} elements is for one of {whole}, which must be equal or known")
    return True


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[indices]``: index tensors are broadcast against each other, and ``None`` selects a whole dim.

    Raises ValueError for masks: the number of elements that they select depends on their values.
    """
    dims, tensors = _index_tensors(indices)
    if not dims:
        return x
    if len(dims) == 1:
        return ops.take(x, tensors[0], dims[0])
    x, _ = _leading(x, dims)
    sizes = [x.shape[d] for d in range(len(dims))]
    rows = _flat_index(tensors, sizes)
    x = ops.reshape(x, [math.prod(sizes), *x.shape[len(dims) :]])
    rows_found = ops.take(x, rows, 0)
    if dims[-1] - dims[0] != len(dims) - 1 or dims[0] == 0:
        return rows_found  # dims of indices come first, as in PyTorch
    rank, before = len(rows.shape), dims[0]
    places = [*range(rank, rank + before), *range(rank), *range(rank + before, len(rows_found.shape))]
    return ops.permute_dims(rows_found, places)


def _index_tensors(indices: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    dims = [d for d, tensor in enumerate(indices) if tensor is not None]
    tensors = [tensor for tensor in indices if tensor is not None]
    if _has_mask(tensors):
        raise ValueError("An index by a mask has a shape that depends on data: use where, or integer indices.")
    return dims, [to_dtype(tensor, int64) for tensor in tensors]


def _has_mask(tensors: Sequence[Tensor]) -> bool:
    return any(category(x.dtype) == 0 for x in tensors)


def _leading_order(x: Tensor, dims: Sequence[int]) -> list[int]:
    """List the dims of a tensor, these ones first."""
    return [*dims, *(d for d in range(len(x.shape)) if d not in dims)]


def _leading(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Move the dims to the front; return the tensor and the permutation."""
    order = _leading_order(x, dims)
    return (x if order == sorted(order) else ops.permute_dims(x, order)), order


def _flat_index(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Compute row-major indices from the indices along dims of these sizes."""
    flat = _wrapped(indices[0], sizes[0])
    for along_dim, size in zip(indices[1:], sizes[1:], strict=True):
        flat = elementwise.add(elementwise.mul(flat, size), _wrapped(along_dim, size))
    return flat


@has_traits(kernel="reduction")
class ScatterRowsOp(Operator):
    """Replace rows of ``x[rows, ...]`` at ``index`` by those of ``values[count, ...]``, or add these to them.

    Parameters
    ----------
    x: Tensor
        [rows, ...].
    index: Tensor
        int64[count], the row of each value; one out of range has no effect.
    values: Tensor
        [count, ...], of the dtype of ``x``.
    reduction: str
        ``"replace"``: the last value for a row wins. ``"sum"``: all are added to the row; ``"prod"``, ``"max"`` and
        ``"min"`` combine them with it likewise.
    """

    def __init__(self, x: Tensor, index: Tensor, values: Tensor, reduction: str):
        data, row_of, new_rows = input_like(x, "x"), input_like(index, "index"), input_like(values, "values")
        dtype, count = x.dtype, row_of.shape[0]

        def element(*position: Expr) -> Expr:
            if reduction != "replace":
                operation = ReduceOperation.from_name(reduction)
                neutral = operation.initial_value(dtype)
                combined = reduce(
                    [count],
                    lambda k: if_then_else(row_of[k] == position[0], new_rows[[k, *position[1:]]], neutral),
                    reduction,
                    accumulate_dtype=dtype.name,
                )
                return operation.combine(data[list(position)], combined)
            last = reduce(
                [count], lambda k: if_then_else(row_of[k] == position[0], k, int32(-1)), "max", accumulate_dtype="int32"
            )
            return if_then_else(last >= 0, new_rows[[last, *position[1:]]], data[list(position)])

        y = compute("y", data.shape, element)
        attributes = {"reduction": reduction}
        task = Task(f"scatter_rows_{reduction}", [data, row_of, new_rows], [y], attributes=attributes)
        super().__init__([x, index, values], attributes, task)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``x`` with ``x[indices]`` set to ``values``, or increased by them with ``accumulate``.

    If indices repeat, the last value wins. A mask may set a single value.

    Raises ValueError for a mask with several values, whose indices depend on data.
    """
    values = to_dtype(values, x.dtype)
    tensors = [tensor for tensor in indices if tensor is not None]
    if len(tensors) == 1 and _has_mask(tensors) and math.prod(values.shape) == 1:
        return _put_by_mask(x, indices, values, accumulate)
    return index_reduce(x, indices, values, "sum" if accumulate else "replace")


def index_reduce(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, reduction: str) -> Tensor:
    """``x`` with ``x[indices]`` combined with ``values`` of its dtype; see :class:`ScatterRowsOp` for reductions.

    Where ``x`` is the value of a state, its rows are replaced in place.

    Raises ValueError for a mask, whose indices depend on data.
    """
    dims, tensors = _index_tensors(indices)
    order = _leading_order(x, dims)
    extents = [x.shape[d] for d in order]
    sizes, rest = extents[: len(dims)], extents[len(dims) :]
    writes = reduction == "replace" and is_value_of_state(x)
    # Along each dim for a state, else together: the two broadcast alike.
    rows = _flat_index(tensors, sizes)
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
    if writes:
        slots = [
            ops.reshape(_wrapped(ops.broadcast(tensor, list(rows.shape)), size), [count])
            for tensor, size in zip(tensors, sizes, strict=True)
        ]
        return write_rows(x, slots, ops.reshape(values, [count, *rest]), dims)
    x_front = x if order == sorted(order) else ops.permute_dims(x, order)
    flat = ScatterRowsOp(
        ops.reshape(x_front, [math.prod(sizes), *rest]),
        ops.reshape(rows, [count]),
        ops.reshape(values, [count, *rest]),
        reduction,
    ).outputs[0]
    back = ops.reshape(flat, [*sizes, *rest])
    return back if order == sorted(order) else ops.permute_dims(back, [order.index(d) for d in range(len(order))])


def _put_by_mask(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool) -> Tensor:
    (dim,) = (d for d, tensor in enumerate(indices) if tensor is not None)
    mask = indices[dim]
    assert mask is not None
    mask = ops.reshape(mask, [*mask.shape, *[1] * (len(x.shape) - dim - len(mask.shape))])
    value = ops.reshape(value, [1])
    return elementwise.where(mask, elementwise.add(x, value) if accumulate else value, x)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Scalar = 1) -> Tensor:
    """``x`` with the slices of ``alpha * source`` added to its slices along ``dim`` at ``index``."""
    return _slices_put(x, dim, index, source if alpha == 1 else elementwise.mul(source, alpha), accumulate=True)


def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x`` with its slices along ``dim`` at ``index`` replaced by those of ``source``."""
    return _slices_put(x, dim, index, source, accumulate=False)


def _slices_put(x: Tensor, dim: int, index: Tensor, source: Tensor, accumulate: bool) -> Tensor:
    """Set the slices of ``x`` along ``dim`` at ``index`` (of one dim, or none) to those of ``source``, or add these."""
    row = _as_row(x)
    y = index_put(row, [*[None] * (dim % len(row.shape)), _as_row(index)], _as_row(source), accumulate)
    return y if row is x else ops.reshape(y, [])


@has_traits(kernel="reduction")
class ScatterElementsOp(Operator):
    """Replace elements of ``x`` at ``index`` along ``dim`` by those of ``source``, or combine both.

    ``index`` and ``source`` have the same shape, which exceeds that of ``x`` at most along ``dim``. ``reduction`` is
    ``"replace"`` (the last source element wins), ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.
    """

    def __init__(self, x: Tensor, index: Tensor, source: Tensor, dim: int, reduction: str):
        data, index_node, source_node = input_like(x, "x"), input_like(index, "index"), input_like(source, "source")
        dtype, count = x.dtype, index_node.shape[dim]
        others = [d for d in range(len(data.shape)) if d != dim]

        def along(tensor: Expr, position: tuple[Expr, ...], k: Expr) -> Expr:
            return tensor[[*position[:dim], k, *position[dim + 1 :]]]

        def matches(position: tuple[Expr, ...], k: Expr) -> Expr:
            here = along(index_node, position, k) == position[dim]
            # Elements beyond the index are not read: the bounds are checked first.
            short = [d for d in others if _shorter(extents_of(index)[d], extents_of(x)[d])]
            return logical_and(*[position[d] < index_node.shape[d] for d in short], here) if short else here

        def element(*position: Expr) -> Expr:
            old = data[list(position)]
            if reduction == "replace":
                last = reduce(
                    [count], lambda k: if_then_else(matches(position, k), k, int32(-1)), "max", accumulate_dtype="int32"
                )
                return if_then_else(last >= 0, along(source_node, position, last), old)
            operation = ReduceOperation.from_name(reduction)
            neutral = operation.initial_value(dtype)
            combined = reduce(
                [count],
                lambda k: if_then_else(matches(position, k), along(source_node, position, k), neutral),
                reduction,
                accumulate_dtype=dtype.name,
            )
            return operation.combine(old, combined)

        attributes = {"dim": dim, "reduction": reduction}
        task = Task(
            f"scatter_{reduction}",
            [data, index_node, source_node],
            [compute("y", data.shape, element)],
            attributes=attributes,
        )
        super().__init__([x, index, source], attributes, task)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Tensor | Scalar, reduction: str) -> Tensor:
    if not (x.shape and index.shape):
        flat = _as_row(source) if isinstance(source, Tensor) else source
        return reshaped(_scattered(_as_row(x), 0, _as_row(index), flat, reduction), list(x.shape))
    dim %= len(x.shape)
    index = to_dtype(index, int64)
    if not isinstance(source, Tensor):
        # The other number is never selected. Between equal ones hidet drops the condition, and with it the rule.
        other = 1 if source == 0 else 0
        source = elementwise.SelectOp(elementwise.eq(index, index), source, other, x.dtype.name).outputs[0]
    source = to_dtype(_cropped(source, index.shape, range(len(index.shape))), x.dtype)
    return ScatterElementsOp(x, index, source, dim, reduction).outputs[0]


_REDUCTIONS = {"add": "sum", "sum": "sum", "multiply": "prod", "prod": "prod", "amax": "max", "amin": "min"}


def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor | Scalar, reduce: str | None = None) -> Tensor:
    """``out[index[i, j]][j] = source[i, j]`` for dim 0 of two; the last of several wins, unless they are reduced.

    Raises ValueError for a reduction other than ``"add"`` and ``"multiply"``.
    """
    if reduce not in (None, "add", "multiply"):
        raise ValueError(f"scatter has no reduction {reduce!r}: give None, 'add' or 'multiply'.")
    return _scattered(x, dim, index, source, "replace" if reduce is None else _REDUCTIONS[reduce])


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x`` with ``source`` added at ``index`` along ``dim``."""
    return _scattered(x, dim, index, source, "sum")


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """``x`` reduced with ``source`` at ``index`` along ``dim``: sum, prod, mean, amax or amin.

    Without ``include_self`` an element of ``x`` has no part in what is reduced at its place.

    Raises ValueError for other reductions.
    """
    if reduce not in ("sum", "prod", "mean", "amax", "amin"):
        raise ValueError(f"scatter_reduce has no reduction {reduce!r}: give sum, prod, mean, amax or amin.")
    kind = "sum" if reduce == "mean" else _REDUCTIONS[reduce]
    if include_self and reduce != "mean":
        return _scattered(x, dim, index, source, kind)
    none, one = (ops.full(extents_of(y), int64(n), "int64") for y, n in ((x, 0), (index, 1)))
    count = _scattered(none, dim, index, one, "sum")  # of the elements that are reduced at each place
    if not include_self:
        neutral = ReduceOperation.from_name(kind).initial_value(x.dtype)
        x = elementwise.where(elementwise.eq(count, 0), x, neutral.value)
    y = _scattered(x, dim, index, source, kind)
    if reduce != "mean":
        return y
    total = elementwise.add(count, 1) if include_self else elementwise.clamp_min(count, 1)
    return to_dtype(elementwise.div(y, total, None if x.dtype.is_float() else "floor"), x.dtype)


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
    if step == 1 and not (is_value_of_state(x) and last - first < size):
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


@has_traits(kernel="reduction")
class HistogramOp(Operator):
    """The number of elements of ``x`` in each of ``bins`` equal parts of [low, high], in the dtype of ``x``."""

    def __init__(self, x: Tensor, bins: int, low: float, high: float):
        data, dtype = input_like(x, "x"), x.dtype

        def count(part: Expr) -> Expr:
            def counts(*at: Expr) -> Expr:
                v = data[list(at)]
                inside = logical_and(v >= dtype(low), v <= dtype(high))
                # The last part includes its upper end.
                position = cast((v - dtype(low)) * dtype(float(bins)) / dtype(high - low), int32)
                position = if_then_else(v == dtype(high), int32(bins - 1), position)
                return if_then_else(logical_and(inside, position == part), dtype.one, dtype.zero)

            return reduce(list(data.shape), counts, "sum", accumulate_dtype=dtype.name)

        attributes = {"bins": bins, "low": low, "high": high}
        task = Task("histogram", [data], [compute("y", [bins], count)], attributes=attributes)
        super().__init__([x], attributes, task)


def histc(x: Tensor, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Tensor:
    """The number of elements in each of ``bins`` equal parts of [min, max], in the dtype of ``x``.

    Raises ValueError for an empty range: PyTorch then derives it from the data.
    """
    if not float(min) < float(max):  # type: ignore[arg-type]
        raise ValueError(f"histc needs min < max, and not {min} and {max}: other ranges depend on data.")
    return HistogramOp(x, bins, float(min), float(max)).outputs[0]  # type: ignore[arg-type]


def bincount(x: Tensor, weights: Tensor | None = None, *, length: int) -> Tensor:
    """The count, or the total weight, of each value below ``length`` in ``x``: [length]."""
    values = constant(list(range(length)), int64, x)
    equal = elementwise.eq(ops.unsqueeze(x, 1), values)
    if weights is None:
        return reductions.sum(equal, 0)
    return reductions.sum(elementwise.where(equal, ops.unsqueeze(weights, 1), 0), 0)
