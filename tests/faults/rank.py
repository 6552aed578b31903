"""A rank under remote control: reads one command a line, in JSON, and answers each with a line.

It imports what a serving process would: neither hidet nor PyTorch. With the number of a socket as its argument,
it is the process that ranks are forked from (``tests/forked.py``).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import hidet_dist
from forked import await_fork
from hidet_dist import native
from hidet_dist.artifacts import opened
from hidet_dist.errors import HidetDistError
from hidet_dist.runtime import session
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.pipeline.channel import MessageChannel

MOST_CHILD_SECONDS = 60
RUNTIME = (str(Path(native.__file__).parents[1]), contextlib.__file__)
LIMITS = {"file_bytes": resource.RLIMIT_FSIZE, "open_files": resource.RLIMIT_NOFILE}

if "KERNELS_OF_THE_HOST" in os.environ:  # which stand in for a device's
    CudaMemory.number = 0

model: hidet_dist.LoadedPartition | None = None


def load(folder: str, timeout_seconds: float) -> int:
    """Load a partition; returns its rank."""
    global model  # noqa: PLW0603 - one process is one rank
    model = hidet_dist.load_partition(folder, timeout_seconds=timeout_seconds)
    return model.rank


def call(inputs: list[Any]) -> list[Any]:
    """Call it, on float32 inputs."""
    return call_typed(inputs, ["float32"] * len(inputs))[0]


def call_typed(inputs: list[Any], dtypes: list[str]) -> list[Any]:
    """Call it, on inputs of these dtypes, or None; returns all outputs."""
    assert model is not None
    given = [None if x is None else np.array(x, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    return [y.tolist() for y in model.run(given)]


def call_agreed(inputs: list[Any]) -> list[Any]:
    """Call it without the exchange before the call, on float32 inputs."""
    assert model is not None
    return model.run_agreed(_arrays(inputs))[0].tolist()


def call_program(name: str, inputs: list[Any]) -> list[Any]:
    """Call one of its programs, on float32 inputs."""
    assert model is not None
    return model.program(name).run(_arrays(inputs))[0].tolist()


def stream(batches: list[list[Any]], lazily: bool = False) -> list[Any]:
    """Stream float32 batches through it, and return all outputs of each; None where this rank gives none.

    The stream of a list is asked for no more results than there are; ``lazily`` it gets an iterator, and is iterated
    over to the end.
    """
    assert model is not None
    given = [_arrays(batch) for batch in batches]
    results = model.stream(iter(given)) if lazily else (y for _, y in zip(given, model.stream(given), strict=False))
    return [None if outputs is None else [y.tolist() for y in outputs] for outputs in results]


def stream_forever(batch: list[Any]) -> str:
    """Stream one batch again and again, until that fails; answers once more when it has begun."""
    assert model is not None
    for number, _ in enumerate(model.stream(itertools.repeat(_arrays(batch)))):
        if number == 5:
            say({"result": "begun"})
    return "the end"


def stop_before_sending(count: int) -> None:
    """From now on, stop this process before it sends to later stages for this many-th time."""
    numbers = itertools.count(1)
    send = MessageChannel.send

    def stopping(*arguments: Any) -> None:
        if next(numbers) == count:
            os.kill(os.getpid(), signal.SIGSTOP)
        send(*arguments)

    MessageChannel.send = stopping  # type: ignore[method-assign]


def leave_stream(shape: list[int], count: int, way: str) -> str:
    """Stream one batch again and again. After so many results, wait for a line, and leave the stream in some way.

    The way ``never`` is to go on until that fails. Memory that the stream has freed is then overwritten.
    """
    with contextlib.suppress(ArithmeticError):
        _stream_until(shape, count, way)
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    for _ in range(8):
        np.full(shape, np.nan, np.float32)
    return "left"


def _stream_until(shape: list[int], count: int, way: str) -> None:
    assert model is not None
    x = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
    results: Any = model.stream(itertools.repeat(x))
    held = [results]
    if way == "garbage":
        held.append(held)  # type: ignore[arg-type]
    first = None
    for number, outputs in enumerate(results, 1):
        first = first or outputs
        assert all(map(np.array_equal, first, outputs))
        if number == count:
            say({"result": "waiting"})
            sys.stdin.readline()
        if number < count or way == "never":
            continue
        if way == "exception":
            raise ArithmeticError
        if way == "close":
            results.close()
        if way == "close of the model":
            model.close()
        if way == "another call":
            with contextlib.suppress(HidetDistError):
                model.warm_up()
        break


def trace(inputs: list[Any]) -> dict[str, Any]:
    """Profile a call: the fraction of it in which this rank computed, and the Chrome trace."""
    assert model is not None
    profiled = model.profile(*_arrays(inputs))
    return {"busy": profiled.busy_share, "trace": profiled.chrome_trace()}


def _arrays(inputs: list[Any]) -> list[np.ndarray]:
    return [np.array(x, np.float32) for x in inputs]


def call_repeated(row: list[float], rows: int, slot: int | None = None) -> list[Any]:
    """Call it on one row that stands for many, without memory for them, and return the first row of the answer.

    With a slot, that is the one of all rows.
    """
    assert model is not None
    slots = [] if slot is None else [np.broadcast_to(np.int64(slot), (rows,))]
    return model.run([np.broadcast_to(np.array(row, np.float32), (rows, len(row))), *slots])[0][0].tolist()


def call_torch(inputs: list[Any]) -> list[Any]:
    """Call it on torch tensors of float32."""
    import torch

    assert model is not None
    return [y.float().tolist() for y in model.run([torch.tensor(x) for x in inputs])]


def call_on_device(inputs: list[Any], shapes: list[list[int]]) -> list[Any]:
    """Call it on tensors of its device, on float32 inputs, into outputs of these shapes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "cuda"))
    from on_device import OnDevice

    assert model is not None
    device = int(os.environ["RANK"])
    outputs = [np.full(shape, -1, np.float32) for shape in shapes]
    model.run([OnDevice(x, device) for x in _arrays(inputs)], outputs=[OnDevice(y, device) for y in outputs])
    return [y.tolist() for y in outputs]


