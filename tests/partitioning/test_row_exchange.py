"""Exchanges of wanted rows in a program: what the operators are, and what the ranks receive."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet.ffi import runtime_api
from hidet.graph import FlowGraph, Tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist import native
from hidet_dist.compile.cpu.build import cpu_target
from hidet_dist.partitioning.operators import SplitOrder
from hidet_dist.partitioning.row_exchange import RowExchangeOp, wanted_rows
from hidet_dist.partitioning.text import graph_lines
from hidet_dist.soundness.oracle import evaluate
from hidet_dist.spec.extents import extents_of

RANKS, ROWS, HIDDEN = 3, 4, 5


def symbols(rows: object, dtype: str = "float32", ranks: int = RANKS) -> tuple[Tensor, Tensor, Tensor]:
    """Local rows, the rows of all ranks, and the mask."""
    whole = rows * ranks  # type: ignore[operator]
    return (
        hidet.symbol([rows, HIDDEN], dtype, "cpu"),
        hidet.symbol([whole, HIDDEN], dtype, "cpu"),
        hidet.symbol([ranks, whole], "uint8", "cpu"),
    )


def test_the_text_of_exchanges() -> None:
    x, _, wanted = symbols(ROWS)
    y = RowExchangeOp(x, wanted, "gather_rows", [0, 2], RANKS, RANKS * ROWS).outputs[0]
    z = RowExchangeOp(y, wanted, "reduce_scatter_rows", [0, 2], RANKS, ROWS).outputs[0]
    assert graph_lines(FlowGraph([z], [x, wanted]), {x: "x", wanted: "wanted"}) == [
        "v0: float32[12, 5] = gather_rows(x, wanted, axes=02)",
        "v1: float32[4, 5] = reduce_scatter_rows(v0, wanted, sum, axes=02)",
        "return v1",
    ]
    assert z.op.description == "reduce_scatter_rows(sum, axes=02) float32[12, 5] -> [4, 5]"
    # A program builds its operators anew when it is optimized.
    (again,) = z.op.reforward([y, wanted])
    assert again.op.task.name == z.op.task.name
    assert again.op.attrs == z.op.attrs


def test_rows_may_be_symbolic() -> None:
    rows = hidet.symbol_var("rows")
    x, whole, wanted = symbols(rows)
    y = RowExchangeOp(x, wanted, "gather_rows", [0], RANKS, extents_of(whole)[0]).outputs[0]
    z = RowExchangeOp(y, wanted, "reduce_scatter_rows", [0], RANKS, rows).outputs[0]
    assert y.shape[0] is whole.shape[0]
    assert z.shape[0] is rows


@pytest.mark.parametrize("kind", ["gather_rows", "reduce_scatter_rows"])
def test_kernels_of_symbolic_rows(kind: str) -> None:
    rows = hidet.symbol_var("rows")  # a name that the native call has, too
    x, _, wanted = symbols(rows, "int32", ranks=1)
    op = RowExchangeOp(x, wanted, kind, [0], 1, rows)
    given, mask = np.arange(20, dtype=np.int32).reshape(4, HIDDEN), np.array([[1, 0, 0, 1]], np.uint8)
    alone = native.create_communicator(None, (1,), 0)
    native.bind(alone)
    try:
        runtime_api.set_symbol_value("rows", 4)
        with cpu_target():
            (y,) = op.compiled_task.run_async([hidet.asarray(given), hidet.asarray(mask)])
        assert native.error(alone) is None
        np.testing.assert_array_equal(y.numpy(), given * mask.reshape(4, 1))
    finally:
        native.destroy_communicator(alone)


@pytest.mark.parametrize(
    ("extent", "mask", "dtype", "message"),
    [
        (13, [3, 12], "uint8", "3 ranks of 4 rows have 12 rows, and not 13"),
        (12, [3, 4], "uint8", r"takes a mask uint8\[3, 12\], and not uint8\[3, 4\]"),
        (12, [2, 12], "uint8", r"not uint8\[2, 12\]"),
        (12, [36], "uint8", r"not uint8\[36\]"),
        (12, [3, 12], "bool", r"not bool\[3, 12\]"),
    ],
)
def test_masks_and_rows_that_do_not_fit_are_refused(extent: int, mask: list[int], dtype: str, message: str) -> None:
    x, wanted = hidet.symbol([ROWS, HIDDEN], "float32", "cpu"), hidet.symbol(mask, dtype, "cpu")
    with pytest.raises(ValueError, match=message):
        RowExchangeOp(x, wanted, "gather_rows", [0], RANKS, extent)


def test_rows_that_cannot_be_added_are_refused() -> None:
    _, whole, wanted = symbols(ROWS, "uint32")
    with pytest.raises(ValueError, match="and not of uint32"):
        RowExchangeOp(whole, wanted, "reduce_scatter_rows", [0], RANKS, ROWS)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_exchanges_are_dense_collectives_of_masked_rows(ranks: int, rows: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    wanted = (random.random((ranks, ranks * rows)) < share).astype(np.uint8)
    x, whole, mask = symbols(rows, ranks=ranks)
    gather = RowExchangeOp(x, mask, "gather_rows", [0], ranks, ranks * rows)
    scatter = RowExchangeOp(whole, mask, "reduce_scatter_rows", [0], ranks, rows)
    shards = random.integers(-9, 9, (ranks, rows, HIDDEN)).astype(np.float32)
    results = random.integers(-9, 9, (ranks, ranks * rows, HIDDEN)).astype(np.float32)
    sums = np.sum(results * wanted[:, :, None], axis=0).reshape(ranks, rows, HIDDEN)
    # What is not wanted is not read.
    results[wanted == 0] = np.nan
    for rank in range(ranks):
        received = gather.result([(shard, wanted) for shard in shards], rank, lambda parts: np.sum(parts, axis=0))
        np.testing.assert_array_equal(received, shards.reshape(-1, HIDDEN) * wanted[rank][:, None])
        received = scatter.result([(part, wanted) for part in results], rank, lambda parts: np.sum(parts, axis=0))
        np.testing.assert_array_equal(received, sums[rank])


def test_ranks_with_different_masks_are_refused() -> None:
    x, _, mask = symbols(1, ranks=2)
    gather = RowExchangeOp(x, mask, "gather_rows", [0], 2, 2)
    rows = np.ones((1, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="different masks"):
        gather.result([(rows, np.eye(2, dtype=np.uint8)), (rows, np.ones((2, 2), np.uint8))], 0, np.sum)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([SplitOrder((0,), (3,)), SplitOrder((2, 0), (2, 3)), SplitOrder((0, 1), (2, 2))]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_ranks_want_the_tokens_that_chose_their_experts(
    order: SplitOrder, experts_per_rank: int, choices: int, seed: int
) -> None:
    count, tokens = order.count * experts_per_rank, 7
    # Some numbers are those of no expert here.
    chosen = np.random.default_rng(seed).integers(-2, count + 2, (tokens, choices)).astype(np.int32)
    mask = wanted_rows(hidet.symbol([tokens, choices], "int32", "cpu"), experts_per_rank, order)
    assert mask.dtype.name == "uint8"
    (wanted,) = evaluate(mask.op.task, [chosen])
    for rank in range(order.count):
        first = order.part(rank) * experts_per_rank
        own = range(first, first + experts_per_rank)
        np.testing.assert_array_equal(wanted[rank], [any(e in own for e in row) for row in chosen])


@pytest.mark.parametrize(
    ("shape", "dtype", "experts", "message"),
    [
        ([7, 2], "int64", 2, r"int32\[tokens, choices\], and not int64\[7, 2\]"),
        ([7], "int32", 2, r"not int32\[7\]"),
        ([7, 0], "int32", 2, r"not int32\[7, 0\]"),
        ([7, 2], "int32", 0, "1 expert or more, and not 0"),
    ],
)
def test_choices_of_another_form_are_refused(shape: list[int], dtype: str, experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wanted_rows(hidet.symbol(shape, dtype, "cpu"), experts, SplitOrder((0,), (2,)))
