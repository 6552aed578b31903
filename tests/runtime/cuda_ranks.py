"""Scenarios of ranks on CUDA devices, with the stand-ins for NCCL and the CUDA driver in native/."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from checked import Checked, address
from patience import LONG_SECONDS, SHORT_SECONDS, until_blamed

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.runtime import session
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.cuda import nccl

SUM, F32 = native.reduce_op_code("sum"), native.dtype_code("float32")


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL(os.environ[nccl.DRIVER_VARIABLE])
    driver.fake_current_stream.restype = ctypes.c_void_p
    driver.fake_set_current_stream.argtypes = (ctypes.c_void_p,)
    driver.cuStreamCreate.argtypes = (ctypes.c_void_p, ctypes.c_uint)
    driver.cuStreamBeginCapture_v2.argtypes = (ctypes.c_void_p, ctypes.c_int)
    driver.cuStreamEndCapture.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuGraphInstantiateWithFlags.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong)
    driver.cuGraphLaunch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuStreamQuery.argtypes = (ctypes.c_void_p,)
    driver.cuMemcpyAsync.argtypes = (ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p)
    return driver


def _stream(driver: ctypes.CDLL) -> int:
    """A new stream, made the current one."""
    stream = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    driver.fake_set_current_stream(stream)
    return stream.value or 0


def _communicator(mesh: list[int], **arguments: Any) -> Communicator:
    if os.environ.get(nccl.DRIVER_VARIABLE):
        function = ctypes.cast(_driver().fake_current_stream, ctypes.c_void_p).value or 0
        nccl.hidet_stream_function = lambda: function
    return session.communicator_for(tuple(mesh), target="cuda", **arguments)


def _sum(comm: Communicator, group: int) -> float:
    send = np.array([comm.rank + 1], dtype=np.float32)
    native.all_reduce(address(send), address(send), 1, F32, SUM, group)
    comm.wait()
    return float(send[0])


def cuda_collectives(mesh: list[int], own_stream: bool, warm: bool) -> bool:
    """Every collective, dtype, reduction and group of a mesh, against NumPy."""
    groups = range(1 << len(mesh))
    with _communicator(mesh) as comm:
        if own_stream:
            _stream(_driver())
        if warm:
            comm.warm_up(groups)
        comm.bind()
        calls = 0
        for group in groups:
            checked = Checked(comm, tuple(mesh), group, host=False)
            checked.everything()
            calls += checked.calls
        assert comm.sequence == calls
    return True


def _await_other(comm: Communicator) -> None:
    """Return once the other rank lets this one go."""
    assert comm._rendezvous is not None
    comm._rendezvous.failure_store.wait(["go"])


def _let_other_go(comm: Communicator) -> None:
    assert comm._rendezvous is not None
    comm._rendezvous.failure_store.set("go", "")


def cuda_asynchronous() -> bool:
    """A collective returns before it is over: a rank that is alone in it cannot have got its result."""
    with _communicator([2]) as comm:
        driver = _driver()
        stream = _stream(driver)
        comm.warm_up([1])
        if comm.rank == 1:
            _await_other(comm)
        send, recv = np.full(3, comm.rank + 1, np.float32), np.zeros(3, np.float32)
        assert native.all_reduce(address(send), address(recv), 3, F32, SUM, 1) == native.OK
        if comm.rank == 0:
            assert driver.cuStreamQuery(stream) == 600
            assert not recv.any()
            _let_other_go(comm)
        comm.wait()
        assert (recv == 3).all()
    return True


def cuda_graph(launches: int) -> list[float]:
    """Collectives of every way that they go, captured once and run several times."""
    with _communicator([2, 2]) as comm:
        driver = _driver()
        stream = _stream(driver)
        comm.warm_up([1, 3])
        value = np.array([comm.rank + 1], np.float32)
        shared, passed = np.zeros(4, np.float32), np.zeros(1, np.float32)
        exchanged = np.zeros(4, np.float32)
        driver.cuStreamBeginCapture_v2(stream, 0)
        native.all_reduce(address(value), address(value), 1, F32, SUM, 1)
        native.all_gather(address(value), address(shared), 1, F32, 3)
        native.all_to_all(address(shared), address(exchanged), 1, F32, 3)
        to, from_ = (comm.rank + 1) % 4, (comm.rank - 1) % 4
        native.send_recv(address(exchanged), 1, to, address(passed), 1, from_, F32, 3)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
        comm.check()
        assert value[0] == comm.rank + 1
        for _ in range(launches):
            driver.cuGraphLaunch(executable, stream)
        comm.wait()
        return [float(value[0]), *map(float, shared), *map(float, exchanged), float(passed[0])]


def _start(send: np.ndarray, recv: np.ndarray, group: int) -> None:
    assert native.start(address(recv)) == native.OK
    assert native.all_gather(address(send), address(recv), send.size, F32, group) == native.OK
    assert native.started(address(recv)) == native.OK


def cuda_overlap(launches: int) -> list[float]:
    """Collectives on a stream of their own: what is launched meanwhile goes ahead, what waits for them does not."""
    with _communicator([2]) as comm:
        driver = _driver()
        stream = _stream(driver)
        comm.warm_up([1])
        comm.bind()
        one, two = np.full(1, comm.rank + 1, np.float32), np.full(1, 10 * (comm.rank + 1), np.float32)
        first, second, local, after = (np.zeros(2, np.float32) for _ in range(4))

        def copy(to: np.ndarray, source: np.ndarray) -> None:
            assert driver.cuMemcpyAsync(address(to), address(source), to.nbytes, stream) == 0

        def program(kernel_source: np.ndarray) -> None:
            _start(one, first, 1)
            _start(two, second, 1)
            copy(local, kernel_source)
            assert native.wait(address(second)) == native.OK
            copy(after, second)
            assert native.wait(address(first)) == native.OK

        if comm.rank == 1:
            _await_other(comm)
        source = np.full(2, 7, np.float32)
        program(source)
        if comm.rank == 0:  # alone, so that its gathers are not over, but what was launched beside them is
            while not local.any():
                time.sleep(0.001)
            assert not after.any()
            _let_other_go(comm)
        comm.wait()
        comm.check()
        assert first.tolist() == [1, 2]
        assert after.tolist() == [10, 20]
        assert native.overlapped(comm._open_handle()) == (2, 2)
        # The same, captured.
        first[:], second[:], local[:], after[:] = 0, 0, 0, 0
        assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
        program(source)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        assert driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0) == 0
        assert not local.any()
        for number in range(launches):
            source[:], one[:] = 8 + number, (comm.rank + 1) * (number + 3)
            assert driver.cuGraphLaunch(executable, stream) == 0
            comm.wait()
        comm.check()
        return [*map(float, first), *map(float, after), *map(float, local)]


def cuda_overlap_unjoined() -> int:
    """A capture that ends while a collective was not waited for is refused by CUDA."""
    with _communicator([2]) as comm:
        driver = _driver()
        stream = _stream(driver)
        comm.warm_up([1])
        comm.bind()
        one, first = np.zeros(1, np.float32), np.zeros(2, np.float32)
        assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
        _start(one, first, 1)
        graph = ctypes.c_void_p()
        return int(driver.cuStreamEndCapture(stream, ctypes.byref(graph)))


def cuda_capture_unprepared() -> bool:
    """A group that was not warmed up cannot be used for the first time while a stream is captured."""
    comm = _communicator([2, 2])
    driver = _driver()
    stream = _stream(driver)
    comm.warm_up([1])
    driver.cuStreamBeginCapture_v2(stream, 0)
    value = np.ones(1, np.float32)
    native.all_reduce(address(value), address(value), 1, F32, SUM, 2)
    comm.check()
    return True


def cuda_bad_rank(mesh: list[int], how: str, who: int, when: str) -> float:
    """One rank dies, stops or comes late: before NCCL's communicators are made, or after."""
    comm = _communicator(mesh, timeout_seconds=LONG_SECONDS if how == "dies" else SHORT_SECONDS)
    comm.bind()
    whole = (1 << len(mesh)) - 1
    if when == "warm":
        comm.warm_up(range(1 << len(mesh)))
        assert _sum(comm, whole) == comm.world_size * (comm.world_size + 1) / 2
    if comm.rank == who:
        if how == "dies":
            time.sleep(0.5)  # by then the others may wait for it, which is another case than that they come later
            os.kill(os.getpid(), signal.SIGKILL)
        until_blamed(comm)
    if when == "warming":
        comm.warm_up([1])
    _sum(comm, 1)
    return _sum(comm, whole)


