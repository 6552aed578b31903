"""Runs scenarios as real rank processes: a server that imports torch once, then forks the ranks of each request.

Each line on standard input is a request; the answer, a line on standard output, has an entry per process: its rank, its
exit code, seconds, and what the scenario returned ("result") or raised ("error", "message", "ranks").
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_ranks
import numpy as np
import torch
import torch.distributed
from checked import Checked, address
from patience import LONG_SECONDS, MAX_SECONDS, SHORT_SECONDS, until_blamed

from hidet_dist import native
from hidet_dist.errors import HidetDistError
from hidet_dist.runtime import session
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.liveness import SILENCE_SECONDS, run_bounded
from hidet_dist.runtime.store import StoreServer
from hidet_dist.runtime.transports.gloo import SMALL_BYTES


def collectives(mesh: list[int]) -> bool:
    """Every collective, dtype, reduction and group of a mesh, against NumPy."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        calls = 0
        for group in range(1 << len(mesh)):
            checked = Checked(comm, tuple(mesh), group)
            assert native.group_rank(group) == checked.group_rank
            checked.everything()
            calls += checked.calls
        comm.check()
        assert comm.sequence == calls
        return True


def large(mesh: list[int], count: int) -> bool:
    """Random floats, enough of them for Gloo's own all-reduce, and for many hand-overs through shared memory."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        assert count * 4 * comm.world_size > SMALL_BYTES
        data = [np.random.default_rng(rank).random(count, dtype=np.float32) for rank in range(comm.world_size)]
        total = np.sum(data, axis=0)
        send = data[comm.rank].copy()
        recv = np.empty_like(send)
        group = (1 << len(mesh)) - 1
        for target in (recv, send):
            assert native.all_reduce(address(send), address(target), count, 0, 0, group) == 0
        np.testing.assert_allclose(recv, total, rtol=1e-6)
        np.testing.assert_array_equal(send, recv)
        sums = np.empty_like(send)  # every rank has the very same bits
        native.all_reduce(address(recv), address(sums), count, 0, native.reduce_op_code("max"), group)
        np.testing.assert_array_equal(sums, recv)
        marked = [values.copy() for values in data]
        for rank, values in enumerate(marked):
            values[[rank, count - 1 - rank]] = np.nan
        for op, extreme in (("max", np.maximum), ("min", np.minimum)):
            code = native.reduce_op_code(op)
            assert native.all_reduce(address(marked[comm.rank]), address(send), count, 0, code, group) == 0
            np.testing.assert_array_equal(send, extreme.reduce(marked))
        gathered = np.empty((comm.world_size, count), dtype=np.float32)
        assert native.all_gather(address(data[comm.rank]), address(gathered), count, 0, group) == 0
        np.testing.assert_array_equal(gathered, np.stack(data))
        means = np.empty_like(send)
        mean = native.reduce_op_code("mean")
        assert native.all_reduce(address(data[comm.rank]), address(means), count, 0, mean, group) == 0
        np.testing.assert_allclose(means, total / comm.world_size, rtol=1e-6)
        # The sum of these is beyond the range of binary16, their mean is not.
        halves, half_means = np.full(count, 60000, np.float16), np.empty(count, np.float16)
        half = native.dtype_code("float16")
        assert native.all_reduce(address(halves), address(half_means), count, half, mean, group) == 0
        np.testing.assert_allclose(half_means, halves, rtol=1e-3)
        root = comm.world_size - 1
        assert native.broadcast(address(data[comm.rank]), address(send), count, 0, root, group) == 0
        np.testing.assert_array_equal(send, data[root])
        to, from_ = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        source = address(data[comm.rank])
        assert native.send_recv(source, count, to, address(recv), count, from_, 0, group) == 0
        np.testing.assert_array_equal(recv, data[from_])
        piece = count // comm.world_size
        scattered = np.empty(piece, dtype=np.float32)
        assert native.reduce_scatter(address(data[comm.rank]), address(scattered), piece, 0, 0, group) == 0
        np.testing.assert_allclose(scattered, total[comm.rank * piece : (comm.rank + 1) * piece], rtol=1e-6)
        comm.check()
        return True


def exchanges_of_rows(mesh: list[int], dtype: str, rows: int, row: int) -> bool:
    """Exchanges of as many wanted rows over the whole mesh, against NumPy."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        Checked(comm, tuple(mesh), (1 << len(mesh)) - 1).rows(dtype, rows, row)
        comm.check()
        return True


def routes(mesh: list[int]) -> list[list[int]]:
    """The groups that share memory, after one collective over each group of the mesh."""
    with session.communicator_for(tuple(mesh)) as comm:
        comm.bind()
        for group in range(1, 1 << len(mesh)):
            _sum(comm, group)
        return [list(ranks) for ranks in comm.shared_groups]


def listens() -> list[str]:
    """The addresses that a rank listens on, as Linux has them: an IPv4 address in hex, its bytes from last to first."""
    with session.communicator_for((2,)) as comm:
        comm.bind()
        _sum(comm, 1)
        own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in own:
                    found.append(local.partition(":")[0])
        _sum(comm, 1)
        return found


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
    native.all_reduce(address(send), address(send), 1, 0, 0, group)
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


