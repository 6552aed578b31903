"""Conversions between any two layouts whose parts differ, each step in the semantics of its collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reshard.test_reshard import cluster_of

from hidet_dist.errors import SpecError
from hidet_dist.reshard import Step, cheapest_conversion, conversion_buffers, conversion_seconds, path, walk
from hidet_dist.reshard.buffers import conversion_nbytes
from hidet_dist.spec import DeviceMesh, PartialSpec, TensorShardSpec
from hidet_dist.spec.partial import Layout, split_of
from hidet_dist.spec.parts import in_lowest_terms

MESHES = tuple(map(DeviceMesh.parse, ("[a=3]", "[a=5]", "[a=2, b=3]", "[a=3, b=2]", "[a=2:1, b=3]", "[a=2, b=2, c=3]")))


@st.composite
def layouts(draw: st.DrawFn, mesh: DeviceMesh, ndim: int, partial: bool) -> Layout:
    """A layout whose axes split dims in parts that differ from axis to axis; with ``partial``, perhaps partial sums."""
    per_dim: list[list[int]] = [[] for _ in range(ndim)]
    parts, left = {}, []
    for axis in draw(st.permutations(range(mesh.ndim))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim < 0:
            left.append(axis)
            continue
        per_dim[dim].append(axis)
        size = mesh.shape[axis]
        own = in_lowest_terms(draw(st.lists(st.integers(1, 3), min_size=size, max_size=size)))
        if own != mesh.shares_of(axis):
            parts[axis] = own
    spec = TensorShardSpec(tuple(map(tuple, per_dim)), tuple(parts.items()))
    return PartialSpec(spec, "sum", tuple(left)) if partial and left and draw(st.booleans()) else spec


@st.composite
def conversions(draw: st.DrawFn) -> tuple[tuple[int, ...], DeviceMesh, Layout, TensorShardSpec]:
    mesh = draw(st.sampled_from(MESHES))
    ndim = draw(st.integers(1, 2))
    source = draw(layouts(mesh, ndim, partial=True))
    target = split_of(draw(layouts(mesh, ndim, partial=False)))
    shape = tuple(math.lcm(split_of(source).units(dim, mesh), target.units(dim, mesh)) for dim in range(ndim))
    return shape, mesh, source, target


def shards(whole: np.ndarray, layout: Layout, mesh: DeviceMesh) -> list[np.ndarray]:
    """The shard of each rank; of partial sums, the devices of a group have equal terms."""
    terms = mesh.group_size(layout.mesh_axes) if isinstance(layout, PartialSpec) else 1
    spec = split_of(layout)
    return [whole[spec.slices(whole.shape, mesh, mesh.coordinate(rank))] / terms for rank in range(mesh.size)]


def run(step: Step, values: Sequence[np.ndarray], mesh: DeviceMesh) -> list[np.ndarray]:
    """The semantics of a step on all ranks' shards, from the parts that it joins or splits."""
    joined, divided = step.joined(mesh), step.divided(mesh)
    results = []
    for rank in range(mesh.size):
        peers = mesh.peers(rank, step.mesh_axes)
        result = sum(values[peer] for peer in peers) if step.op else values[rank]
        if joined is not None:
            dim = step.dim
            assert dim is not None
            extent = values[rank].shape[dim] // joined.interval(joined.units, mesh.coordinate(rank))[1] * joined.units
            begins = {joined.interval(extent, mesh.coordinate(peer))[0]: values[peer] for peer in peers}
            result = np.concatenate([begins[begin] for begin in sorted(begins)], axis=dim)
        if divided is not None:
            dim, _ = step.split
            begin, size = divided.interval(result.shape[dim], mesh.coordinate(rank))
            result = result.take(range(begin, begin + size), axis=dim)
        results.append(np.asarray(result))
    return results


@settings(max_examples=40, deadline=None)
@given(conversions())
def test_the_steps_turn_any_layout_into_any_other(
    case: tuple[tuple[int, ...], DeviceMesh, Layout, TensorShardSpec],
) -> None:
    shape, mesh, source, target = case
    cluster = cluster_of(mesh.shape)
    cluster = type(cluster)(mesh, cluster.links, cluster.device)
    found = cheapest_conversion(shape, "float32", source, target, cluster)
    whole = np.arange(float(math.prod(shape))).reshape(shape)
    values = shards(whole, source, mesh)
    for step, after in zip(found.steps, walk(found.steps, source, shape, mesh), strict=True):
        assert Step.parse(str(step)) == step
        values = run(step, values, mesh)
        for got, want in zip(values, shards(whole, after, mesh), strict=True):
            np.testing.assert_allclose(got, want)
    if isinstance(source, TensorShardSpec):
        pair = [source, target]
        table = conversion_seconds(shape, "float32", pair, pair, cluster)
        assert table[0][1] == found.seconds
        (buffers,) = conversion_buffers(shape, "float32", [source], [target], cluster)
        assert buffers == (conversion_nbytes(shape, 4, source, found.steps, mesh),)


