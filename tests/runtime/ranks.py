"""Runs scenarios as real rank processes: a server that imports torch once, then forks the ranks of each request.

Each line on standard input is a request; the answer, a line on standard output, has an entry per process: its rank, its
exit code, seconds, and what the scenario returned ("result") or raised ("error", "message", "ranks").
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime import gloo, native, session
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.mesh_groups import group_ranks

MAX_SECONDS = 60.0

NUMPY_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}


def _address(array: np.ndarray | torch.Tensor) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.ctypes.data)


def _as_dtype(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values).to(getattr(torch, dtype), copy=True).contiguous()


def _inputs(rank: int, count: int, dtype: str) -> np.ndarray:
    """A rank's data: integers so small that no dtype rounds or overflows, whatever is done with them."""
    values = np.random.default_rng(rank + 1).integers(0, 3, size=count)
    return (values > 1).astype(np.float64) if dtype == "bool" else values.astype(np.float64)


def _reduced(stack: np.ndarray, dtype: str, op: str) -> np.ndarray:
    values = NUMPY_REDUCE[op](stack, axis=0)
    return np.minimum(values, 1) if dtype == "bool" else values


def _check_collectives(comm: Communicator, mesh: tuple[int, ...], group: int, dtype: str, op: str, count: int) -> None:
    ranks = group_ranks(mesh, comm.rank, group)
    size, place = len(ranks), ranks.index(comm.rank)
    codes = native.dtype_code(dtype), native.reduce_op_code(op)
    label = f"{dtype} {op} group {group} of {ranks}"

    whole = [_inputs(rank, count * size, dtype) for rank in ranks]
    send = _as_dtype(whole[place], dtype)
    recv = torch.zeros_like(send)
    status = native.all_reduce(_address(send), _address(recv), count * size, *codes, group)
    assert status == 0, native.last_error()
    expected = _as_dtype(_reduced(np.stack(whole), dtype, op), dtype)
    assert torch.equal(recv, expected), f"all_reduce {label}: {recv} is not {expected}"
    assert native.all_reduce(_address(send), _address(send), count * size, *codes, group) == 0
    assert torch.equal(send, expected), f"all_reduce in place {label}"

    send = _as_dtype(whole[place], dtype)
    recv = torch.zeros(count, dtype=send.dtype)
    assert native.reduce_scatter(_address(send), _address(recv), count, *codes, group) == 0, native.last_error()
    part = expected[place * count : (place + 1) * count]
    assert torch.equal(recv, part), f"reduce_scatter {label}: {recv} is not {part}"

    recv = torch.zeros(size * size * count, dtype=send.dtype)
    assert native.all_gather(_address(send), _address(recv), size * count, codes[0], group) == 0, native.last_error()
    assert torch.equal(recv, _as_dtype(np.concatenate(whole), dtype)), f"all_gather {label}"

    recv = torch.zeros_like(send)
    assert native.all_to_all(_address(send), _address(recv), count, codes[0], group) == 0, native.last_error()
    parts = [values[place * count : (place + 1) * count] for values in whole]
    assert torch.equal(recv, _as_dtype(np.concatenate(parts), dtype)), f"all_to_all {label}"
    comm.check()


def collectives(mesh: list[int]) -> int:
    """Every collective, dtype, reduction and group of a mesh, against NumPy."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        for group in range(1 << len(mesh)):
            for dtype in native.DTYPE_CODES:
                for op in native.REDUCE_OP_CODES:
                    _check_collectives(comm, tuple(mesh), group, dtype, op, count=5)
        return comm.sequence


def large(mesh: list[int], count: int) -> bool:
    """Random floats, enough of them for Gloo's own all-reduce, and for many hand-overs through shared memory."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        assert count * 4 * comm.world_size > gloo.SMALL_BYTES
        data = [np.random.default_rng(rank).random(count, dtype=np.float32) for rank in range(comm.world_size)]
        total = np.sum(data, axis=0)
        send = data[comm.rank].copy()
        recv = np.empty_like(send)
        group = (1 << len(mesh)) - 1
        for target in (recv, send):
            assert native.all_reduce(_address(send), _address(target), count, 0, 0, group) == 0
        np.testing.assert_allclose(recv, total, rtol=1e-6)
        np.testing.assert_array_equal(send, recv)
        sums = np.empty_like(send)  # every rank has the very same bits
        native.all_reduce(_address(recv), _address(sums), count, 0, native.reduce_op_code("max"), group)
        np.testing.assert_array_equal(sums, recv)
        gathered = np.empty((comm.world_size, count), dtype=np.float32)
        assert native.all_gather(_address(data[comm.rank]), _address(gathered), count, 0, group) == 0
        np.testing.assert_array_equal(gathered, np.stack(data))
        share = count // comm.world_size
        scattered = np.empty(share, dtype=np.float32)
        assert native.reduce_scatter(_address(data[comm.rank]), _address(scattered), share, 0, 0, group) == 0
        np.testing.assert_allclose(scattered, total[comm.rank * share : (comm.rank + 1) * share], rtol=1e-6)
        comm.check()
        return True