def cuda_rows_captured() -> bool:
    """An exchange of wanted rows within a capture, where the host cannot read how many there are."""
    comm = _communicator([2])
    driver = _driver()
    stream = _stream(driver)
    comm.warm_up([1])
    comm.bind()
    driver.cuStreamBeginCapture_v2(stream, 0)
    row, wanted = np.ones(1, np.float32), np.ones((2, 2), np.uint8)
    native.gather_packed_rows(address(row), address(wanted), address(row), 1, 1, F32, 1)
    comm.check()
    return True


def cuda_rows_behind_a_bad_rank(how: str, who: int) -> float:
    """An exchange of wanted rows waits for work on the stream, in which one rank takes no part."""
    comm = _communicator([2], timeout_seconds=LONG_SECONDS if how == "dies" else SHORT_SECONDS)
    comm.warm_up([1])
    comm.bind()
    if comm.rank == who:
        if how == "dies":
            time.sleep(0.5)  # by then the other one waits
            os.kill(os.getpid(), signal.SIGKILL)
        until_blamed(comm)
    value, wanted = np.ones(1, np.float32), np.ones((2, 2), np.uint8)
    received = np.zeros(1, np.float32)
    native.all_reduce(address(value), address(value), 1, F32, SUM, 1)
    assert native.gather_packed_rows(address(value), address(wanted), address(received), 1, 1, F32, 1) == native.FAILED
    comm.check()
    return float(received[0])


