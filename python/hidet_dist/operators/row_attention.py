"""Attention over rows: each token attends to the rows of a pool of keys and values that its sequence's table names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.compute import TensorInput
from hidet.ir.dtypes import float32
from hidet.ir.expr import Expr, cast, if_then_else, logical_and
from hidet.ir.type import DataType

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.attention import LEAST
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.spec.extents import Extent, extents_of, quotient, same_extent
from hidet_dist.traits import has_traits

DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes of queries, and of pools, each independently: what is computed is computed in float32."""

_NOTHING = LEAST["float32"]  # the logarithm of a sum of no exponentials: that of 0, as a finite number


def rows_read(pools: int, page: int, shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Bound the elements read of pools by the rows that the table has room for, each read once.

    Parameters
    ----------
    pools: int
        The number of pools: inputs from 1 on, behind which the table comes.
    page: int
        The rows of a page.
    shapes: sequence of shapes
        The inputs'.
    """
    rows = math.prod(shapes[1 + pools]) * page
    return {number: rows * math.prod(shapes[number][-2:]) for number in range(1, 1 + pools)}


def _rows_read(op: Operator, shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    return rows_read(1 if op.attrs["value_size"] else 2, op.attrs["page"], shapes)


@has_traits(kernel="reduction", read_elements=_rows_read)
class RowAttentionOp(Operator):
    """The softmax of ``queries @ keys``, times the values, over the rows that a token sees: [tokens, heads, size_v].

    Row ``l`` of a sequence ``s`` is row ``table[s, l // page] * page + l % page`` of the pools. Token ``t`` sees those
    of its sequence from ``begins[t]`` on and before ``ends[t]``, of the ``columns * page`` that the table has. Its
    result is 0 if there is none. Heads are in groups: head ``h`` reads group ``h // (heads / groups)``.

    Parameters
    ----------
    tensors: Tensor
        In this order:

        * the queries, [tokens, heads, size_k];
        * the pool of keys, [rows, groups, size_k];
        * the pool of values, [rows, groups, size_v], unless ``value_size`` is given;
        * the table, int32[sequences, columns]: numbers of pages, each of ``page`` rows;
        * the sequence of each token, int32[tokens];
        * begins and ends, int32[tokens];
        * with ``has_sinks``, float32[heads]: a score for each head that takes part in the softmax, with a value of 0.
    scale: float
        The factor of the scores.
    softcap: float
        Where it is not 0, a score x becomes ``softcap * tanh(x / softcap)``.
    page: int
        The rows of a page.
    value_size: int
        Where it is not 0, values are the first elements of keys, that many: there is one pool (multi-head latent
        attention).
    has_sinks: bool
        Whether there are sinks.

    Raises
    ------
    ValueError
        When the shapes or dtypes of the tensors do not fit.
    """

    def __init__(
        self,
        *tensors: Tensor,
        scale: float,
        softcap: float = 0.0,
        page: int = 1,
        value_size: int = 0,
        has_sinks: bool = False,
    ):
        attributes = {
            "scale": float(scale),
            "softcap": float(softcap),
            "page": int(page),
            "value_size": int(value_size),
            "has_sinks": bool(has_sinks),
        }
        _check(tensors, 0, attributes)
        definition = _Definition(tensors, 0, attributes)
        task = Task("row_attention", definition.inputs, [definition.mixed(tensors[0].dtype)], attributes=attributes)
        super().__init__(list(tensors), attributes, task)


@has_traits(kernel="reduction", read_elements=_rows_read)
class RowAttentionPartsOp(Operator):
    """Attention over the rows of each part of the pools: float32[parts, tokens, heads, size_v + 1].

    The parameters are those of :class:`RowAttentionOp`, but for another first dim of the pools, [parts, rows, ...],
    and a dim of ``parts`` after the first one of the table and of begins and ends. Rows of a part are numbered from
    its first one. The last element of the last dim is the logarithm of the sum of the scores' exponentials, by which
    :func:`combined` weights a part; where a token sees no row of a part, it is the least float32.
    """

    def __init__(self, *tensors: Tensor, scale: float, softcap: float = 0.0, page: int = 1, value_size: int = 0):
        attributes = {
            "scale": float(scale),
            "softcap": float(softcap),
            "page": int(page),
            "value_size": int(value_size),
        }
        _check(tensors, 1, attributes)
        definition = _Definition(tensors, 1, attributes)
        task = Task("row_attention_parts", definition.inputs, [definition.parts()], attributes=attributes)
        super().__init__(list(tensors), attributes, task)


def _check(tensors: Sequence[Tensor], lead: int, attributes: dict[str, Any]) -> None:
    """Refuse tensors that do not fit. ``lead`` is the number of dims before those of the pools."""
    pools = 1 if attributes["value_size"] else 2
    sinks = int(attributes.get("has_sinks", False))
    if len(tensors) != 5 + pools + sinks:
        raise ValueError(f"Attention over rows takes {5 + pools + sinks} tensors here, and not {len(tensors)}.")
    ranks = [3, *[3 + lead] * pools, 2 + lead, 1, 1 + lead, 1 + lead, *[1] * sinks]
    shapes = [extents_of(x) for x in tensors]
    if [len(shape) for shape in shapes] != ranks:
        raise ValueError(f"Attention over rows takes tensors of {ranks} dims here, and not {_shown(shapes)}.")
    _check_dtypes(tensors[: 1 + pools], tensors[1 + pools : 5 + pools], tensors[5 + pools :])
    (tokens, heads, size), keys, values = shapes[0], shapes[1], shapes[pools]
    table, sequences, begins, ends = shapes[1 + pools : 5 + pools]
    if not all(isinstance(extent, int) for extent in (size, keys[-1], values[-1])):
        raise ValueError(f"The sizes of heads must be numbers, and not symbolic dims: {_shown(shapes)}.")
    fits = [
        *zip(keys[:-1], values[:-1], strict=True),
        (keys[-1], size),
        *((extent, tokens) for extent in (sequences[0], begins[0], ends[0])),
        *zip(keys[:lead], table[1 : 1 + lead], strict=True),
        *((parts, extent) for x in (begins, ends) for parts, extent in zip(keys[:lead], x[1:], strict=True)),
        *((shape[0], heads) for shape in shapes[5 + pools :]),
    ]
    if quotient(heads, keys[-2]) is None or not all(same_extent(a, b) for a, b in fits):
        raise ValueError(f"The shapes of attention over rows do not fit: {_shown(shapes)}.")
    page, value_size = attributes["page"], attributes["value_size"]
    rows = keys[lead]
    if page < 1 or (isinstance(rows, int) and rows % page):
        raise ValueError(f"Pools of {rows} rows cannot have pages of {page} rows.")
    if not 0 <= value_size <= int(size):
        raise ValueError(f"Values cannot be the first {value_size} elements of keys, which have {size}.")


def _check_dtypes(floats: Sequence[Tensor], integers: Sequence[Tensor], sinks: Sequence[Tensor]) -> None:
    for x in floats:
        if x.dtype.name not in DTYPES:
            raise ValueError(f"Attention over rows is of {', '.join(DTYPES)}, and not of {x.dtype.name}.")
    for x in integers:
        if x.dtype.name != "int32":
            raise ValueError(f"Tables, sequences, begins and ends are int32, and not {x.dtype.name}.")
    for x in sinks:
        if x.dtype.name != "float32":
            raise ValueError(f"Sinks are float32, and not {x.dtype.name}.")


def _shown(shapes: Sequence[Sequence[Extent]]) -> str:
    return ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)


class _Definition:
    """The compute definition. ``lead`` is the number of dims of parts, 0 or 1, which precede tokens and heads."""

    def __init__(self, tensors: Sequence[Tensor], lead: int, attributes: dict[str, Any]):
        names = ["query", "keys"] if attributes["value_size"] else ["query", "keys", "values"]
        names += ["table", "sequences", "begins", "ends"] + ["sinks"] * bool(attributes.get("has_sinks"))
        self.inputs = [input_like(x, name) for name, x in zip(names, tensors, strict=True)]
        by_name = dict(zip(names, self.inputs, strict=True))
        self.query, self.keys = by_name["query"], by_name["keys"]
        self.values = by_name.get("values", self.keys)
        self.table, self.sequences = by_name["table"], by_name["sequences"]
        self.begins, self.ends, self.sinks = by_name["begins"], by_name["ends"], by_name.get("sinks")
        self.lead, self.page = lead, int(attributes["page"])
        self.value_size = attributes["value_size"] or self.values.shape[-1]
        scale, softcap = attributes["scale"], attributes["softcap"]
        # One axis for the columns of the table, and one for the rows of a page unless it has one.
        columns = [self.table.shape[-1], *[self.page] * (self.page > 1)]
        self.columns = columns
        tokens, heads, size = self.query.shape
        self.outer = [*self.keys.shape[:lead], tokens, heads]

        def score(*index: Expr) -> Expr:
            outer, row = index[: lead + 2], index[lead + 2 :]
            *_, t, h = outer
            product = reduce(
                [size],
                lambda d: _wide(self.query[[t, h, d]]) * _wide(self.element(self.keys, outer, row, d)),
                "sum",
            )
            value = product * float32(scale)
            if softcap:
                value = float32(softcap) * primitives.tanh(value / float32(softcap))
            return if_then_else(self.is_seen(outer, row), value, float32(_NOTHING))

        def most(*outer: Expr) -> Expr:
            value = reduce(columns, lambda *row: scores[[*outer, *row]], "max")
            return value if self.sinks is None else primitives.max(value, self.sinks[outer[-1]])

        def weight(*index: Expr) -> Expr:
            outer, row = index[: lead + 2], index[lead + 2 :]
            exponential = primitives.exp(scores[list(index)] - self.most[list(outer)])
            return if_then_else(self.is_seen(outer, row), exponential, float32.zero)

        def total(*outer: Expr) -> Expr:
            value = reduce(columns, lambda *row: self.weights[[*outer, *row]], "sum")
            if self.sinks is None:
                return value
            return value + primitives.exp(self.sinks[outer[-1]] - self.most[list(outer)])

        scores = compute("scores", [*self.outer, *columns], score)
        self.most = compute("most", self.outer, most)
        self.weights = compute("weights", [*self.outer, *columns], weight)
        self.total = compute("total", self.outer, total)

    def place(self, row: Sequence[Expr]) -> Expr:
        """The place of a row in its sequence, or in its part."""
        return row[0] * self.page + row[1] if self.page > 1 else row[0]

    def is_seen(self, outer: Sequence[Expr], row: Sequence[Expr]) -> Expr:
        """Whether a token sees a row."""
        *part, t, _ = outer
        return logical_and(self.begins[[t, *part]] <= self.place(row), self.place(row) < self.ends[[t, *part]])

    def sees_any(self, outer: Sequence[Expr]) -> Expr:
        """Whether a token sees a row at all."""
        *part, t, _ = outer
        begin, end = self.begins[[t, *part]], self.ends[[t, *part]]
        return logical_and(begin < end, begin < self.table.shape[-1] * self.page, end > 0)

    def element(self, pool: TensorInput, outer: Sequence[Expr], row: Sequence[Expr], place: Expr) -> Expr:
        """An element of a pool's row. A row that is not seen may be none of the pool: the first one stands for it."""
        *part, t, h = outer
        number = self.table[[self.sequences[t], *part, row[0]]]
        number = number * self.page + row[1] if self.page > 1 else number
        number = if_then_else(self.is_seen(outer, row), number, 0)
        heads_of_group = quotient(self.query.shape[1], pool.shape[-2])
        assert heads_of_group is not None
        group = h // heads_of_group if heads_of_group > 1 else h
        return pool[[*part, number, group, place]]

    def mixed(self, dtype: DataType) -> Any:
        """The result, in this dtype: of all rows, where there are no parts."""
        return compute("mixed", [*self.outer, self.value_size], lambda *index: cast(self.mixed_at(index), dtype))

    def mixed_at(self, index: Sequence[Expr]) -> Expr:
        """An element of the result."""
        *outer, d = index

        def weighted(*row: Expr) -> Expr:
            value = self.weights[[*outer, *row]] * _wide(self.element(self.values, outer, row, d))
            return if_then_else(self.is_seen(outer, row), value, float32.zero)

        total = reduce(self.columns, weighted, "sum")
        return if_then_else(self.sees_any(outer), total / self.total[list(outer)], float32.zero)

    def parts(self) -> Any:
        """The results of parts, and their logarithms."""

        def element(*index: Expr) -> Expr:
            outer = list(index[:-1])
            logarithm = if_then_else(
                self.sees_any(outer), primitives.log(self.total[outer]) + self.most[outer], float32(_NOTHING)
            )
            return if_then_else(index[-1] < self.value_size, self.mixed_at(index), logarithm)

        return compute("parts", [*self.outer, self.value_size + 1], element)


def _wide(x: Expr) -> Expr:
    return cast(x, float32)


Once = Callable[[Any, Callable[[], Tensor]], Tensor]
"""Returns the tensor that a function makes, which is called once per graph and key."""


def attention_over_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    table: Tensor,
    sequences: Tensor,
    lengths: Tensor,
    scale: float,
    page: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_size: int = 0,
    *,
    once: Once = lambda _, make: make(),
) -> Tensor:
    """Attention of tokens to rows of a pool: [tokens, heads, size_v], of the dtype of the queries.

    Parameters
    ----------
    query: Tensor
        [tokens, heads, size_k].
    keys, values: Tensor
        The pools, [rows, groups, size_k] and [rows, groups, size_v], or with a first dim of parts. Without ``values``
        they are the first ``value_size`` elements of the keys.
    table: Tensor
        Integers [sequences, columns]: the pages of each sequence, in order; page ``n`` is the rows of a pool from
        ``n * page`` on. With parts, [sequences, parts, columns]: page ``i`` of a sequence is in part ``i % parts``, at
        column ``i // parts``, and pages are numbered from the first one of their part.
    sequences: Tensor
        Integers [tokens], the sequence of each token.
    lengths: Tensor
        Integers [tokens]: a token sees the rows of its sequence before this one. Its own row is the last of them if
        rows are written before they are read, so that the order within a step is causal.
    scale: float
        The factor of the scores.
    page: int
        The rows of a page.
    window: int
        Where it is not 0, a token sees the last rows only, that many.
    softcap: float
        Where it is not 0, a score x becomes ``softcap * tanh(x / softcap)``.
    sinks: Tensor, optional
        [heads]: a score for each head that takes part in the softmax, with a value of 0.
    value_size: int
        The size of values that are the first elements of keys.
    once: callable, optional
        Shares what the layers of a graph compute from the same table and lengths.

    Raises
    ------
    ValueError
        When shapes or dtypes do not fit.
    """
    if values is not None and value_size:
        raise ValueError("Attention over rows takes values, or the size of those that are the first of keys: not both.")
    if values is None and not value_size:
        raise ValueError("Attention over rows needs values, or the size of those that are the first elements of keys.")
    if window < 0:
        raise ValueError(f"A window is a number of rows, or 0 for all rows, and not {window}.")

    def integers(x: Tensor) -> Tensor:
        return x if x.dtype.name == "int32" else once(("int32", x), lambda: to_dtype(x, "int32"))

    pools = [keys] if values is None else [keys, values]
    table, sequences, ends = integers(table), integers(sequences), integers(lengths)
    has_parts = len(keys.shape) == 4
    if has_parts and len(table.shape) != 3:
        raise ValueError(
            f"Pools in parts need a table [sequences, parts, columns], and not of {len(table.shape)} dims."
        )

    def first() -> Tensor:
        return elementwise.clamp_min(elementwise.sub(ends, window), 0) if window else elementwise.mul(ends, 0)

    begins = once(("begins", ends, window), first)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "page": page, "value_size": value_size}
    if not has_parts:
        others = [] if sinks is None else [to_dtype(sinks, "float32")]
        tensors = (query, *pools, table, sequences, begins, ends, *others)
        return RowAttentionOp(*tensors, **options, has_sinks=sinks is not None).outputs[0]
    parts = extents_of(keys)[0]
    if not isinstance(parts, int):
        raise ValueError(f"The number of parts of a pool must be known, and not {parts}.")

    def of_parts(x: Tensor) -> Tensor:
        return once(("in parts", x, parts, page), lambda: _in_parts(x, parts, page))

    y = RowAttentionPartsOp(query, *pools, table, sequences, of_parts(begins), of_parts(ends), **options).outputs[0]
    return to_dtype(combined(y, sinks), query.dtype)


