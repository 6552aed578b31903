"""A rank of two: ``serve_partition.py MODE ARTIFACTS [FOLDER]``. Each mode prints ``RANK:WORD`` when all went well.

It imports what a serving process would: neither hidet nor PyTorch, which take seconds.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hidet_dist import load_partition
from hidet_dist.errors import HidetDistError

X = np.arange(32, dtype=np.float32).reshape(4, 8) / 32


def shards(model: Any, x: np.ndarray = X) -> np.ndarray:
    """The rank's input: columns of X where they are split, or all of it."""
    columns = model.stage.inputs[0].shape[1]
    return np.ascontiguousarray(x[:, model.rank * columns % 8 :][:, :columns])


def threads(model: Any) -> str:
    """Another thread is refused, until it attaches; then the loading thread is."""
    x = shards(model)
    model.warm_up()
    expected = model(x)
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(model, x).exception(timeout=30)
        assert isinstance(error, HidetDistError), error
        assert "attach() there" in str(error)
        np.testing.assert_array_equal(model(x), expected)
        pool.submit(model.attach).result(timeout=30)
        np.testing.assert_array_equal(pool.submit(model, x).result(timeout=30), expected)
    try:
        model(x)
    except HidetDistError:
        return "right"
    return "wrong"


def close(model: Any) -> str:
    """Calls in one thread, while the main one closes after the same number of calls on both ranks."""
    x = shards(model)
    begun = threading.Event()
    errors: list[BaseException] = []

    def serve() -> None:
        model.attach()
        try:
            while True:
                model(x)
                begun.set()
        except HidetDistError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert begun.wait(30)
    model.close()
    thread.join(30)
    # The rank that closes first leaves the other one alone in a collective, which is an error that names it.
    said = str(errors[0]) if errors else "nothing"
    return "closed" if not thread.is_alive() and ("closed" in said or "rank" in said) else said


def profile(model: Any, folder: str) -> str:
    """Write the trace of a call with the inputs in the folder there."""
    with np.load(f"{folder}/inputs.npz") as data:
        inputs = [data[name] for name in data.files]
    model.warm_up({"batch": 2, "seq": 4})
    profile = model.profile(*inputs)
    profile.save(f"{folder}/rank{model.rank}.json")
    communicated = tuple(one.communication for one in profile.operators if one.kind == "communication")
    return "profiled" if communicated == model.stage.communications and communicated else "wrong"


def main() -> None:
    mode, artifacts, *rest = sys.argv[1:]
    with load_partition(artifacts, timeout_seconds=20) as model:
        # At once: another rank writes to the same pipe, and with PYTHONUNBUFFERED print() takes two turns for a line.
        os.write(1, f"{model.rank}:{MODES[mode](model, *rest)}\n".encode())


MODES = {"threads": threads, "close": close, "profile": profile}
main()
