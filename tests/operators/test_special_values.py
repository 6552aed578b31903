"""NaN, infinities and ties: operators that compare elements, beside PyTorch's, simulated and built, on two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.operators.special_values import ALL, ELEMENTWISE, LAYOUTS, POOLINGS, REDUCTIONS, Special, values

import hidet_dist
from hidet_dist.compile import optimize_program
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh

BY_ROWS = {"plain": "(S0, R)", "permuted": "(R, S0)", "reshaped": "(S0, R, R)", "joined": "(S0, R, R, R)"}
BY_COLUMNS = {"plain": "(R, S0)", "permuted": "(S0, R)", "reshaped": "(R, R, S0)", "joined": "(R, R, R, S0)"}
TOLERANCE = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def check(module: Special, dtype: torch.dtype, results: Sequence[np.ndarray]) -> None:
    for case, own, peer in zip(module.cases, results, module(*module.inputs(values(dtype))), strict=True):
        expected, tolerance = peer.numpy(), TOLERANCE[dtype]
        np.testing.assert_allclose(
            own.astype(expected.dtype), expected, rtol=tolerance, atol=tolerance / 10, err_msg=str(case)
        )


def on_two_ranks(module: Special, split: dict[str, str], built: bool, dtype: torch.dtype = torch.float32) -> None:
    inputs = module.inputs(values(dtype))
    graph = normalize(hidet_dist.from_torch(module, inputs))
    pins = {f"x{number}": split[layout] for number, layout in enumerate(module.layouts)}
    plan = search(graph, builtin("cpu", DeviceMesh((2,))), pins=pins, mode="propagate").plan
    program = partition_graph(graph, plan.stages[0])
    compiled = optimize_program(program) if built else None
    check(module, dtype, simulate(program, [x.numpy() for x in inputs], compiled))


def test_definitions_are_pytorchs() -> None:
    cases = [(name, "plain") for name in ELEMENTWISE]
    cases += [(name, layout) for name in (*REDUCTIONS, *POOLINGS) for layout in ("plain", "joined")]
    module = Special(cases).eval()
    inputs = module.inputs(values())
    graph = hidet_dist.from_torch(module, inputs)
    check(module, torch.float32, evaluate_graph(graph, [x.double().numpy() for x in inputs]))


@pytest.mark.slow
def test_programs_for_two_ranks_keep_nan() -> None:
    cases = [("relu", "plain"), ("clamp", "plain"), ("amin_1", "plain"), ("argmax", "joined"), ("max_pool", "plain")]
    on_two_ranks(Special([*cases, ("isinf", "plain")]).eval(), BY_COLUMNS, built=False, dtype=torch.float64)


@pytest.mark.slow
def test_kernels_for_two_ranks_keep_nan() -> None:
    cases = [("hardswish", "plain"), ("amax", "joined"), ("argmax", "joined"), ("argmin", "permuted")]
    cases += [("max_pool", "reshaped"), ("adaptive_max_uneven", "reshaped"), ("adaptive_avg_uneven", "joined")]
    on_two_ranks(Special(cases).eval(), BY_COLUMNS, built=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built", "split", "dtype"),
    [
        pytest.param(False, BY_ROWS, torch.float32, id="simulated by rows"),
        pytest.param(False, BY_COLUMNS, torch.float64, id="simulated by columns"),
        pytest.param(True, BY_ROWS, torch.float16, id="built by rows in half precision"),
        pytest.param(True, BY_COLUMNS, torch.float32, id="built by columns"),
        pytest.param(True, BY_ROWS, torch.float64, id="built by rows in double precision"),
    ],
)
def test_all_on_two_ranks(built: bool, split: dict[str, str], dtype: torch.dtype) -> None:
    on_two_ranks(Special([(name, layout) for name in ALL for layout in LAYOUTS]).eval(), split, built, dtype)