def test_from_one_list_of_parts_to_another_a_tensor_is_gathered_and_sliced() -> None:
    cluster = cluster_of((2,))
    source, target = TensorShardSpec.parse("(S0[2,1], R)"), TensorShardSpec.parse("(S0[1,2], R)")
    steps = cheapest_conversion((6, 4), "float32", source, target, cluster).steps
    assert list(map(str, steps)) == ["all_gather(axes=0[2,1], dim=0)", "slice(axes=0[1,2], dim=0)"]
    with pytest.raises(SpecError, match="the parts there are others"):
        Step.parse("all_gather(axes=0, dim=0)").after(source, (6, 4), cluster.mesh)


@pytest.mark.parametrize(
    ("source", "target", "step"),
    [
        ("(S0[2,1], R)", "(R, S0)", "all_to_all(axes=0[2,1], dim=0, to_dim=1, to_axes=0)"),
        ("(R, S0)", "(S0[2,1], R)", "all_to_all(axes=0, dim=1, to_dim=0, to_axes=0[2,1])"),
        ("(S0[2,1], R)", "(R, S0[2,1])", "all_to_all(axes=0[2,1], dim=0, to_dim=1)"),
        ("(S0[2,1], R)", "(R, S0[1,2])", "all_to_all(axes=0[2,1], dim=0, to_dim=1, to_axes=0[1,2])"),
    ],
)
def test_unequal_parts_move_from_one_dim_to_another(source: str, target: str, step: str) -> None:
    cluster, shape = cluster_of((2,)), (600, 600)
    cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth_bytes_per_second=1e12))
    ends = TensorShardSpec.parse(source), TensorShardSpec.parse(target)
    (only,) = cheapest_conversion(shape, "float32", *ends, cluster).steps
    assert str(only) == step
    assert Step.parse(step) == only
    assert only.after(ends[0], shape, cluster.mesh) == ends[1]


def test_steps_with_parts_that_their_kind_lacks_are_refused() -> None:
    with pytest.raises(SpecError, match="all_reduce takes none"):
        Step("all_reduce", (0,), op="sum", parts=((0, (2, 1)),))
    with pytest.raises(SpecError, match="all_gather takes none"):
        Step("all_gather", (0,), 0, to_parts=((0, (2, 1)),))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tensors_of_other_sizes_do_not_change_a_conversion(data: st.DataObject) -> None:
    """Those whose dims are tiled alike share the steps between layouts, and not those whose dims are not."""
    mesh = data.draw(st.sampled_from([mesh for mesh in MESHES if not mesh.shares]))
    ends = [data.draw(layouts(mesh, 2, partial=False)) for _ in range(3)]
    units = [math.lcm(*(split_of(end).units(dim, mesh) for end in ends)) for dim in range(2)]
    factors = st.tuples(*[st.sampled_from([1, 2, 3, 5, 6, 8, 64])] * 2)
    shapes = [
        tuple(map(math.prod, zip(units, factor, strict=True))) for factor in data.draw(st.lists(factors, max_size=4))
    ]
    cluster = cluster_of(mesh.shape)

    def tables(shape: tuple[int, ...]) -> tuple[object, ...]:
        seconds = conversion_seconds(shape, 4, ends, ends, cluster)
        paths = [str(cheapest_conversion(shape, 4, source, target, cluster)) for source in ends for target in ends]
        return seconds, conversion_buffers(shape, 4, ends, ends, cluster), paths

    path._GRAPHS.clear()
    together = [tables(shape) for shape in shapes]
    for shape, shared in zip(shapes, together, strict=True):
        path._GRAPHS.clear()
        assert tables(shape) == shared


def test_large_dims_share_the_steps_between_layouts_with_parts() -> None:
    path._GRAPHS.clear()
    cluster = cluster_of((2, 3))
    ends = list(map(TensorShardSpec.parse, ("(S1[3,3,2], R)", "(R, S01)")))
    for shape in ((64, 512), (128, 4096), (8, 512), (96, 512)):
        conversion_seconds(shape, 4, ends, ends, cluster)
    # Eight rows, or 96, are split otherwise: by all devices into fewer shards, or without padding. Each has two graphs.
    assert len({id(graph._alike) for graph in path._GRAPHS._known.values()}) == 3 * 2


def test_a_conversion_does_not_depend_on_what_else_is_asked_for() -> None:
    """A path through the parts of a third layout would be in the table, but not in the plan that is made of it."""
    cluster, shape = cluster_of((2,)), (81, 120)  # only unequal parts of the first dim tile it
    specs = list(map(TensorShardSpec.parse, ("(R, S0)", "(R, R)", "(S0[2,1], R)", "(S0[1,2], R)", "(R, S0[1,3])")))
    table = conversion_seconds(shape, "float32", specs, specs, cluster)
    for source, row in zip(specs, table, strict=True):
        for target, seconds in zip(specs, row, strict=True):
            assert seconds == cheapest_conversion(shape, "float32", source, target, cluster).seconds, (source, target)
