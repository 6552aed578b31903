"""The native library, in this process: argument checks, the built-in transport, and failures."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hidet_dist import native
from hidet_dist.native.signatures import COLLECTIVES
from hidet_dist.spec.collectives import REDUCED_DTYPES

F32 = native.dtype_code("float32")
SUM = native.reduce_op_code("sum")


@pytest.fixture
def alone() -> Iterator[int]:
    """A communicator of a mesh of one device, bound."""
    handle = native.create_communicator(None, (1, 1), 0)
    native.bind(handle)
    yield handle
    native.destroy_communicator(handle)


class RecordingTransport:
    """Notes the calls it gets, and gives one status to all."""

    def __init__(self, status: int = native.OK):
        self.calls: list[tuple[object, ...]] = []
        self.status = status
        self.table = native.make_transport({name: self._recorder(name) for name in native.TRANSPORT_FUNCTIONS})

    def _recorder(self, name: str) -> native.TransportFunction:
        def record(*arguments: int) -> int:
            self.calls.append((name, *arguments))
            return self.status

        return record


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_codes_are_those_of_the_dtypes_with_their_names() -> None:
    assert set(native.DTYPE_CODES) == set(REDUCED_DTYPES)
    values = COLLECTIVES.constants
    short = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U"}
    for name, code in native.DTYPE_CODES.items():
        kind, bits = re.fullmatch(r"([a-z]+)(\d*)", name).groups()  # type: ignore[union-attr]
        assert values[short.get(kind, kind.upper()) + bits] == code


def test_library_is_found_with_its_header() -> None:
    assert native.library_path().parent == native.library_dir()
    # Kernels that are loaded later find the functions without being told where the library is.
    assert ctypes.CDLL(None).hidet_dist_all_reduce if native.library() else None


@pytest.mark.parametrize(("name", "size"), [("float64", 8), ("bfloat16", 2), ("bool", 1), ("int32", 4)])
def test_dtype_sizes(name: str, size: int) -> None:
    assert native.dtype_size(native.dtype_code(name)) == size
    assert native.dtype_size(99) == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        native.dtype_code("complex64")
    with pytest.raises(ValueError, match="avg"):
        native.reduce_op_code("avg")


@pytest.mark.parametrize("group", [0, 1, 3])
def test_a_rank_alone_copies(alone: int, group: int) -> None:
    send = np.arange(4, dtype=np.float32)
    for call in (native.all_reduce, native.reduce_scatter):
        recv = np.zeros_like(send)
        assert call(address(send), address(recv), 4, F32, SUM, group) == native.OK
        np.testing.assert_array_equal(recv, send)
    for exchange in (native.all_gather, native.all_to_all):
        recv = np.zeros_like(send)
        assert exchange(address(send), address(recv), 4, F32, group) == native.OK
        np.testing.assert_array_equal(recv, send)
    recv = np.zeros((2, 1), np.float32)  # the second column is beyond the end
    blocks = native.Blocks(2, 2, 1)
    assert native.all_gather_blocks(address(send), address(recv), blocks, F32, group) == native.OK
    np.testing.assert_array_equal(recv, [[0], [2]])
    recv = np.zeros_like(send)
    assert native.broadcast(address(send), address(recv), 4, F32, 0, group) == native.OK
    np.testing.assert_array_equal(recv, send)
    recv = np.zeros_like(send)
    assert native.send_recv(address(send), 4, 0, address(recv), 4, 0, F32, group) == native.OK
    np.testing.assert_array_equal(recv, send)
    assert native.all_reduce(address(send), address(send), 4, F32, SUM, group) == native.OK
    assert native.all_reduce(0, 0, 0, F32, SUM, group) == native.OK
    wanted = np.array([1, 0], np.uint8)
    for exchange_rows in (native.gather_rows, native.reduce_scatter_rows):
        recv = np.ones_like(send)
        assert exchange_rows(address(send), address(wanted), address(recv), 2, 2, F32, group) == native.OK
        np.testing.assert_array_equal(recv, [0, 1, 0, 0])
    assert native.gather_rows(0, 0, 0, 0, 2, F32, group) == native.OK
    assert native.sequence(alone) == 12
    assert native.error(alone) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, -1, F32, SUM, 1), "negative count -1"),
        ((1, 1, 1, 9, SUM, 1), "unknown dtype 9"),
        ((1, 1, 1, -1, SUM, 1), "unknown dtype -1"),
        ((1, 1, 1, F32, 5, 1), "unknown reduce operation 5"),
        ((1, 1, 1, 8, 4, 1), "bools have no mean"),
        ((1, 1, 1, F32, SUM, 4), "group mask 4"),
        ((1, 1, 1, F32, SUM, -1), "group mask -1"),
        ((1, 1, 2**62, F32, SUM, 1), "too large"),
        ((0, 1, 1, F32, SUM, 1), "null buffer"),
        ((1, 0, 1, F32, SUM, 1), "null buffer"),
    ],
)
def test_wrong_arguments_fail_the_communicator(alone: int, arguments: tuple[int, ...], message: str) -> None:
    assert native.all_reduce(*arguments) == native.INVALID_ARGUMENT
    assert message in native.last_error()
    assert message in (native.error(alone) or "")
    assert native.sequence(alone) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.broadcast(1, 1, 1, F32, 2, 1), "no group rank 2 in a group of 2"),
        (lambda: native.broadcast(1, 1, 1, F32, -1, 1), "no root"),
        (lambda: native.broadcast(0, 1, 1, F32, 0, 1), "null buffer"),
        (lambda: native.send(1, 1, F32, 2, 1), "no group rank 2"),
        (lambda: native.send(1, 1, F32, 0, 1), "only while it receives from itself"),
        (lambda: native.recv(1, 1, F32, -2, 1), "no group rank -2"),
        (lambda: native.recv(1, -1, F32, 1, 1), "negative count -1"),
        (lambda: native.recv(0, 1, F32, 1, 1), "null buffer"),
        (lambda: native.send_recv(1, 1, 0, 1, 2, 0, F32, 1), "sends 1 elements to itself, but receives 2"),
        (lambda: native.send_recv(1, 1, 0, 1, 1, 1, F32, 1), "only while it receives from itself"),
        (lambda: native.all_gather_blocks(1, 1, native.Blocks(-1, 1, 2), F32, 1), "negative count -1"),
        (lambda: native.all_gather_blocks(1, 1, native.Blocks(1, 1, -2), F32, 1), "negative size"),
        (lambda: native.all_gather_blocks(1, 1, native.Blocks(1, 2, 5), F32, 1), "room between them: 1 rows of 5"),
        (lambda: native.reduce_scatter_blocks(1, 1, native.Blocks(1, 2, 3), F32, SUM, 1), "less to send"),
        (
            lambda: native.all_to_all_blocks(1, native.Blocks(1, 2, 4), 1, native.Blocks(3, 1, 2), F32, 1),
            "different sizes",
        ),
        (lambda: native.all_to_all_blocks(1, None, 1, None, F32, 1), "null blocks"),
        (lambda: native.gather_rows(1, 1, 1, -2, 3, F32, 1), "negative size: -2 rows of 3 elements"),
        (lambda: native.gather_rows(1, 0, 1, 2, 3, F32, 1), "null mask"),
        (lambda: native.gather_rows(0, 1, 1, 2, 3, F32, 1), "null buffer"),
        (lambda: native.reduce_scatter_rows(1, 1, 1, 2**40, 2**40, F32, 1), "the rows are too large"),
        (lambda: native.reduce_scatter_rows(1, 1, 1, 2, 3, F32, 2), "group mask 2"),
        (lambda: native.all_gather_blocks(0, 1, native.Blocks(1, 1, 2), F32, 1), "null buffer"),
    ],
)
def test_wrong_group_ranks_fail_the_communicator(call: Callable[[], int], message: str) -> None:
    transport = RecordingTransport()
    handle = native.create_communicator(transport.table, (2,), 0)
    native.bind(handle)
    assert call() == native.INVALID_ARGUMENT
    assert message in (native.error(handle) or "")
    assert transport.calls == []
    native.destroy_communicator(handle)


def test_without_a_communicator() -> None:
    native.bind(None)
    assert native.all_gather(1, 1, 1, F32, 1) == native.NO_COMMUNICATOR
    assert "all_gather: this thread has no current communicator" in native.last_error()


def test_a_communicator_is_bound_to_one_thread(alone: int) -> None:
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(native.all_reduce(0, 0, 0, F32, SUM, 0)))
    thread.start()
    thread.join()
    assert statuses == [native.NO_COMMUNICATOR]
    assert native.error(alone) is None


@pytest.mark.parametrize(
    ("mesh", "rank", "message"),
    [
        ((2,), 0, "needs a transport"),
        ((1,), 1, "rank 1 is not in a mesh of 1"),
        ((0,), 0, "axis 0 cannot have 0"),
        ((1,) * 17, 0, "not 17"),
    ],
)
def test_wrong_meshes_are_refused(mesh: tuple[int, ...], rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.create_communicator(None, mesh, rank)


def test_an_incomplete_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks a function"):
        native.create_communicator(native.TransportTable(), (2,), 0)


def test_the_transport_gets_what_was_asked_for() -> None:
    transport = RecordingTransport()
    handle = native.create_communicator(transport.table, (2, 1, 3), 1)
    assert [native.group_size(handle, group) for group in (0, 1, 2, 4, 5, 8)] == [1, 2, 1, 3, 6, -1]
    native.bind(handle)
    assert native.all_reduce(16, 32, 3, F32, 2, 1) == native.OK
    assert native.all_gather(16, 32, 4, 5, 4) == native.OK
    assert native.reduce_scatter(16, 32, 5, F32, SUM, 5) == native.OK
    assert native.all_to_all(16, 32, 6, 7, 1) == native.OK
    assert native.broadcast(0, 32, 7, 8, 2, 4) == native.OK
    # Rank 1 has the coordinate (0, 0, 1): group rank 1 along the last axis, and along both.
    assert [native.group_rank(group) for group in (0, 1, 4, 5, 8)] == [0, 0, 1, 1, -1]
    assert native.send(16, 8, F32, 2, 4) == native.OK
    assert native.recv(32, 9, F32, 1, 1) == native.OK
    assert native.send_recv(16, 2, 5, 32, 3, 4, F32, 5) == native.OK
    assert native.send_recv(16, 2, native.NOBODY, 32, 0, 4, F32, 5) == native.OK
    assert transport.calls == [
        ("all_reduce", 16, 32, 3, F32, 2, 1),
        ("all_gather", 16, 32, 4, 5, 4),
        ("reduce_scatter", 16, 32, 5, F32, SUM, 5),
        ("all_to_all", 16, 32, 6, 7, 1),
        ("broadcast", None, 32, 7, 8, 2, 4),
        ("send_recv", 16, 8, 2, None, 0, -1, F32),
        ("send_recv", None, 0, -1, 32, 9, 4, F32),
        ("send_recv", 16, 2, 5, 32, 3, 4, F32),
    ]
    assert native.peers(handle) == ()
    native.destroy_communicator(handle)


def test_a_communicator_tells_whom_a_failed_collective_was_with() -> None:
    for call, peers in (
        (lambda: native.all_reduce(16, 32, 3, F32, SUM, 5), (1, 2, 3, 4, 5)),
        (lambda: native.all_reduce(16, 32, 3, F32, SUM, 1), (3,)),
        (lambda: native.send_recv(16, 2, 1, 32, 3, 2, F32, 4), (1, 2)),
        (lambda: native.recv(16, 2, F32, 2, 4), (2,)),
    ):
        transport = RecordingTransport(status=1)
        handle = native.create_communicator(transport.table, (2, 1, 3), 0)
        native.bind(handle)
        assert native.peers(handle) == ()
        assert call() == native.FAILED
        assert native.peers(handle) == peers
        native.destroy_communicator(handle)


def test_a_failed_communicator_does_not_reach_its_transport() -> None:
    transport = RecordingTransport(status=7)
    handle = native.create_communicator(transport.table, (2,), 0)
    native.bind(handle)
    assert native.all_reduce(16, 32, 3, F32, SUM, 1) == native.FAILED
    assert native.all_reduce(16, 32, 3, F32, SUM, 1) == native.FAILED
    native.fail(handle, "a later failure")
    assert len(transport.calls) == 1
    assert native.error(handle) == "all_reduce: the transport failed with status 7"
    assert native.sequence(handle) == 1
    native.destroy_communicator(handle)


def test_a_transport_says_why_it_failed() -> None:
    transport = RecordingTransport(status=1)
    handle = native.create_communicator(transport.table, (2,), 0)
    native.bind(handle)
    native.fail(handle, "the cable is out")
    assert native.all_reduce(16, 32, 3, F32, SUM, 1) == native.FAILED
    assert native.error(handle) == native.last_error() == "the cable is out"
    assert transport.calls == []
    native.destroy_communicator(handle)