def late(mesh: list[int], who: int, warm: bool, group: int) -> float:
    """One rank comes later to a collective than the others wait."""
    comm = session.communicator_for(tuple(mesh), timeout_seconds=SHORT_SECONDS)
    comm.bind()
    if warm:
        _sum(comm, (1 << len(mesh)) - 1)
        _sum(comm, group)
    if comm.rank == who:
        until_blamed(comm)
    _sum(comm, group)
    return _sum(comm, (1 << len(mesh)) - 1)


def _stop_for(seconds: float) -> None:
    """Stops the whole process, which goes on after so long."""
    process = os.getpid()
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)
    os.waitpid(child, 0)


def _misbehave(comm: Communicator, how: str) -> None:
    if how == "dies":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stops":
        _stop_for(2 * SHORT_SECONDS + SILENCE_SECONDS)
    else:
        comm.close()
        until_blamed(comm)


def messages_to_a_bad_rank(how: str) -> float:
    """The last rank fails the others, each of which has another kind of message for it or from it."""
    comm = session.communicator_for((4,), timeout_seconds=SHORT_SECONDS if how == "stops" else LONG_SECONDS)
    comm.bind()
    # 8 MiB: more than a channel holds, so that a sender waits for its receiver.
    own, other = np.zeros(1 << 21, dtype=np.float32), np.zeros(1 << 21, dtype=np.float32)
    bad = comm.world_size - 1
    for turn in range(2):
        if comm.rank == bad:
            if turn == 1:
                _misbehave(comm, how)
                return 0.0
            native.send(address(own), own.size, 0, 0, 1)
            native.recv(address(own), own.size, 0, 1, 1)
            native.send_recv(address(own), own.size, 2, address(other), own.size, 2, 0, 1)
        elif comm.rank == 0:
            native.recv(address(own), own.size, 0, bad, 1)
        elif comm.rank == 1:
            native.send(address(own), own.size, 0, bad, 1)
        else:
            native.send_recv(address(own), own.size, bad, address(other), own.size, bad, 0, 1)
        comm.check()
    return 0.0


def broadcasts_with_a_bad_rank(how: str, who: int) -> float:
    """One rank fails the others in a broadcast from the first rank."""
    comm = session.communicator_for((2,), timeout_seconds=SHORT_SECONDS if how == "stops" else LONG_SECONDS)
    comm.bind()
    data = np.zeros(1 << 18, dtype=np.float32)
    for turn in range(2):
        if comm.rank == who and turn == 1:
            _misbehave(comm, how)
            return 0.0
        native.broadcast(address(data), address(data), data.size, 0, 0, 1)
        comm.check()
    return 0.0


def rows_with_a_bad_rank(how: str, who: int) -> float:
    """One rank fails the others in an exchange of rows, of which each wants those of the other."""
    comm = session.communicator_for((2,), timeout_seconds=SHORT_SECONDS if how == "stops" else LONG_SECONDS)
    comm.bind()
    rows, row = 8, 1 << 16  # 4 MiB: more than the ranks exchange at a time
    own, all_rows = np.zeros((rows, row), np.float32), np.zeros((2 * rows, row), np.float32)
    wanted = np.ones((2, 2 * rows), np.uint8)
    for turn in range(2):
        native.gather_rows(address(own), address(wanted), address(all_rows), rows, row, 0, 1)
        if comm.rank == who and turn == 1:
            _misbehave(comm, how)
            return 0.0
        native.reduce_scatter_rows(address(all_rows), address(wanted), address(own), rows, row, 0, 1)
        comm.check()
    return 0.0


def chain(who: int) -> float:
    """A message goes from rank to rank; one comes later than all wait. The others have started unlike numbers."""
    comm = session.communicator_for((4,), timeout_seconds=SHORT_SECONDS)
    comm.bind()
    data = np.zeros(1, dtype=np.float32)
    for turn in range(2):
        if comm.rank == who and turn == 1:
            until_blamed(comm)
        if comm.rank > 0:
            native.recv(address(data), 1, 0, comm.rank - 1, 1)
        if comm.rank + 1 < comm.world_size:
            native.send(address(data), 1, 0, comm.rank + 1, 1)
        comm.check()
    # The first rank, which waits for nobody, goes on to a collective.
    return _sum(comm, 1)


def wrong_length() -> float:
    """A message that is longer than what its receiver expects."""
    comm = session.communicator_for((2,), timeout_seconds=SHORT_SECONDS)
    comm.bind()
    data = np.zeros(8, dtype=np.float32)
    if comm.rank == 0:
        native.send(address(data), 8, 0, 1, 1)
    else:
        native.recv(address(data), 4, 0, 0, 1)
        comm.check()
    return _sum(comm, 1)