def _in_parts(length: Tensor, parts: int, page: int) -> Tensor:
    """The number of rows of each part among the first ``length`` ones of a sequence: int32[tokens, parts]."""
    starts = constant(np.arange(parts) * page, "int32", length)
    length = ops.unsqueeze(length, [1])
    whole = elementwise.mul(elementwise.div(length, parts * page, "floor"), page)
    rest = elementwise.sub(elementwise.remainder(length, parts * page), starts)
    return elementwise.add(whole, elementwise.clamp(rest, 0, page))


def combined(y: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Combine the results of parts, as :class:`RowAttentionPartsOp` has them: [tokens, heads, size_v].

    A part counts by the sum of its exponentials, relative to the greatest of these sums. So what is summed up over
    parts is never more than their number.
    """
    *_, heads, width = extents_of(y)
    size = int(width) - 1
    logarithms = ops.strided_slice(y, [size], [size + 1], [3])
    most = reductions.amax(logarithms, 0, keepdim=True)
    if sinks is not None:
        sinks = to_dtype(ops.reshape(sinks, [1, 1, heads, 1]), "float32")
        most = elementwise.maximum(most, sinks)
    weights = elementwise.exp(elementwise.sub(logarithms, most))
    # The logarithm's place has 1, so that one sum gives the weighted results and the weights' total.
    is_total = constant([False] * size + [True], "bool", y)
    summed = reductions.sum(elementwise.mul(weights, elementwise.where(is_total, 1.0, y)), 0)
    results, total = (ops.strided_slice(summed, [begin], [end], [2]) for begin, end in ((0, size), (size, size + 1)))
    if sinks is not None:
        total = elementwise.add(total, ops.squeeze(elementwise.exp(elementwise.sub(sinks, most)), [0]))
    return elementwise.div(results, total)
