"""The textual form of partitioned programs, against the files in ``programs``."""

from __future__ import annotations

from pathlib import Path

import hidet
import pytest
from hidet import ops
from hidet.graph import FlowGraph

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

PROGRAMS = Path(__file__).parent / "programs"


def mlp() -> FlowGraph:
    x, up, down = hidet.symbol([4, 8]), weight("up", 8, 16), weight("down", 16, 8)
    return normalize(hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, up)), down), [x]))


def attention() -> FlowGraph:
    x = hidet.symbol([4, 8])
    q, k, v = (heads(ops.matmul(x, weight(name, 8, 8))) for name in "qkv")
    scores = ops.softmax(ops.matmul(q, ops.permute_dims(k, [0, 2, 1])), -1)
    joined = ops.reshape(ops.permute_dims(ops.matmul(scores, v), [1, 0, 2]), [4, 8])
    return normalize(hidet.trace_from(ops.matmul(joined, weight("o", 8, 8)), [x]))


def heads(x: hidet.Tensor) -> hidet.Tensor:
    return ops.permute_dims(ops.reshape(x, [4, 2, 4]), [1, 0, 2])


def weight(name: str, *shape: int) -> hidet.Tensor:
    return hidet.distributed.weight(name, shape)


MLP = {"up": "(R, S0)", "down": "(S0, R)"}
ATTENTION = {"q": "(R, S0)", "k": "(R, S0)", "v": "(R, S0)", "o": "(S0, R)"}
ROWS = {"x0": "(S1, R)", "y0": "(S1, R)"}


@pytest.mark.parametrize(
    ("file", "build", "mesh", "pins"),
    [
        ("mlp_2.txt", mlp, (2,), MLP),
        ("mlp_2x2.txt", mlp, (2, 2), {**MLP, **ROWS}),
        ("attention_2.txt", attention, (2,), ATTENTION),
        ("attention_2x2.txt", attention, (2, 2), {**ATTENTION, **ROWS}),
    ],
)
def test_the_text_of_a_program_is_that_of_the_file(file, build, mesh, pins):
    """Megatron's layouts, on the first axis; on the second, rows are split."""
    texts = []
    for _ in range(2):  # of the same graph, traced anew
        graph = build()
        plan = search(graph, builtin("cpu", DeviceMesh(mesh)), pins=pins, mode="propagate").plan
        texts.append(partition_graph(graph, plan.stages[0]).text())
    assert texts[0] == texts[1] == (PROGRAMS / file).read_text()
