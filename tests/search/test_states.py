"""States in plans: one entity with one spec, held during the whole run, and never gathered."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet.graph import FlowGraph, Tensor

import hidet_dist
from hidet_dist.errors import ConfigError, PlanError, SearchLimitWarning
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search.formulation.memory import holdings
from hidet_dist.soundness.states import recurrent
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.view import GraphView

MESH = {"mesh_shape": [2]}
ROWS, HEADS, SIZE = 4096, 4, 16
POOL_BYTES = ROWS * HEADS * SIZE * 4


def weight(name: str, *shape: int) -> Tensor:
    return hidet.distributed.weight(name, list(shape))


def decoder(tokens: int, rows: int = ROWS) -> FlowGraph:
    """A step of ``tokens`` that writes a pool of ``rows``, and reads eight rows for each token."""
    width = HEADS * SIZE
    x, slots = hidet.symbol([tokens, width]), hidet.symbol([tokens], "int64")
    table = hidet.symbol([tokens, 8], "int64")
    k = (x @ weight("k", width, width)).reshape([tokens, HEADS, SIZE])
    q = (x @ weight("q", width, width)).reshape([tokens, HEADS, SIZE])
    pool = hidet.distributed.write_rows(hidet.distributed.state("pool", [rows, HEADS, SIZE]), slots, k)
    keys = hidet.ops.take(pool, table, 0)
    scores = hidet.ops.softmax((keys * hidet.ops.unsqueeze(q, 1)).sum([3], keep_dim=True), 1)
    y = (scores * keys).sum([1]).reshape([tokens, width]) @ weight("o", width, width)
    return hidet.trace_from([y, pool], [x, slots, table])


def plan_of(graph: FlowGraph, **options: object) -> Plan:
    return hidet_dist.make_plan(graph, MESH, options)


def test_a_state_has_one_spec_and_is_held_once_during_the_whole_run():
    graph = decoder(4)
    plan = plan_of(graph, pins={"pool": "(R, S0, R)"})
    (stage,) = plan.stages
    (state,) = stage.states
    (update,) = (op for op in stage.operators if op.operator == "WriteRows")
    assert state.label == "pool"
    assert str(state.spec) == str(update.spec.in_specs[0]) == str(update.spec.out_specs[0]) == "(R, S0, R)"
    assert stage.state_bytes_per_device == POOL_BYTES // 2
    assert len(stage.outputs) == 1
    held = [one for one in holdings(GraphView(normalize(graph)), stage) if one.nbytes >= POOL_BYTES // 2]
    (only,) = held
    assert (only.what, only.tensor, only.begin, only.nbytes) == ("state", "s0", 0, POOL_BYTES // 2)
    assert all("s0" not in step for step in stage.communications())
    assert Plan.from_json(plan.to_json()) == plan


def test_the_budget_decides_how_a_state_is_split():
    assert str(plan_of(decoder(4)).stages[0].states[0].spec) == "(R, R, R)"
    tight = plan_of(decoder(4), mem_budget=POOL_BYTES * 7 // 10).stages[0]
    assert tight.state_bytes_per_device == POOL_BYTES // 2
    assert tight.collectives().get("all_gather", 0) <= 1  # of activations; a gathered pool would not fit


def test_the_cost_of_a_step_does_not_grow_with_the_pool():
    small, large = (plan_of(decoder(4, rows), pins={"pool": "(R, S0, R)"}).seconds for rows in (64, 65536))
    assert large == pytest.approx(small, rel=1e-6)


def test_propagation_gives_updates_the_spec_of_the_state():
    (stage,) = plan_of(decoder(4), mode="propagate", pins={"pool": "(R, R, S0)"}).stages
    assert str(stage.states[0].spec) == "(R, R, S0)"
    assert "(R, R, S0), (R, R, S0), (R) -> (R, R, S0)" in [str(op.spec) for op in stage.operators]


def test_a_family_has_one_layout_of_a_state():
    cluster = builtin("cpu", DeviceMesh((2,)))
    family = hidet_dist.search_family([decoder(16), decoder(2)], cluster, mem_budget=POOL_BYTES * 7 // 10)
    specs = {str(plan.stages[0].states[0].spec) for plan in family.plans}
    assert specs == {str(family.param_specs["pool"])}
    assert specs != {"(R, R, R)"}  # both plans together hold the pool once


def test_a_pinned_state_is_split_where_time_is_short():
    with pytest.warns(SearchLimitWarning):
        (stage,) = plan_of(decoder(4), pins={"pool": "(R, S0, R)"}, solver_time_limit_seconds=1e-9).stages
    assert stage.state_bytes_per_device == POOL_BYTES // 2


def test_a_replaced_state_is_gathered_for_its_readers_only():
    graph = recurrent(np.random.default_rng(0)).graph
    (stage,) = plan_of(graph, pins={"hidden": "(R, S0)"}).stages
    assert str(stage.states[0].spec) == "(R, S0)"
    assert not any(conversion.tensor == "s0" for conversion in stage.output_conversions)


def test_an_edit_that_would_copy_a_state_is_refused_by_name():
    graph = decoder(4)
    plan = plan_of(graph, pins={"pool": "(R, S0, R)"}).edit({"pool": "(R, R, S0)"})
    with pytest.raises(PlanError, match=r"WriteRows, cannot update the state pool in place: .* stored as \(R, R, S0\)"):
        hidet_dist.recost(plan, graph, builtin("cpu", DeviceMesh((2,))))


def test_a_pin_that_no_update_can_have_is_refused():
    with pytest.raises(ConfigError, match=r"pool = \(S0, R, R\).*WriteRows, cannot update .* in place.* \(R, S0, R\)"):
        plan_of(decoder(4), pins={"pool": "(S0, R, R)"})


def test_searches_for_stages_of_graphs_with_states_are_refused_by_name():
    for options in ({"objective": "latency"}, {"objective": "batch", "micro_batches": 2}, {"stages": 2}):
        with pytest.raises(ConfigError, match="pool"):
            plan_of(decoder(4), **options)


def test_states_of_one_name_and_branches_of_updates_are_refused():
    slots, rows = hidet.symbol([2], "int64"), hidet.symbol([2, 4])
    one, two = (hidet.distributed.state("pool", [8, 4]) for _ in range(2))
    news = [hidet.distributed.write_rows(old, slots, rows) for old in (one, two, one)]
    with pytest.raises(ConfigError, match="2 states of the name 'pool'"):
        plan_of(hidet.trace_from([rows * 2.0, *news[:2]], [slots, rows]))
    with pytest.raises(ConfigError, match="'pool' has two new values"):
        plan_of(hidet.trace_from([rows * 2.0, news[0], news[2]], [slots, rows]))


def test_updates_that_do_not_fit_are_refused():
    pool = hidet.distributed.state("pool", [8, 4])
    slots = hidet.symbol([2], "int64")
    with pytest.raises(ConfigError, match="rows of a state"):
        hidet.distributed.write_rows(pool, slots, hidet.symbol([2, 5]))
    with pytest.raises(ConfigError, match="slots of 3 rows"):
        hidet.distributed.write_rows(pool, slots, hidet.symbol([3, 4]))
    with pytest.raises(ConfigError, match="only be replaced by the same"):
        hidet.distributed.replace_state(pool, hidet.symbol([8, 4], "float16"))
    with pytest.raises(ConfigError, match="cannot be shifted"):
        hidet.distributed.shift_state(pool, hidet.symbol([7, 2]))
    with pytest.raises(ConfigError, match="positive whole numbers"):
        hidet.distributed.state("pool", [0, 4])
