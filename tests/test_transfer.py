"""Transfers between meshes: every element arrives where it must, and crosses once."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hidet_dist.cost.transfer import transfer_seconds
from hidet_dist.errors import SpecError
from hidet_dist.machine import builtin
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.collectives import ALL_GATHER
from hidet_dist.transfer import MeshLayout, plan_transfer, transferred, volume


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    """A mesh of up to three axes, some of which split by shares."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    shares = [draw(st.sampled_from([(), tuple(draw(st.permutations(range(1, n + 1))))])) for n in shape]
    return DeviceMesh(shape, (), tuple(shares))


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> MeshLayout:
    """A mesh, and a spec that gives some of its axes to dims."""
    mesh = draw(meshes())
    axes = draw(st.permutations(range(mesh.ndim)))
    dims = [draw(st.integers(-1, ndim - 1)) for _ in axes]
    return MeshLayout(
        mesh, TensorShardSpec(tuple(tuple(a for a, d in zip(axes, dims, strict=True) if d == n) for n in range(ndim)))
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[tuple[int, ...], MeshLayout, MeshLayout]:
    """Two layouts of a tensor, on meshes of unlike shapes, with a shape that both divide."""
    ndim = draw(st.integers(0, 3))
    source, target = draw(layouts(ndim)), draw(layouts(ndim))
    assume(math.prod(one.spec.units(dim, one.mesh) for one in (source, target) for dim in range(ndim)) <= 2000)
    shards = [math.lcm(*(one.spec.units(dim, one.mesh) for one in (source, target))) for dim in range(ndim)]
    return tuple(n * draw(st.integers(1, 3)) for n in shards), source, target


@given(transfers())
def test_every_element_arrives_and_crosses_once(case: tuple[tuple[int, ...], MeshLayout, MeshLayout]) -> None:
    shape, source, target = case
    transfer = plan_transfer(shape, source, target)
    whole = np.arange(math.prod(shape)).reshape(transfer.shape)

    def shards(layout: MeshLayout) -> list[np.ndarray]:
        return [whole[layout.box(transfer.shape, rank)] for rank in range(layout.mesh.size)]

    for got, expected in zip(transferred(transfer, shards(transfer.source)), shards(transfer.target), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert sum(volume(message.box) for message in transfer.messages) == math.prod(shape)
    sent = np.zeros(transfer.shape, int)
    for message in transfer.messages:
        sent[message.box] += 1
    assert (sent == 1).all()


@given(transfers())
def test_replicas_share_the_work(case: tuple[tuple[int, ...], MeshLayout, MeshLayout]) -> None:
    """No holder of a shard sends more than another by more than one message."""
    shape, source, target = case
    transfer = plan_transfer(shape, source, target)
    sent, largest = Counter[int](), 0
    for message in transfer.messages:
        sent[message.sender] += volume(message.box)
        largest = max(largest, volume(message.box))
    for rank in range(source.mesh.size):
        same = [
            other
            for other in range(source.mesh.size)
            if transfer.source.box(transfer.shape, other) == transfer.source.box(transfer.shape, rank)
        ]
        assert max(sent[other] for other in same) - min(sent[other] for other in same) <= largest


def test_a_replicated_reader_gathers_within_its_own_mesh() -> None:
    one, two = DeviceMesh((1,)), DeviceMesh((2, 2))
    transfer = plan_transfer(
        (4, 6), MeshLayout(one, TensorShardSpec.parse("(R, R)")), MeshLayout(two, TensorShardSpec.parse("(R, S1)"))
    )
    gather = transfer.gather(0)
    assert gather is not None and gather.mesh_axes == (0,) and gather.extent == 2
    assert [(m.sender, m.receiver, volume(m.box)) for m in transfer.messages] == [
        (0, 0, 6),
        (0, 1, 6),
        (0, 2, 6),
        (0, 3, 6),
    ]


def test_the_link_is_paid_for_what_one_device_sends() -> None:
    """Two senders share the work; the all-gather is paid on the readers' own links."""
    pair, cluster = DeviceMesh((2,)), builtin("dgx-h100-pod", DeviceMesh((2, 8)))
    link, own = cluster.links[0], builtin("dgx-h100", pair)
    replicated = MeshLayout(pair, TensorShardSpec.parse("(R)"))
    seconds = transfer_seconds(plan_transfer((1000,), replicated, replicated), 4000, link, own)
    gather = own.collective_seconds(ALL_GATHER, 4000, (0,))
    assert seconds == pytest.approx(link.latency_seconds + 2000 / link.bandwidth_bytes_per_second + gather)


def test_uneven_shards_are_gathered_in_parts_of_their_own_size() -> None:
    """Ten rows in shares 4:1 on two replicas each: halves of eight rows, and of two."""
    one, two = DeviceMesh((1,)), DeviceMesh((2, 2), ("gpu", "copy"), ((4, 1), ()))
    transfer = plan_transfer(
        (10, 3), MeshLayout(one, TensorShardSpec.parse("(R, R)")), MeshLayout(two, TensorShardSpec.parse("(S0, R)"))
    )
    assert [(m.receiver, m.box[0]) for m in transfer.messages] == [
        (0, slice(0, 4)),
        (1, slice(4, 8)),
        (2, slice(8, 9)),
        (3, slice(9, 10)),
    ]
    assert [gather.elements for gather in transfer.gathers] == [12, 12, 3, 3]
    cluster = builtin("dgx-h100", two)
    link = cluster.links[0]
    sent = 4 * link.latency_seconds + 10 * 3 * 4 / link.bandwidth_bytes_per_second  # by the only sender
    gathered = cluster.collective_seconds(ALL_GATHER, 2 * 12 * 4, (1,))  # within the group of the larger shard
    assert transfer_seconds(transfer, 10 * 3 * 4, link, cluster) == pytest.approx(sent + gathered)


def test_specs_that_do_not_fit_are_refused() -> None:
    mesh = DeviceMesh((2,))
    split, whole = (MeshLayout(mesh, TensorShardSpec.parse(text)) for text in ("(S0)", "(R)"))
    with pytest.raises(SpecError, match="does not divide"):
        plan_transfer((3,), split, whole)
    with pytest.raises(SpecError, match="2 shards of the shapes"):
        transferred(plan_transfer((4,), split, whole), [np.zeros(2)])
