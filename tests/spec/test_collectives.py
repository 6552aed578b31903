"""The table of collectives: what a kind says agrees with what it does, and no layer lacks a kind."""

from __future__ import annotations

from ctypes import c_int32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist import native
from hidet_dist.native.interface import PREFIX
from hidet_dist.native.signatures import COLLECTIVES as C_INTERFACE
from hidet_dist.native.signatures import BlocksPointer, TransportTable
from hidet_dist.reshard import Step, moves
from hidet_dist.runtime.transports.gloo import GlooTransport
from hidet_dist.spec import DeviceMesh, Layout, TensorShardSpec
from hidet_dist.spec.collectives import COLLECTIVES, COMMUNICATING, Collective
from hidet_dist.spec.partial import PartialSpec, partial_axes, split_of

MESH = DeviceMesh((2, 3))
SHAPE = (6, 12)
LAYOUTS: list[Layout] = [
    *(TensorShardSpec.parse(text) for text in ("(R, R)", "(S0, R)", "(R, S1)", "(S1, S0)", "(R, S01)")),
    PartialSpec(TensorShardSpec.parse("(R, R)"), "sum", (0, 1)),
    PartialSpec(TensorShardSpec.parse("(R, S0)"), "sum", (1,)),
]
EACH = [pytest.param(COLLECTIVES[name], id=name) for name in COMMUNICATING]


def held(whole: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The shard of each rank; partial shards add up to the tensor."""
    shards = []
    count = MESH.group_size(partial_axes(layout))
    for rank in range(MESH.size):
        coordinate = MESH.coordinate(rank)
        shard = whole[split_of(layout).slices(SHAPE, MESH, coordinate)]
        if count > 1:
            first = not any(coordinate[axis] for axis in partial_axes(layout))
            shard = shard - 7 * (count - 1) if first else np.full_like(shard, 7)
        shards.append(shard)
    return shards


def steps_in_group_order() -> list[tuple[Layout, Step, Layout]]:
    """Steps whose blocks lie in the order of the group's ranks; others are put into it before or after."""
    found = []
    for layout in LAYOUTS:
        for step, after in moves(layout, SHAPE, MESH):
            if list(step.mesh_axes) == sorted(step.mesh_axes) and list(step.to_axes) == sorted(step.to_axes):
                found.append((layout, step, after))
    return found


STEPS = steps_in_group_order()


def test_the_steps_are_of_every_kind() -> None:
    assert {step.kind for _, step, _ in STEPS} == COLLECTIVES.keys()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STEPS), st.integers(0, 2**32 - 1))
def test_the_result_of_a_collective_has_the_layout_of_its_step(taken: tuple[Layout, Step, Layout], seed: int) -> None:
    layout, step, after = taken
    whole = np.random.default_rng(seed).integers(-100, 100, SHAPE)
    sent, ranks = held(whole, layout), MESH.group_size(step.mesh_axes)
    kind = step.collective

    def join(blocks: object) -> np.ndarray:
        assert step.dim is not None
        return np.concatenate(list(blocks), axis=step.dim)  # type: ignore[call-overload]

    received = []
    for rank in range(MESH.size):
        peers = MESH.peers(rank, step.mesh_axes)
        received.append(
            kind.result(
                [sent[peer] for peer in peers],
                peers.index(rank),
                lambda parts: np.sum(parts, axis=0),
                lambda part: np.split(part, ranks, axis=step.split[0]),
                join,
            )
        )
    for rank, y in enumerate(received):
        rest = [received[peer] for peer in MESH.peers(rank, partial_axes(after))]
        np.testing.assert_array_equal(
            np.sum(rest, axis=0), whole[split_of(after).slices(SHAPE, MESH, MESH.coordinate(rank))]
        )
        if kind.communicates:
            in_group = kind.whole(sent[rank].size, ranks)
            assert kind.sent(in_group, ranks) == sent[rank].size
            assert kind.received(in_group, ranks) == y.size
            assert kind.block(in_group, ranks) * ranks ** (kind.joins + kind.splits) == in_group


@pytest.mark.parametrize("kind", EACH)
def test_the_c_interface_has_the_kind(kind: Collective) -> None:
    function = C_INTERFACE.functions[kind.symbol().removeprefix(PREFIX)]
    assert len(function.arguments) == 5 + kind.reduces
    assert kind.name.upper() in C_INTERFACE.constants  # as ranks call it in envelopes
    methods = dict(TransportTable._fields_)  # type: ignore[arg-type]
    assert methods[kind.name]._argtypes_[1:] == function.arguments
    parts = C_INTERFACE.functions.get(kind.symbol("parts").removeprefix(PREFIX))
    assert (parts is not None) == kind.has_dim
    if parts is not None:
        if kind.moves:  # an exchange of parts of any size
            assert methods["all_to_all_v"]._argtypes_[1:] == (parts.arguments[:3] + parts.arguments[4:])
        else:
            assert methods[f"{kind.name}_parts"]._argtypes_[1:] == parts.arguments
    blocks = C_INTERFACE.functions.get(kind.symbol("blocks").removeprefix(PREFIX))
    assert (blocks is not None) == kind.has_dim
    if blocks is not None:
        own = kind.arguments("send", "recv", "sent", "received")
        kinds = blocks.arguments
        assert [each is BlocksPointer for each in kinds[: len(own)]] == [name in ("sent", "received") for name in own]
        assert kinds[len(own) :] == (c_int32,) * (2 + kind.reduces)
        assert methods[f"{kind.name}_blocks"]._argtypes_[1:] == kinds


@pytest.mark.parametrize("kind", EACH)
def test_the_transports_of_cpus_have_the_kind(kind: Collective) -> None:
    assert callable(getattr(GlooTransport, f"_{kind.name}"))
    nothing = native.make_transport(dict.fromkeys(native.TRANSPORT_FUNCTIONS, lambda *_: native.FAILED))
    shared = native.SharedMemory(nothing, lambda _: native.FAILED, lambda _: native.FAILED, 0, 2, 1.0)
    try:
        assert getattr(shared.table, kind.name)
        assert not kind.has_dim or getattr(shared.table, f"{kind.name}_blocks")
    finally:
        shared.destroy()


@pytest.mark.parametrize("lacks", native.TRANSPORT_FUNCTIONS)
def test_a_transport_that_lacks_a_kind_is_refused(lacks: str) -> None:
    functions = {name: lambda *_: native.OK for name in native.TRANSPORT_FUNCTIONS}
    table = native.make_transport(functions)
    setattr(table, lacks, type(getattr(table, lacks))())
    with pytest.raises(ValueError, match="the transport lacks a function"):
        native.create_communicator(table, (2,), 0)
    del functions[lacks]
    with pytest.raises(ValueError, match=lacks):
        native.make_transport(functions)