def cuda_grouped(wrong: bool) -> list[float]:
    """Every rank sends to all others, and only then receives: alone, each message would block its rank for ever.

    With ``wrong``, the last rank's second message is refused while the group is open.
    """
    with _communicator([3], timeout_seconds=20) as comm:
        stream = _stream(_driver())
        comm.warm_up([])
        others = [rank for rank in range(3) if rank != comm.rank]
        value, received = np.full(1, comm.rank + 1, np.float32), np.zeros(3, np.float32)
        comm.bind()
        with comm.grouped():
            for number, other in enumerate(others):
                unknown = wrong and comm.rank == 2 and number == 1
                native.send(address(value), 1, 99 if unknown else F32, other, 1)
            for other in others:
                native.recv(address(received[other:]), 1, F32, other, 1)
            assert not received.any()  # nothing is exchanged before the end
        comm.wait(stream)
        return received.tolist()


def cuda_error() -> float:
    """NCCL reports an asynchronous error to one rank, while the others wait for it."""
    comm = _communicator([2], timeout_seconds=20)
    comm.warm_up([1])
    for _ in range(4):
        _sum(comm, 1)
    return 0.0


def cuda_wrong_call() -> float:
    """One rank calls wrongly, and the other waits for its stream."""
    comm = _communicator([2], timeout_seconds=20)
    comm.warm_up([1])
    if comm.rank == 1:
        native.all_reduce(1, 1, 1, 99, 0, 1)
        comm.check()
    return _sum(comm, 1)


def cuda_refused() -> bool:
    """A communicator that cannot be made."""
    try:
        session.communicator_for((2,), target="cuda")
    except ConfigError:
        session.shutdown()
        raise
    return True


def cuda_devices() -> float:
    """A sum, on the devices that there are."""
    with _communicator([2]) as comm:
        comm.warm_up([])
        return _sum(comm, 1)


SCENARIOS: tuple[Callable[..., Any], ...] = (
    cuda_collectives,
    cuda_asynchronous,
    cuda_graph,
    cuda_capture_unprepared,
    cuda_rows_captured,
    cuda_rows_behind_a_bad_rank,
    cuda_overlap,
    cuda_overlap_unjoined,
    cuda_bad_rank,
    cuda_grouped,
    cuda_error,
    cuda_wrong_call,
    cuda_refused,
    cuda_devices,
)
