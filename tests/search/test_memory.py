from __future__ import annotations

import hidet
import pytest

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.reshard import Step, cheapest_conversion
from hidet_dist.search import search
from hidet_dist.search.memory import conversion_nbytes, live_bytes, reduction_nbytes
from hidet_dist.spec import DeviceMesh, ReduceFn, TensorShardSpec
from hidet_dist.view import GraphView

spec = TensorShardSpec.parse


def test_an_unsharded_program_holds_what_its_tensors_need() -> None:
    """x -> relu -> exp -> sum with x: between the operators as many tensors as are still to be read."""
    x = hidet.symbol([8, 4], "float32", "cpu")
    a = hidet.ops.relu(x)
    b = hidet.ops.reshape(hidet.ops.exp(a), [4, 8])  # a view
    y = hidet.ops.reshape(b, [8, 4]) + a
    graph = normalize(hidet.trace_from(y, [x]))
    view = GraphView(graph)
    plan = search(graph, builtin("cpu", DeviceMesh((1,))))
    size = 8 * 4 * 4
    # The input and the output are there throughout; then a; a and exp(a); the views hold nothing more.
    names = [op.name for op in view.operators]
    assert names.index("Add") == len(names) - 1
    held = dict(zip(names, live_bytes(view, plan.stages[0]), strict=False))
    assert held["Relu"] == 3 * size
    assert held["Exp"] == held["Reshape"] == held["Add"] == 4 * size
    assert live_bytes(view, plan.stages[0])[-1] == 2 * size


@pytest.mark.parametrize(
    ("source", "target", "extra"),
    [
        ("(S0, R)", "(R, R)", 0),  # gathered where it is to be
        ("(R, S0)", "(R, R)", 1024),  # gathered one behind the other, then joined
        ("(R, R)", "(S0, R)", 0),
    ],
)
def test_a_conversion_holds_the_buffers_between_its_steps(source: str, target: str, extra: int) -> None:
    cluster = builtin("cpu", DeviceMesh((4,)))
    steps = cheapest_conversion((16, 16), "float32", spec(source), spec(target), cluster).steps
    assert conversion_nbytes((16, 16), 4, spec(source), steps, cluster.mesh) == extra


@pytest.mark.parametrize(
    ("source", "target", "extra"),
    [
        ("(R, S0)", "(R, R)", 0),
        ("(S0, R)", "(R, S0)", 0),
        ("(R, S10)", "(R, R)", 512),  # what is between two gatherings
    ],
)
def test_collectives_that_place_shards_need_no_buffers(source: str, target: str, extra: int) -> None:
    cluster = builtin("cpu", DeviceMesh((2, 2)))
    steps = cheapest_conversion((16, 16), "float32", spec(source), spec(target), cluster).steps
    working = conversion_nbytes((16, 16), 4, spec(source), steps, cluster.mesh, places_shards=True)
    assert working == extra


def test_parts_that_are_not_in_the_order_of_the_ranks_are_received_in_a_buffer() -> None:
    steps, mesh = (Step.parse("all_gather(axes=10, dim=1)"),), DeviceMesh((2, 2))
    assert conversion_nbytes((16, 16), 4, spec("(R, S10)"), steps, mesh, places_shards=True) == 1024


def test_a_reduction_that_places_shards_packs_nothing() -> None:
    fn, mesh = ReduceFn("reduce_scatter", "sum", (0,), 1), DeviceMesh((4,))
    assert reduction_nbytes((16, 16), 4, spec("(R, R)"), (fn,), mesh, places_shards=True) == 1024 + 256


@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (ReduceFn("all_reduce", "sum", (0,)), 2048),
        (ReduceFn("reduce_scatter", "sum", (0,), 0), 1024 + 256),
        (ReduceFn("reduce_scatter", "sum", (0,), 1), 2048),
    ],
)
def test_a_reduction_holds_its_input_and_its_result(fn: ReduceFn, most: int) -> None:
    assert reduction_nbytes((16, 16), 4, spec("(R, R)"), (fn,), DeviceMesh((4,))) == most
