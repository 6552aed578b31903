"""The predicted memory of activations is what the program of a CPU allocates."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.compile import compile_program, optimize_program
from hidet_dist.compile.build import HeldOn
from hidet_dist.errors import OverBudgetError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.simulate import simulate
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView


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
    stage = search(graph, cluster, pins=pins).plan.stages[0]
    assert stage.collectives() == {"all_to_all": 2, "all_gather": 1}
    view = GraphView(graph)
    ends = sum(one.spec.local_nbytes(one.shape, 4, stage.mesh) for one in (*stage.inputs, *stage.outputs))
    workspace = compile_program(partition_graph(graph, stage)).workspace_bytes
    assert workspace is not None
    assert max(live_bytes(view, stage, cluster.device.places_shards)) - ends == workspace["cpu"]


def test_a_program_over_its_budget_fuses_fewer_operators() -> None:
    """A kernel that reads two tensors and makes a third one holds all of them; two kernels hold two at a time."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape, np.float32) for shape in ([8, 32, 16], [8, 16, 32], [8, 16, 32])]
    x, u, v = (hidet.symbol(list(value.shape), "float32", "cpu") for value in values)
    scores = ops.matmul(x, v)
    y = ops.exp(scores - ops.max(ops.matmul(x, u), 2, keep_dim=True))
    graph = normalize(hidet.trace_from([ops.max(ops.matmul(y, x), 1), ops.max(scores, 1)], [x, u, v]))
    stage = search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0]
    told: list[int] = []

    def fits(held_on: HeldOn) -> None:
        told.append(held_on(None))
        if len(told) == 1:
            raise OverBudgetError("too much", told[0], 1)

    program = partition_graph(graph, stage)
    compiled = compile_program(program, fits=fits)
    assert compiled.held_bytes == told[1] <= told[0] - 8 * 32 * 32 * 4 + 8 * 32 * 4
    assert len(compiled.graph.nodes) > len(optimize_program(program).nodes)
    largest, other = values[0] @ values[1], values[0] @ values[2]
    expected = [(np.exp(other - largest.max(2, keepdims=True)) @ values[0]).max(1), other.max(1)]
    for actual, own in zip(simulate(program, values, compiled.graph), expected, strict=True):
        np.testing.assert_allclose(actual, own, rtol=1e-4)

    def refuses(held_on: HeldOn) -> None:
        raise OverBudgetError("too much", held_on(None), 1)

    with pytest.raises(OverBudgetError):
        compile_program(program, fits=refuses)
