"""The predicted memory of activations is what the program of a CPU allocates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hidet
import pytest
from hidet import ops

from hidet_dist.compile import compile_program
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        yield


def test_shards_of_inner_dims_are_placed_without_buffers() -> None:
    """Columns are gathered, then moved to another dim: neither needs a copy beside the tensor and its result."""
    x = hidet.symbol([16, 64, 64], "float32", "cpu")
    columns = ops.cumsum(x, 0)
    graph = normalize(hidet.trace_from(ops.cumsum(ops.cumsum(ops.cumsum(columns, 1), 2), 1), [x]))
    pins = {
        "op:0": "(R, R, S0) -> (R, R, S0)",
        "op:1": "(S0, R, R) -> (S0, R, R)",
        "op:2": "(R, S0, R) -> (R, S0, R)",
        "op:3": "(R, R, R) -> (R, R, R)",
    }
    cluster = builtin("cpu", DeviceMesh((2,)))
    stage = search(graph, cluster, pins=pins).stages[0]
    assert stage.collectives() == {"all_to_all": 2, "all_gather": 1}
    view = GraphView(graph)
    ends = sum(one.spec.local_nbytes(one.shape, 4, stage.mesh) for one in (*stage.inputs, *stage.outputs))
    workspace = compile_program(partition_graph(graph, stage)).workspace_bytes
    assert workspace is not None
    assert max(live_bytes(view, stage, cluster.device.places_shards)) - ends == workspace["cpu"]
