"""The plan of least memory: the same one whatever was searched before, and one that keeps states where they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hidet_dist
from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.one_graph import formulate_problem
from hidet_dist.search.options import SearchOptions, SolveOptions
from hidet_dist.search.problem import Narrowing
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.states import STATEFUL
from hidet_dist.spec import DeviceMesh


@pytest.mark.parametrize("name", STATEFUL)
def test_graphs_with_states_are_planned_within_the_bytes_that_a_refusal_names(name: str) -> None:
    stateful = STATEFUL[name](np.random.default_rng(0))
    symbols = {"symbols": stateful.symbols} if stateful.symbols else {}
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(stateful.graph, {"mesh_shape": [2]}, {**symbols, "mem_budget": 1})
    least = refused.value.least_budget
    hidet_dist.make_plan(stateful.graph, {"mesh_shape": [2]}, {**symbols, "mem_budget": least})


def test_what_a_search_chose_to_relax_does_not_change_the_plan_of_least_memory() -> None:
    graph = normalize(GRAPHS["attention"](np.random.default_rng(0)))
    problem = formulate_problem(graph, builtin("cpu", DeviceMesh((2, 2))), SearchOptions())
    searched = replace(problem, narrowing=Narrowing(frozenset(problem.groups), True))
    assert least_memory(searched, SolveOptions()) == least_memory(problem, SolveOptions())
