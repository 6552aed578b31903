"""Exchanges of the rows that ranks want: token dispatch for experts, whose rows depend on what a router chose.

A mask says which rows each rank of a group wants; all ranks of the group have the same one. ``gather_rows`` dispatches
rows to the ranks that want them, and ``reduce_scatter_rows`` combines what these computed. Buffers have room for all
rows, so that no row is ever dropped; what is sent are wanted rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir.dtypes import uint8
from hidet.ir.expr import if_then_else, logical_and, logical_or

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall
from hidet_dist.partitioning.collective_op import CollectiveOp, Reduce, product_of
from hidet_dist.partitioning.once import MadeOnce
from hidet_dist.partitioning.operators import SplitOrder
from hidet_dist.spec.collectives import ALL_GATHER, REDUCE_SCATTER, REDUCED_DTYPES, Collective
from hidet_dist.spec.extents import Extent, extents_of

ROW_EXCHANGES: dict[str, Collective] = {"gather_rows": ALL_GATHER, "reduce_scatter_rows": REDUCE_SCATTER}
"""The kinds of exchanges of rows, each with the collective that it equals where all rows are wanted."""


class RowExchangeOp(CollectiveOp):
    """An exchange of wanted rows over the ranks that differ only along ``mesh_axes``.

    With p ranks of ``rows`` rows each, rows ``r * rows`` and following of all ``p * rows`` are those of group rank r.
    Group rank d wants row i where ``wanted[d, i]`` is not 0.

    ``gather_rows`` takes [rows, ...] and gives [p * rows, ...]: on rank d the rows that it wants, and zeros in place
    of others. It is an all-gather along the first dim that moves wanted rows only.

    ``reduce_scatter_rows`` takes [p * rows, ...] and gives [rows, ...]: each row is the sum over the ranks that want
    it, in ascending order, with the precision of a reduce-scatter. What the others have in its place is not read.

    Parameters
    ----------
    x: Tensor
        The local rows.
    wanted: Tensor
        uint8[p, p * rows], the same on all ranks of the group.
    kind: str
        One of :data:`ROW_EXCHANGES`.
    mesh_axes: sequence of int
        The mesh axes that the group spans.
    group_size: int
        The number of ranks in the group, p.
    extent: int or expression
        The rows of the output.

    Raises
    ------
    ValueError
        When the mask is no uint8[p, p * rows], the rows of input and output do not fit, or rows of this dtype cannot
        be reduced.
    """

    can_be_captured = False  # on a device, the host reads how many rows there are

    def __init__(self, x: Tensor, wanted: Tensor, kind: str, mesh_axes: Sequence[int], group_size: int, extent: Extent):
        self.kind = kind
        self.collective = ROW_EXCHANGES[kind]
        self.mesh_axes = tuple(mesh_axes)
        self.group_size = group_size
        self.reduce_op = "sum" if self.collective.reduces else ""
        first, *row = extents_of(x)
        rows, whole = (first, extent) if self.collective.joins else (extent, first)
        _check_rows(kind, rows, whole, wanted, group_size)
        if self.reduce_op and x.dtype.name not in REDUCED_DTYPES:
            raise ValueError(f"{kind} adds rows of {', '.join(REDUCED_DTYPES)}, and not of {x.dtype.name}.")
        dtype = x.dtype.name if self.reduce_op else "uint8"
        unit = [] if self.reduce_op else [int(x.dtype.nbytes)]
        group = native.group_code(self.mesh_axes)
        statement = (
            f"hidet_dist_{kind}({{}}, (const uint8_t *)({{}}), {{}}, rows, row, {native.dtype_code(dtype)}, {group});"
        )
        super().__init__(
            f"hidet_dist_{kind}_axes{group}_of{group_size}_abi{native.ABI_VERSION}",
            {"x": x, "wanted": wanted},
            [extent, *row],
            NativeCall.of_library(
                statement,
                ("hidet_dist/collectives.h",),
                {"rows": product_of([rows]), "row": product_of([*row, *unit])},
            ),
            {"kind": kind, "mesh_axes": list(self.mesh_axes), "group_size": group_size, "extent": extent},
        )
        self.name = "".join(word.capitalize() for word in kind.split("_"))

    def whole_nbytes(self, sent_nbytes: int) -> int:
        """Count the bytes of all rows of the group, as if every rank wanted each; see :class:`CollectiveOp`."""
        return self.collective.whole(sent_nbytes, self.group_size)

    def result(self, inputs: Sequence[Sequence[np.ndarray]], group_rank: int, reduce: Reduce) -> np.ndarray:
        """Compute what one rank of the group receives; see :meth:`CollectiveOp.result`.

        Raises
        ------
        ValueError
            When the ranks have different masks.
        """
        parts = [x for x, _ in inputs]
        wanted = inputs[group_rank][1] != 0
        if any(not np.array_equal(wanted, mask != 0) for _, mask in inputs):
            raise ValueError(f"The ranks of a {self.kind} have different masks: all ranks need the same one.")
        if self.collective.joins:
            return _only(wanted[group_rank], np.concatenate(parts))
        masked = [_only(mask, part) for mask, part in zip(wanted, parts, strict=True)]
        return np.split(reduce(masked), self.group_size)[group_rank]


def _check_rows(kind: str, rows: Extent, whole: Extent, wanted: Tensor, group_size: int) -> None:
    """Refuse a mask and numbers of rows that do not fit. Raises ValueError."""
    if isinstance(rows, int) and isinstance(whole, int) and whole != rows * group_size:
        raise ValueError(f"{kind}: {group_size} ranks of {rows} rows have {rows * group_size} rows, and not {whole}.")
    shape = extents_of(wanted)
    numbers = [extent for extent in (*shape[1:], whole) if isinstance(extent, int)]
    if wanted.dtype != uint8 or len(shape) != 2 or shape[0] != group_size or len(set(numbers)) > 1:
        text = ", ".join(map(str, shape))
        raise ValueError(f"{kind} takes a mask uint8[{group_size}, {whole}], and not {wanted.dtype.name}[{text}].")


def _only(mask: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Put zeros in place of the rows that are not in a mask."""
    return np.where(mask.reshape(-1, *[1] * (rows.ndim - 1)), rows, np.zeros((), rows.dtype))


