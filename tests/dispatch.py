"""A program that dispatches rows to experts of several ranks and combines what they give.

A result is twice the row for each rank that wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hidet
import numpy as np
from hidet import ops
from hidet.graph import FlowGraph

from hidet_dist.partitioning import CommunicationOp
from hidet_dist.partitioning.once import reshape
from hidet_dist.partitioning.operators import ShardSliceOp, SplitOrder
from hidet_dist.partitioning.row_exchange import RowExchangeOp, wanted_rows
from hidet_dist.phases import Traced
from hidet_dist.spec.extents import extents_of

HIDDEN, CHOICES, EXPERTS_PER_RANK = 12, 2, 2


def build(
    folder: Path, ranks: int, dtype: str, tokens: int | str, options: Mapping[str, Any], machine: str = "cpu"
) -> None:
    """Build the artifacts: from whole rows and choices to whole results, on all ranks."""
    x = hidet.symbol([tokens, HIDDEN], dtype, "cpu")
    chosen = hidet.symbol([tokens, CHOICES], "int32", "cpu")
    # What is planned has the same inputs and output.
    planned = hidet.trace_from(x + ops.cast(ops.sum(chosen, [1], keep_dim=True), dtype), [x, chosen])
    pins = dict.fromkeys(("x0", "x1", "y0"), "(R, R)")
    partitioned = (
        Traced.of(planned, {"mesh_shape": [ranks], "machine": machine}, {"pins": pins, **options})
        .prepare()
        .plan()
        .partition()
    )
    (program,) = partitioned.programs
    x, chosen = program.graph.inputs
    coordinate = hidet.symbol([1], "int32", x.device)
    whole, order = extents_of(x)[0], SplitOrder((0,), (ranks,))
    rows = whole // ranks
    mask = wanted_rows(chosen, EXPERTS_PER_RANK, order)
    local = ShardSliceOp(x, coordinate, 0, [0], [ranks], rows).outputs[0]
    at_experts = RowExchangeOp(local, mask, "gather_rows", [0], ranks, whole).outputs[0]
    back = RowExchangeOp(at_experts + at_experts, mask, "reduce_scatter_rows", [0], ranks, rows).outputs[0]
    y = reshape(CommunicationOp(back, "all_gather", [0], ranks).outputs[0], [whole, HIDDEN])
    changed = replace(program, graph=FlowGraph([y], [x, chosen, coordinate]), coordinate=coordinate)
    replace(partitioned, programs=(changed,)).compile().save(folder)


def case(ranks: int, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, choices of which some are no experts, and the result."""
    random = np.random.default_rng(seed)
    x = random.integers(-9, 9, (tokens, HIDDEN)).astype(np.float32)
    chosen = random.integers(-2, ranks * EXPERTS_PER_RANK + 2, (tokens, CHOICES)).astype(np.int32)
    owners = np.where(chosen < 0, -1, chosen // EXPERTS_PER_RANK)
    wanting = np.sum([(owners == rank).any(1) for rank in range(ranks)], axis=0)
    return x, chosen, 2 * x * wanting[:, None]
