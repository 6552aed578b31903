"""The memory that conversions and reductions take while they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reshard.test_reshard import all_specs, cluster_of

from hidet_dist.machine import Cluster, Link, builtin
from hidet_dist.reshard import Step, cheapest_conversion, conversion_buffers
from hidet_dist.reshard.buffers import conversion_nbytes, reduction_nbytes
from hidet_dist.spec import DeviceMesh, ReduceFn, TensorShardSpec

spec = TensorShardSpec.parse


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
    fn = ReduceFn("all_reduce", "max", (0,))
    assert reduction_nbytes((16, 16), 4, spec("(R, R)"), (fn,), mesh, places_shards=True) == 2 * 1024


@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (ReduceFn("all_reduce", "sum", (0,)), 2048),
        (ReduceFn("reduce_scatter", "sum", (0,), 0), 1024 + 256),
        (ReduceFn("reduce_scatter", "sum", (0,), 1), 2048),
        (ReduceFn("all_reduce", "max", (0,)), 1024 + 4 * 1024),  # what all ranks have, to be reduced by a kernel
        (ReduceFn("reduce_scatter", "min", (0,), 0), 1024 + 4 * 256),
    ],
)
def test_a_reduction_holds_its_input_and_its_result(fn: ReduceFn, most: int) -> None:
    assert reduction_nbytes((16, 16), 4, spec("(R, R)"), (fn,), DeviceMesh((4,))) == most


MESHES = (DeviceMesh((4,)), DeviceMesh((2, 3)), DeviceMesh((2, 2, 2)), DeviceMesh((2, 2), shares=((3, 1), (1, 1))))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(MESHES),
    st.lists(st.sampled_from((1, 4, 6, 8, 13, 24)), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.data(),
)
def test_a_table_of_buffers_is_that_of_each_conversion(
    mesh: DeviceMesh, shape: tuple[int, ...], places_shards: bool, data: st.DataObject
) -> None:
    links = tuple(Link(1e-6 * (axis + 1), 1e9 / (axis + 1)) for axis in range(mesh.ndim))
    device = replace(cluster_of((2,)).device, places_shards=places_shards)
    assert_tabulated(shape, Cluster(mesh, links, device), data)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_so_it_is_on_a_mesh_of_many_axes(data: st.DataObject) -> None:
    assert_tabulated((32, 32), cluster_of((2,) * 5), data)


def assert_tabulated(shape: tuple[int, ...], cluster: Cluster, data: st.DataObject) -> None:
    fitting = st.sampled_from(all_specs(shape, cluster.mesh))
    sources = data.draw(st.lists(fitting, min_size=1, max_size=3), "sources")
    targets = data.draw(st.lists(fitting, min_size=1, max_size=4), "targets")
    assert conversion_buffers(shape, "float32", sources, targets, cluster) == tuple(
        tuple(
            conversion_nbytes(
                shape,
                4,
                source,
                cheapest_conversion(shape, "float32", source, target, cluster).steps,
                cluster.mesh,
                cluster.device.places_shards,
            )
            for target in targets
        )
        for source in sources
    )