class WantedRowsTask(Task, metaclass=MadeOnce):
    """``y[d, t]`` is 1 where a choice of token t is one of group rank d's experts, and else 0."""

    def __init__(self, chosen, experts_per_rank: int, order: SplitOrder):  # type: ignore[no-untyped-def]
        tokens, choices = chosen.shape

        def element(d, t):  # type: ignore[no-untyped-def]
            first = order.part(d) * experts_per_rank
            own = [
                logical_and(first <= chosen[t, c], chosen[t, c] < first + experts_per_rank) for c in range(int(choices))
            ]
            return if_then_else(logical_or(*own), uint8.one, uint8.zero)

        y = compute("y", [order.count, tokens], element)
        attributes = {"experts_per_rank": experts_per_rank, **order.attributes()}
        super().__init__("wanted_rows", [chosen], [y], attributes=attributes)


class WantedRowsOp(Operator):
    """The mask of the rows that ranks want, by the experts that their tokens chose; see :func:`wanted_rows`."""

    def __init__(self, chosen: Tensor, experts_per_rank: int, order: SplitOrder):
        task = WantedRowsTask(input_like(chosen, "chosen"), experts_per_rank, order)
        super().__init__(inputs=[chosen], attributes={"experts_per_rank": experts_per_rank, "order": order}, task=task)


def wanted_rows(chosen: Tensor, experts_per_rank: int, order: SplitOrder) -> Tensor:
    """Make the mask of the tokens that the ranks of a group want: those that chose one of their experts.

    Parameters
    ----------
    chosen: Tensor
        int32[tokens, choices]: the experts that all tokens of the group chose. Numbers outside those of the group's
        experts are nobody's.
    experts_per_rank: int
        The experts of each rank: the ``n``-th part of the experts has those from ``n * experts_per_rank`` on.
    order: SplitOrder
        The mesh axes that split the experts, and so say which part each rank has.

    Returns
    -------
    uint8[p, tokens], by group rank.

    Raises
    ------
    ValueError
        When ``chosen`` has another form, or there are no experts.
    """
    shape = extents_of(chosen)
    if chosen.dtype.name != "int32" or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
        text = ", ".join(map(str, shape))
        raise ValueError(f"wanted_rows takes int32[tokens, choices], and not {chosen.dtype.name}[{text}].")
    if experts_per_rank < 1:
        raise ValueError(f"A rank has 1 expert or more, and not {experts_per_rank}.")
    return WantedRowsOp(chosen, experts_per_rank, order).outputs[0]
