"""Exchanges of wanted rows in the simulator: token dispatch to experts, and back."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist.partitioning.operators import SplitOrder
from hidet_dist.partitioning.row_exchange import RowExchangeOp, wanted_rows
from hidet_dist.simulate import simulate
from hidet_dist.spec.extents import extents_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_rows_go_to_experts_and_back(dtype: str) -> None:
    tokens, hidden, experts, ranks = 6, 8, 4, 2
    x = hidet.symbol([tokens, hidden], dtype, "cpu")
    chosen = hidet.symbol([tokens, 2], "int32", "cpu")
    dense = hidet.trace_from(x + ops.cast(ops.sum(chosen, [1], keep_dim=True), dtype), [x, chosen])
    pins = {"x0": "(S0, R)", "x1": "(R, R)", "y0": "(S0, R)"}
    plan = hidet_dist.make_plan(dense, {"mesh_shape": [ranks]}, {"pins": pins})
    program = hidet_dist.partition(dense, plan)
    local, choices, *_ = program.graph.inputs
    rows = extents_of(local)[0]
    mask = wanted_rows(choices, experts // ranks, SplitOrder((0,), (ranks,)))
    (dispatched,) = RowExchangeOp(local, mask, "gather_rows", [0], ranks, tokens).outputs
    (combined,) = RowExchangeOp(dispatched + dispatched, mask, "reduce_scatter_rows", [0], ranks, rows).outputs

    random = np.random.default_rng(3)
    given = random.integers(-9, 9, (tokens, hidden)).astype("int32" if dtype == "int32" else "float32")
    given_choices = np.array([[0, 1], [1, 2], [3, 2], [9, -1], [4, 0], [-2, 3]], np.int32)  # of 0 to 3 are experts
    (result,) = simulate(program, [given, given_choices], FlowGraph([combined], program.graph.inputs))
    by = [((given_choices >= first) & (given_choices < first + 2)).any(1) for first in (0, 2)]
    assert [list(map(int, one)) for one in by] == [[1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 1]]
    np.testing.assert_array_equal(result, 2 * given * np.sum(by, axis=0)[:, None])
