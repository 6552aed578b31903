"""Stages of graphs with states: cut where the least crosses, each state in one stage, weights in balance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hidet
import pytest

import hidet_dist
from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.pipeline.state_cuts import stages_between_states

WIDTH, ROWS = 8, 6


def graph_of(widths: Sequence[int], head: int = 4) -> NormalGraph:
    """Layers, each with a pool and an inner width of its own, and a head behind them."""
    x, slots = hidet.symbol([2, WIDTH]), hidet.symbol([2], "int64")
    pools, h = [], x
    for number, inner in enumerate(widths):
        up, down = (
            hidet_dist.weight(f"{name}{number}", shape)
            for name, shape in (("up", [WIDTH, inner]), ("down", [inner, WIDTH]))
        )
        made = hidet_dist.write_rows(hidet_dist.state(f"pool{number}", [ROWS, inner]), slots, hidet.ops.relu(h) @ up)
        pools.append(made)
        read = hidet.ops.take(made, slots, 0)
        h = h + hidet.ops.tanh(read) @ down
    return normalize(hidet.trace_from([h @ hidet_dist.weight("head", [WIDTH, head]), *pools], [x, slots]))


def layers_of(graph: NormalGraph, stages: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The pools that each stage updates."""
    from hidet_dist.view import GraphView

    view = GraphView(graph)
    names = [view.updates.get(number, "") for number in range(len(view.operators))]
    return [[name for name in names[slice(*stage["operators"])] if name] for stage in stages]


def test_each_state_is_in_one_stage_and_only_what_layers_hand_on_crosses():
    graph = graph_of([16] * 6)
    stages = stages_between_states(graph, (), [1, 1, 1])
    assert layers_of(graph, stages) == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]
    assert [stage["operators"][0] for stage in stages[1:]] == [stage["operators"][1] for stage in stages[:-1]]
    assert (stages[0]["operators"][0], stages[-1]["operators"][1]) == (0, len(graph.nodes))
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [3]}, {"stages": stages})
    assert plan.pipeline is not None
    assert [one.nbytes for one in plan.pipeline.boundaries] == [2 * WIDTH * 4] * 2


@pytest.mark.parametrize(
    ("widths", "head", "ranks", "expected"),
    [
        ([16, 16, 16, 16], 4, [1, 1], [2, 2]),
        ([64, 16, 16, 16], 4, [1, 1], [1, 3]),
        ([16, 16, 16, 16], 64, [1, 1], [3, 1]),  # the head has as many weights as two layers
        ([16, 16, 16, 16], 4, [3, 1], [3, 1]),  # three ranks share the weights of a stage
        ([16, 16], 2, [1, 1, 1], [1, 1, 0]),
    ],
)
def test_the_fullest_rank_holds_the_least(widths: list[int], head: int, ranks: list[int], expected: list[int]):
    graph = graph_of(widths, head)
    stages = stages_between_states(graph, (), ranks)
    assert [stage["mesh_shape"] for stage in stages] == [[count] for count in ranks]
    assert [len(pools) for pools in layers_of(graph, stages)] == expected


def test_more_stages_than_places_are_refused():
    with pytest.raises(
        ConfigError, match=r"keeps 2 states, and can be cut between them in \d places: 20 stages need 19"
    ):
        stages_between_states(graph_of([16, 16]), (), [1] * 20)
