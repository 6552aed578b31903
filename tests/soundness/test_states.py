"""Graphs with states under random plans, over several calls."""

from __future__ import annotations

import numpy as np
import pytest
from tests.seeds import seed

from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.soundness.states import STATEFUL, recurrent
from hidet_dist.soundness.work import FAMILY_MESHES, STATE_MESHES, check_families, check_states


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "latent_attention")) for name in STATEFUL]
)
def test_random_plans_keep_states_from_call_to_call(name: str):
    assert check_states(name, len(STATE_MESHES), seed()).failures == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "recurrent")) for name in STATEFUL]
)
def test_random_plans_over_one_storage_find_what_the_other_has_left(name: str):
    assert check_families(name, len(FAMILY_MESHES), seed()).failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_many_random_plans_keep_states_from_call_to_call(name: str):
    assert check_states(name, 40, seed() + 1).failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_real_ranks_keep_states_from_call_to_call(name: str):
    """Calls that a rank refuses, and those that warm up, are between those that count."""
    assert check_states(name, len(STATE_MESHES), seed() + 2, served=len(STATE_MESHES)).failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_real_ranks_serve_plans_over_one_storage(name: str):
    assert check_families(name, len(FAMILY_MESHES), seed() + 2, served=len(FAMILY_MESHES)).failures == []


def test_a_call_finds_what_the_one_before_has_left():
    rng = np.random.default_rng(0)
    stateful = recurrent(rng)
    call = stateful.draw(rng)
    states: dict[str, np.ndarray] = {}
    first, again = (evaluate_graph(stateful.graph, call, states) for _ in range(2))
    assert np.abs(states["hidden"]).max() > 0
    assert not np.allclose(first[0], again[0])