def routes(mesh: list[int]) -> list[list[int]]:
    """The groups that share memory, after one collective over each group of the mesh."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        for group in range(1, 1 << len(mesh)):
            _sum(comm, group)
        return [list(ranks) for ranks in comm.shared_groups]


def waits(seconds: float) -> float:
    """The processor time that a rank takes while it waits for another one."""
    with session.communicator_for((2,)) as comm:
        comm.bind()
        _sum(comm, 1)
        if comm.rank == 1:
            time.sleep(seconds)
        begin = time.process_time()
        _sum(comm, 1)
        return time.process_time() - begin


def _sum(comm: Communicator, group: int, value: float | None = None) -> float:
    """All-reduces one number; raises what check() raises."""
    send = np.array([comm.rank + 1 if value is None else value], dtype=np.float32)
    native.all_reduce(_address(send), _address(send), 1, 0, 0, group)
    comm.check()
    return float(send[0])


def dies(mesh: list[int], who: int, group: int, warm: bool) -> float:
    """One rank is killed, before its communicator's groups are made or after."""
    comm = session.communicator_for(tuple(mesh))
    comm.bind()
    if warm:
        for mask in range(1, 1 << len(mesh)):
            _sum(comm, mask)
    if comm.rank == who:
        time.sleep(0.5)  # by then all have met: a host that dies earlier is a failure to meet
        os.kill(os.getpid(), signal.SIGKILL)
    # Each axis in turn: a rank that has no group with the dead one waits for one that has.
    _sum(comm, group)
    return _sum(comm, (1 << len(mesh)) - 1)


def late(mesh: list[int], who: int, seconds: float, warm: bool, group: int) -> float:
    """One rank comes later to a collective than the others wait."""
    comm = session.communicator_for(tuple(mesh), timeout_seconds=1.5)
    comm.bind()
    if warm:
        _sum(comm, (1 << len(mesh)) - 1)
        _sum(comm, group)
    if comm.rank == who:
        time.sleep(seconds)
    _sum(comm, group)
    return _sum(comm, (1 << len(mesh)) - 1)


def leaves(who: int) -> float:
    """One rank closes its communicator where the others go on."""
    comm = session.communicator_for((2,))
    comm.bind()
    _sum(comm, 1)
    if comm.rank == who:
        comm.close()
        time.sleep(4)
        return 0.0
    return _sum(comm, 1)


def wrong_call(who: int) -> float:
    """One rank calls a collective with an unknown dtype."""
    comm = session.communicator_for((2,))
    comm.bind()
    _sum(comm, 1)
    if comm.rank == who:
        native.all_reduce(1, 1, 1, 99, 0, 1)
        comm.check()
    return _sum(comm, 1)


def after_failure(who: int) -> list[float]:
    """How long a hundred collectives take after one has failed, and two later checks."""
    comm = session.communicator_for((2,), timeout_seconds=1.0)
    comm.bind()
    if comm.rank == who:
        time.sleep(5)
        return []
    send = np.ones(1, dtype=np.float32)
    assert native.all_reduce(_address(send), _address(send), 1, 0, 0, 1) == native.FAILED
    start = time.monotonic()
    for _ in range(100):
        assert native.all_gather(_address(send), _address(send), 1, 0, 1) == native.FAILED
    seconds = [time.monotonic() - start]
    for _ in range(2):
        start = time.monotonic()
        try:
            comm.check()
        except HidetDistError as error:
            assert f"rank {who}" in str(error)
        else:
            raise AssertionError("check() found nothing")
        seconds.append(time.monotonic() - start)
    return seconds


def several() -> list[float]:
    """Two communicators over one store, used in turns and made anew, then a second session."""
    results = []
    for _ in range(2):
        first, second = session.communicator_for((2, 2)), session.communicator_for((4,))
        for comm, group in ((first, 3), (second, 1), (first, 1), (second, 1), (first, 2)):
            comm.bind()
            results.append(_sum(comm, group))
        first.close()
        first = session.communicator_for((4, 1))
        first.bind()
        results.append(_sum(first, 3))
        session.shutdown()
    return results


def meet() -> bool:
    """Only make a communicator of as many ranks as there are said to be."""
    session.init(timeout_seconds=float(os.environ["TEST_TIMEOUT"]))
    settings = session.current()
    assert settings is not None
    session.communicator_for((settings.world_size,)).close()
    return True


def other_mesh(meshes: list[list[int]]) -> bool:
    """Ranks that do not agree on the mesh."""
    session.communicator_for(tuple(meshes[int(os.environ["RANK"])]))
    return True


SCENARIOS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        collectives,
        large,
        routes,
        waits,
        dies,
        late,
        leaves,
        wrong_call,
        after_failure,
        several,
        meet,
        other_mesh,
    )
}


def _run_rank(scenario: str, arguments: dict[str, Any], pipe: int) -> None:
    """In a forked process: never returns."""
    start = time.monotonic()
    answer: dict[str, Any]
    try:
        answer = {"result": SCENARIOS[scenario](**arguments)}
    except BaseException as error:
        answer = {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
    answer["seconds"] = time.monotonic() - start
    session.shutdown()
    answer["closed"] = time.monotonic() - start
    os.write(pipe, json.dumps(answer).encode())
    os._exit(0)


def _run(request: dict[str, Any]) -> list[dict[str, Any]]:
    children: list[tuple[int, int, int]] = []
    for environment in request["environments"]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.environ.update(environment)
            _run_rank(request["scenario"], request["arguments"], writer)
        os.close(writer)
        children.append((child, reader, int(environment["RANK"])))
    deadline = time.monotonic() + MAX_SECONDS
    answers = []
    for child, reader, rank in children:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        text = os.read(reader, 1 << 16) if ready else b""
        os.close(reader)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        answer = json.loads(text) if text else {"error": "hung" if not ready else "died", "message": "", "ranks": []}
        answers.append({**answer, "rank": rank, "exit": os.waitstatus_to_exitcode(status)})
    return answers


def main() -> None:
    """Serve requests until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
