from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.connect import Step, connect, reduce_seconds
from hidet_dist.errors import SpecError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.spec import DeviceMesh, ReduceFn, TensorShardSpec

DEVICE = Device("toy", {"default": 1e9}, 1e9, 10**9, 1e-6)
MESHES = ((2,), (4,), (2, 2), (2, 3))
# Divisible by every group of the meshes in both of the first dims; the last dim splits by none.
SHAPE = (24, 12, 5)


def cluster_of(mesh: tuple[int, ...]) -> Cluster:
    links = tuple(Link(1e-6 * (axis + 1), 1e9 / (axis + 1)) for axis in range(len(mesh)))
    return Cluster(DeviceMesh(mesh), links, DEVICE)


def all_specs(mesh: DeviceMesh) -> list[TensorShardSpec]:
    """Every spec that fits, the order of the axes on a dim included."""
    found = set()
    for order in itertools.permutations(range(mesh.ndim)):
        for dims in itertools.product((None, 0, 1, 2), repeat=mesh.ndim):
            per_dim: list[list[int]] = [[], [], []]
            for axis in order:
                if dims[axis] is not None:
                    per_dim[dims[axis]].append(axis)
            spec = TensorShardSpec(tuple(map(tuple, per_dim)))
            if spec.fits(SHAPE, mesh):
                found.add(spec)
    return sorted(found, key=str)


def shards(whole: np.ndarray, spec: TensorShardSpec, mesh: DeviceMesh) -> list[np.ndarray]:
    return [whole[spec.slices(whole.shape, mesh, mesh.coordinate(rank))] for rank in range(mesh.size)]


def run(step: Step, values: list[np.ndarray], mesh: DeviceMesh) -> list[np.ndarray]:
    """What each step means for the shards of all ranks."""
    results = []
    for rank, own in enumerate(values):
        peers = mesh.peers(rank, step.mesh_axes)
        if step.kind == "all_gather":
            results.append(np.concatenate([values[peer] for peer in peers], axis=step.dim))
        else:
            assert step.kind == "slice"
            place = 0
            for axis in step.mesh_axes:
                place = place * mesh.shape[axis] + mesh.coordinate(rank)[axis]
            results.append(np.split(own, mesh.group_size(step.mesh_axes), axis=step.dim)[place])
    return results


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Cluster, TensorShardSpec, TensorShardSpec]:
    cluster = cluster_of(draw(st.sampled_from(MESHES)))
    specs = st.sampled_from(all_specs(cluster.mesh))
    return cluster, draw(specs), draw(specs)


@settings(max_examples=400, deadline=None)
@given(conversions())
def test_the_steps_turn_any_spec_into_any_other(case: tuple[Cluster, TensorShardSpec, TensorShardSpec]) -> None:
    cluster, source, target = case
    mesh = cluster.mesh
    whole = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    found = connect(SHAPE, 4, source, target, cluster)
    values, cost = shards(whole, source, mesh), 0.0
    for step in found.steps:
        values = run(step, values, mesh)
        nbytes = math.prod(SHAPE) * 4 // step.result.num_shards(mesh)
        for value, expected in zip(values, shards(whole, step.result, mesh), strict=True):
            np.testing.assert_array_equal(value, expected)
        if step.kind == "all_gather":
            cost += cluster.all_gather_seconds(nbytes, step.mesh_axes)
        if step.kind == "slice" or step.dim:
            cost += cluster.copy_seconds(nbytes)
    for value, expected in zip(values, shards(whole, target, mesh), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert found.seconds == pytest.approx(cost, rel=1e-12, abs=0)
    assert (found.seconds == 0) == (source == target)


def test_a_shared_split_is_kept_and_nothing_is_gathered_to_be_dropped() -> None:
    cluster = cluster_of((2, 2))
    parse = TensorShardSpec.parse
    steps = connect(SHAPE, 4, parse("(S01, R, R)"), parse("(S0, S1, R)"), cluster).steps
    assert [str(step) for step in steps] == ["all_gather(axes=1, dim=0)", "slice(axes=1, dim=1)"]
    # A slice needs no peers: it goes first, so that less is gathered after it.
    steps = connect(SHAPE, 4, parse("(S0, R, R)"), parse("(R, S1, R)"), cluster).steps
    assert [str(step) for step in steps] == ["slice(axes=1, dim=1)", "all_gather(axes=0, dim=0)"]


def test_a_spec_that_does_not_fit_is_refused() -> None:
    cluster = cluster_of((2, 3))
    with pytest.raises(SpecError, match="does not divide"):
        connect(SHAPE, 4, TensorShardSpec.parse("(R, R, S1)"), TensorShardSpec.replicated(3), cluster)
    with pytest.raises(SpecError, match="for 2 dims"):
        connect(SHAPE, 4, TensorShardSpec.replicated(3), TensorShardSpec.replicated(2), cluster)


def test_reduce_functions_cost_what_they_move() -> None:
    cluster = cluster_of((2, 2))
    partial = TensorShardSpec.parse("(R, R, R)")
    b = math.prod(SHAPE) * 4
    scatter, rest = ReduceFn("reduce_scatter", "sum", (0,), 1), ReduceFn("all_reduce", "sum", (1,))
    # What is scattered on a dim other than the first is first copied into rank order; what is left is half.
    expected = (
        cluster.reduce_scatter_seconds(b, (0,)) + cluster.copy_seconds(b) + cluster.all_reduce_seconds(b // 2, (1,))
    )
    assert reduce_seconds(SHAPE, 4, partial, (scatter, rest), cluster) == pytest.approx(expected, rel=1e-12)