def out_of_step(what: str) -> float:
    """The ranks are in collectives that differ in one respect; whatever a rank was to receive stays as it was."""
    comm = session.communicator_for((2,), timeout_seconds=5)
    comm.bind()
    _sum(comm, 1)
    first = comm.rank == 0
    comm.begin_call(2 if first and "call" in what else 1)
    size = 1 << 16
    secret, received = np.full(2 * size, 7 + comm.rank, np.float32), np.zeros(2 * size, np.float32)
    if what == "kind" and not first:
        native.all_to_all(address(secret), address(received), 8, 0, 1)
    elif what == "message's call":
        if first:
            native.send(address(secret), 8, 0, 1, 1)
        else:
            native.recv(address(received), 8, 0, 0, 1)
            comm.check()
        return _sum(comm, 1)
    elif what in ("kind", "dtype"):
        dtype = native.dtype_code("int32") if what == "dtype" and first else 0
        native.all_gather(address(secret), address(received), 8, dtype, 1)
    elif what in ("count", "large count"):
        count = {"count": 3, "large count": size}[what] if first else 8
        native.all_gather(address(secret), address(received), count, 0, 1)
    elif what == "mask":  # the ranks send as many rows, but others
        wanted = np.array([[0, 0, 1, 0], [1, 0, 0, 0]], np.uint8)
        if first:
            wanted[0] = [0, 0, 0, 1]
        native.gather_rows(address(secret), address(wanted), address(received), 2, 8, 0, 1)
    elif what == "root":
        native.broadcast(address(secret), address(received), 8, 0, comm.rank, 1)
    else:
        reduce_op = native.reduce_op_code("max" if what == "reduce_op" and first else "sum")
        native.all_reduce(address(secret), address(received), 8, 0, reduce_op, 1)
    assert not received.any(), "another collective's data was taken"
    return _sum(comm, 1)


def message_routes() -> list[int]:
    """The ranks that share memory with this one, after a ring of messages too long to be sent before they are read."""
    with session.communicator_for((4,)) as comm:
        comm.bind()
        own, other = np.full(1 << 18, comm.rank, dtype=np.float32), np.zeros(1 << 18, dtype=np.float32)
        to, from_ = (comm.rank + 1) % 4, (comm.rank - 1) % 4
        native.send_recv(address(own), own.size, to, address(other), own.size, from_, 0, 1)
        comm.check()
        assert (other == from_).all()
        return sorted(comm.shared_peers)


def leaves(who: int) -> float:
    """One rank closes its communicator where the others go on."""
    comm = session.communicator_for((2,))
    comm.bind()
    _sum(comm, 1)
    if comm.rank == who:
        comm.close()
        until_blamed(comm)
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
    """The seconds of a hundred collectives after a failed one, and two later checks."""
    comm = session.communicator_for((2,), timeout_seconds=SHORT_SECONDS)
    comm.bind()
    if comm.rank == who:
        until_blamed(comm)
        return []
    send = np.ones(1, dtype=np.float32)
    assert native.all_reduce(address(send), address(send), 1, 0, 0, 1) == native.FAILED
    start = time.monotonic()
    for _ in range(100):
        assert native.all_gather(address(send), address(send), 1, 0, 1) == native.FAILED
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


STOPS = 5  # of a process, in which run_bounded counts a fifth of a second each


def answer_after_a_stop(seconds: float) -> bool:
    """Take a while to answer, of which the process is stopped for most, and longer than the answer may take.

    The stops are many, as those of a process that shares its processor are: each of them counts a little.
    """

    def answer() -> bool:
        for _ in range(STOPS):
            _stop_for(1.5 * seconds / STOPS)
        time.sleep(seconds / 40)
        return True

    return run_bounded(answer, seconds)


def meet_with_few_descriptors(who: int, free: int) -> bool:
    """Meet, where one rank may only open so many files more."""
    if int(os.environ["RANK"]) == who:
        most = len(os.listdir("/proc/self/fd")) - 1 + free
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return meet()


def meet_with_a_host_that_runs_out(folder: str) -> bool:
    """Rank 0 hosts a store and has no descriptors left, until rank 1 has tried to meet."""
    full, tried = Path(folder) / "full", Path(folder) / "tried"
    if os.environ["RANK"] == "0":
        server = StoreServer("127.0.0.1", int(os.environ["MASTER_PORT"]))
        most = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        opened = []
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        full.mkdir()
        _await(tried)
        for descriptor in opened:
            os.close(descriptor)
        server.close()
        return True
    _await(full)
    try:
        return meet()
    finally:
        tried.mkdir()


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def other_mesh(meshes: list[list[int]]) -> bool:
    """Ranks that do not agree on the mesh."""
    session.communicator_for(tuple(meshes[int(os.environ["RANK"])]))
    return True


SCENARIOS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        collectives,
        large,
        exchanges_of_rows,
        routes,
        answer_after_a_stop,
        listens,
        waits,
        dies,
        late,
        messages_to_a_bad_rank,
        broadcasts_with_a_bad_rank,
        rows_with_a_bad_rank,
        chain,
        wrong_length,
        out_of_step,
        message_routes,
        leaves,
        wrong_call,
        after_failure,
        several,
        meet,
        meet_with_few_descriptors,
        meet_with_a_host_that_runs_out,
        other_mesh,
        *cuda_ranks.SCENARIOS,
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
