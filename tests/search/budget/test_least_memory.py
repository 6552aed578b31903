"""The plan of least memory: the same one whatever was searched before, and one that keeps states where they are."""

from __future__ import annotations

import numpy as np
import pytest

import hidet_dist
from hidet_dist.errors import InfeasibleError
from hidet_dist.soundness.states import STATEFUL


@pytest.mark.parametrize("name", STATEFUL)
def test_graphs_with_states_are_planned_within_the_bytes_that_a_refusal_names(name: str) -> None:
    stateful = STATEFUL[name](np.random.default_rng(0))
    symbols = {"symbols": stateful.symbols} if stateful.symbols else {}
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(stateful.graph, {"mesh_shape": [2]}, {**symbols, "mem_budget": 1})
    least = refused.value.least_budget
    hidet_dist.make_plan(stateful.graph, {"mesh_shape": [2]}, {**symbols, "mem_budget": least})