def call_elsewhere(inputs: list[Any]) -> list[Any]:
    """Call it from a thread that has not attached."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, inputs).result(30)


def warm_up(sizes: dict[str, int]) -> None:
    """Warm it up."""
    assert model is not None
    model.warm_up(sizes)


def profile(inputs: list[Any], repeats: int) -> int:
    """Profile it: the number of operators."""
    assert model is not None
    return len(model.profile(*(np.array(x, np.float32) for x in inputs), repeats=repeats).operators)


class Alarm(Exception):
    """Raised by a signal handler to end a request that takes too long."""


@contextlib.contextmanager
def _raising(error: BaseException, at: int) -> Iterator[None]:
    """Raise the error at an event of the runtime's code, by number: where a function is called or a line begins.

    The call of the first function, the line that takes the call's number and that of the ``try`` behind it are not
    counted: a signal handler that runs there runs before the call has begun on this rank.
    """
    left = at + 3

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(RUNTIME):
            return None
        if event in ("call", "line"):
            left -= 1
            if left == 0:
                raise error
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def interrupted(inputs: list[Any], at: int, kind: str) -> list[Any]:
    """Call it, with an exception raised at an event of the call."""
    error: BaseException = KeyboardInterrupt("^C") if kind == "KeyboardInterrupt" else Alarm("too late")
    assert model is not None
    arrays = [np.array(x, np.float32) for x in inputs]
    program = model.program()
    with _raising(error, at):
        outputs = program.run(arrays)
    return outputs[0].tolist()


def save_states() -> dict[str, Any]:
    """The rank's shards of its states."""
    assert model is not None
    return {name: value.tolist() for name, value in model.save_states().items()}


def load_states(values: dict[str, Any]) -> None:
    """Give states other values, of float32."""
    assert model is not None
    model.load_states({name: np.array(value, np.float32) for name, value in values.items()})


