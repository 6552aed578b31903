"""Random cuts with random plans compute the whole graph; wrong messages are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.seeds import seed

from hidet_dist.normalize import normalize
from hidet_dist.partitioning.micro_batches import micro_batch
from hidet_dist.soundness import cuts
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import evaluate_graph, graph_inputs
from hidet_dist.soundness.work import check_cuts


@pytest.mark.parametrize("name", ["mlp", "attention", "lookup", "fused_projection"])
def test_random_cuts_compute_the_whole_graph(name: str) -> None:
    result = check_cuts(name, 5, seed())
    assert result.counts == {"cuts": 5} and not result.failures, result.failures[0]


def test_cuts_are_of_all_kinds() -> None:
    """Several stages, operators that do not follow one another, micro-batches."""
    rng = np.random.default_rng(0)
    graph = normalize(GRAPHS["attention"](rng))
    drawn = [cuts.random_stages(graph, rng) for _ in range(40)]
    assert {len(one) for one in drawn} == set(range(1, cuts.MOST_STAGES + 1))
    assert any(own[-1] - own[0] >= len(own) for one in drawn for own in one)
    cuttable = cuts.Cuttable(graph)
    assert {cuts.random_micro_batch(cuttable, rng).count for _ in range(8)} == {1, 2}


def test_a_message_that_goes_astray_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    traced = GRAPHS["mlp"](rng)
    inputs = graph_inputs(traced, rng)
    cuttable, whole = cuts.Cuttable(normalize(traced)), evaluate_graph(traced, inputs)

    def drawn() -> Any:
        while True:
            one = cuts.random_pipeline(cuttable, rng)
            if one.cut.boundaries:
                return one

    pipeline = drawn()
    assert cuts.check_pipeline(pipeline, inputs, whole, cuttable) == ""
    real = cuts.transferred
    monkeypatch.setattr(cuts, "transferred", lambda *case: [shard[::-1] + 1 for shard in real(*case)])
    assert "differs" in cuts.check_pipeline(pipeline, inputs, whole, cuttable)


def test_a_run_goes_on_behind_a_plan_whose_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = cuts.transferred, []

    def fails_once(*case: Any) -> Any:
        calls.append(case)
        if len(calls) == 1:
            raise AssertionError("no such part")
        return real(*case)

    monkeypatch.setattr(cuts, "transferred", fails_once)
    result = check_cuts("attention", 8, seed=0)
    assert len(calls) > 1
    (failure,) = result.failures
    assert "AssertionError: no such part" in failure and '"stages"' in failure


def test_the_graph_of_a_micro_batch_has_the_operators_of_the_whole() -> None:
    graph = normalize(GRAPHS["attention"](np.random.default_rng(0)))
    part = micro_batch(graph, 2)
    assert [op.name for op in part.graph.nodes] == [op.name for op in graph.nodes]
    assert part.input_dims == (0,) and part.output_dims == (0,)
    assert [int(n) for n in part.graph.outputs[0].shape] == [1, 6, 16]
