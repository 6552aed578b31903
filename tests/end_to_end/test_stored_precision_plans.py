"""Plans know the bits of weights: memory, budgets and times are those of what ranks hold."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import InfeasibleError
from hidet_dist.spec import Plan
from hidet_dist.spec.buffers import buffer_nbytes
from hidet_dist.testing.models import llama

RNG = np.random.default_rng(0)
ONE = {"mesh_shape": [1]}


def products(rows: int, transposed: bool = False) -> FlowGraph:
    """Two products of 500 rows and 300 columns, neither of which panels nor groups divide."""
    x = hidet.symbol([rows, 500], "float32", "cpu")
    up, down = (hidet.asarray(RNG.standard_normal(shape, np.float32) / 8) for shape in ((500, 300), (300, 500)))
    if transposed:
        return hidet.trace_from(ops.matmul_nt(ops.relu(ops.matmul_nt(x, down)), up), [x])
    return hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, up)), down), [x])


def planned(precision: str, graph: FlowGraph, budget: int | None = None, ranks: int = 1, **weights: int) -> Plan:
    config = {"weights": {"precision": precision, **weights}} if precision else {}
    return hidet_dist.make_plan(graph, {"mesh_shape": [ranks]}, {**config, "mem_budget": budget, "arch": "x86-64-v3"})


@pytest.mark.parametrize(
    ("precision", "weights", "first", "second"),
    [
        ("", {}, 4 * 500 * 300, 4 * 500 * 300),
        ("float16", {}, 2 * 500 * 300, 2 * 500 * 300),
        # Columns in panels of 16, rows in groups of 32 or 64, each with a float16 scale.
        ("int8", {}, 304 * 16 * 34, 512 * 10 * 34),
        ("int4", {}, 304 * 16 * 18, 512 * 10 * 18),
        ("int4", {"group": 64}, 304 * 8 * 34, 512 * 5 * 34),
        # With a float16 scale and minimum.
        ("uint4", {}, 304 * 16 * 20, 512 * 10 * 20),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_bytes_of_weights_are_those_of_their_precision(
    precision: str, weights: dict, first: int, second: int, transposed: bool
) -> None:
    plan = planned(precision, products(4, transposed), **weights)
    assert [one.local_nbytes(plan.stages[0].mesh) for one in plan.stages[0].weights] == [first, second]
    assert Plan.from_json(plan.to_json()) == plan


def test_the_least_budget_is_that_of_the_precision() -> None:
    graph, activations = products(4), 4 * 4 * (500 + 500) + 2 * buffer_nbytes(4 * 4 * 300)
    for precision, nbytes in (("", 1_200_000), ("int8", 165_376 + 174_080), ("int4", 87_552 + 92_160)):
        with pytest.raises(InfeasibleError) as error:
            planned(precision, graph, 10_000)
        assert error.value.least_budget == nbytes + activations
        assert planned(precision, graph, nbytes + activations).stages[0].weights


def test_predicted_times_are_those_of_the_bytes_that_are_read() -> None:
    one_row = {name: planned(name, products(1)).makespan_seconds for name in ("", "float16", "int8", "int4")}
    assert one_row["int4"] < one_row["int8"] < one_row["float16"] < one_row[""]
    many = {name: planned(name, products(2048)).makespan_seconds for name in ("", "float16", "int4")}
    assert many["float16"] > many[""]  # arithmetic decides
    assert one_row["int4"] / one_row[""] < many["int4"] / many[""]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4", "bfloat16"])
def test_predicted_weights_of_a_model_are_what_ranks_map(tmp_path: Path, precision: str) -> None:
    graph, _ = llama(hidden=64)
    config = {"weights": {"precision": precision}}
    result = hidet_dist.auto_parallel(graph, ONE, config, tmp_path / "out")
    stage, (mapped,) = result.plan.stages[0], Manifest.load(tmp_path / "out").program().stages
    assert sum(one.storage is not None for one in stage.weights) == len(mapped.panels) > 4
    names = [one.name for one in stage.weights if one.storage is None]
    assert not set(names) & set(mapped.panels)
    assert stage.weight_bytes_per_device == mapped.weight_bytes == result.weight_bytes_per_rank[0]


def test_weights_in_a_lower_precision_are_not_converted() -> None:
    graph = products(64)
    plan = planned("int8", graph, ranks=2)
    converted = {one.tensor for op in plan.stages[0].operators for one in op.conversions}
    assert not converted & {one.name for one in plan.stages[0].weights}
