"""Inputs, outputs and messages of bfloat16, which NumPy lacks, in the simulator."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.errors import InputError
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.simulate import simulate, simulate_pipeline

X = torch.arange(8).reshape(2, 4).to(torch.bfloat16) / 3
FORMS = {"torch": X, "numpy": X.float().numpy(), "rounded": X.float().numpy() * np.float32(1 + 2**-12)}


@pytest.fixture(scope="module")
def graph() -> hidet.FlowGraph:
    x = hidet.symbol([2, 4], "bfloat16", "cpu")
    return hidet.trace_from((x * x) * x, [x])


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_tensors_or_arrays_of_float32(graph: hidet.FlowGraph, form: str) -> None:
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"pins": {"x0": "(S0, R)"}})
    (y,) = simulate(hidet_dist.partition(graph, plan), [FORMS[form]])
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, ((X * X) * X).float().numpy())


def test_arrays_of_other_dtypes_are_refused(graph: hidet.FlowGraph) -> None:
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [1]}))
    for other in (X.double().numpy(), X.half()):
        with pytest.raises(InputError, match=r"Input 0 is float(64|16)\[2, 4\], not bfloat16\[2, 4\]"):
            simulate(program, [other])


def test_tensors_between_stages_keep_their_values(graph: hidet.FlowGraph) -> None:
    stages = [{"operators": [0, 1], "mesh_shape": [2]}, {"operators": [1, 2], "mesh_shape": [1]}]
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [3]}, {"stages": stages})
    assert plan.pipeline is not None
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    (y,) = simulate_pipeline(plan.pipeline, programs, [X])
    np.testing.assert_array_equal(y, ((X * X) * X).float().numpy())