def serve(inputs: list[Any]) -> str:
    """Call it again and again, until that fails or there is another answer."""
    first = call(inputs)
    while call(inputs) == first:
        pass
    return "another answer"


def close() -> None:
    """Close it."""
    assert model is not None
    model.close()


def limit(**limits: int) -> None:
    """Limit what this process may take of the system."""
    for name, value in limits.items():
        resource.setrlimit(LIMITS[name], (value, value))


def limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to what it has, and so much more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def unlimit_memory() -> None:
    """Undo it."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def stall() -> None:
    """From now on, loading does not get beyond meeting the others."""
    opened.OpenedArtifacts.verify = lambda *_: time.sleep(1000)  # type: ignore[method-assign,assignment]


def shared() -> list[Any]:
    """The groups that share memory."""
    return [] if model is None else [list(ranks) for ranks in model._communicator.shared_groups]


def _exit_in_child() -> None:
    """End as Python programs do, with what is registered for that."""
    sys.exit(0)


def _call_in_child(inputs: list[Any]) -> None:
    call(inputs)


def _close_in_child() -> None:
    close()


def _forget_in_child() -> None:
    """Collect the model as garbage."""
    global model  # noqa: PLW0603
    model = None
    gc.collect()


def _shutdown_in_child() -> None:
    """Leave the session, which is the parent's."""
    session.shutdown()


def _bind_in_child() -> None:
    """Take the parent's communicator."""
    assert model is not None
    model._communicator.bind()


def _bus_error_in_child() -> None:
    """Read what a file of the child's own has no more."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapping:
            file.truncate(0)
            mapping[0]


def _load_in_child(folder: str, inputs: list[Any]) -> Any:
    """Load a partition of its own, and call it."""
    own = hidet_dist.load_partition(folder, timeout_seconds=20.0)
    return own.run([np.array(x, np.float32) for x in inputs])[0].tolist()


def fork(do: str, wait: bool = True, **arguments: Any) -> dict[str, Any]:
    """Do something in a child made by ``fork``; returns its process, its exit code, and what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(MOST_CHILD_SECONDS)  # one that hangs ends by it
        os.close(reader)
        if do == "sleep":
            os.close(writer)
            signal.alarm(0)
            time.sleep(1000)
        os.write(writer, json.dumps(_attempt(globals()[f"_{do}_in_child"], arguments)).encode())
        os.close(writer)
        if do == "forget":
            sys.exit(0)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if wait else 0
    return {"process": child, "exit": code, "said": json.loads(said) if said else {}}


def threads() -> int:
    """The threads of this process."""
    return len(os.listdir("/proc/self/task"))


def multiprocess() -> int:
    """Start and end a child by multiprocessing's fork; returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=_close_in_child)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


FUNCTIONS = (
    load,
    call,
    call_typed,
    call_agreed,
    call_program,
    call_on_device,
    call_repeated,
    stream,
    stream_forever,
    leave_stream,
    stop_before_sending,
    call_torch,
    call_elsewhere,
    warm_up,
    profile,
    trace,
    interrupted,
    save_states,
    load_states,
    serve,
    close,
    limit,
    limit_memory,
    unlimit_memory,
    stall,
    shared,
    fork,
    threads,
    multiprocess,
)
COMMANDS: dict[str, Callable[..., Any]] = {function.__name__: function for function in FUNCTIONS}


def _attempt(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": function(**arguments)}
    except (HidetDistError, MemoryError, KeyboardInterrupt, Alarm) as error:
        return {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    answer = _attempt(COMMANDS[request.pop("command")], request)
    return {**answer, "seconds": time.monotonic() - begin}


if len(sys.argv) > 1:
    hidet_dist.load_partition  # noqa: B018 - which is imported here
    await_fork(int(sys.argv[1]))

answers = os.fdopen(os.dup(1), "w", encoding="utf-8")


def say(answer: dict[str, Any]) -> None:
    """Give an answer, by itself a line."""
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Obey until standard input ends."""
    os.dup2(2, 1)
    for line in sys.stdin:
        say(_answer(json.loads(line)))


main()
