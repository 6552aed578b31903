"""The predicted time of attention over rows: it follows the rows that a step looks at, not what the pools hold."""

from __future__ import annotations

import hidet
import pytest

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.operators.row_attention import RowAttentionOp
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.symbols import SymbolSize


@pytest.mark.parametrize("machine", ["dgx-h100", "cpu"])
def test_time_follows_lengths_and_not_the_capacity_of_pools(machine: str) -> None:
    def seconds(rows: int, columns: int) -> float:
        x = hidet.symbol(["tokens", 32, 128], "float16", "cpu")
        pools = [hidet.symbol([rows, 8, 128], "float16", "cpu") for _ in range(2)]
        table = hidet.symbol(["sequences", "columns"], "int32", "cpu")
        each = [hidet.symbol(["tokens"], "int32", "cpu") for _ in range(3)]
        inputs = [x, *pools, table, *each]
        graph = normalize(hidet.trace_from(RowAttentionOp(*inputs, scale=1.0, page=16).outputs[0], inputs))
        sizes = {"tokens": 8, "sequences": 8, "columns": columns}
        symbols = {name: SymbolSize(size) for name, size in sizes.items()}
        return search(graph, builtin(machine, DeviceMesh((1,))), symbols=symbols).plan.makespan_seconds

    short = seconds(8 * 256, 16)
    assert seconds(8 * 8192, 16) == short
    assert seconds(8 * 8192, 512) > 10 * short
