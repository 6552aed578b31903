"""A rank on the stand-ins for CUDA and NCCL: ``serve_on_stand_ins.py MODE ARTIFACTS``; prints what it found.

With the number of a socket instead, the process that such ranks are forked from (``tests/forked.py``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from on_device import OnDevice

sys.path.insert(0, str(Path(__file__).parents[2]))
import hidet_dist
from forked import await_fork
from hidet_dist.errors import InputError
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.partition import LoadedPartition

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def answers(model: LoadedPartition) -> object:
    """From host memory, not row by row, from the device, and into memory that is given; several times."""
    found = [model(X), model(np.asfortranarray(X)), model(OnDevice(X.copy(), 0))]
    for _ in range(3):
        y = np.full((4, 8), -1, np.float32)
        given = OnDevice(y, 0)
        model.run([OnDevice(X.copy(), 0)], outputs=[y])
        found.append(y)
        del given
    return [y.tolist() for y in found]


def refusals(model: LoadedPartition) -> object:
    """The error of each invalid input."""
    messages = []
    for x in (OnDevice(X, 1), OnDevice(np.asfortranarray(X), 0), X.astype(np.float64)):
        try:
            model(x)
        except InputError as error:
            messages.append(str(error))
    return [messages, model(X).tolist()]


def profile(model: LoadedPartition) -> object:
    """The seconds in the profile: of the call, of the only kernel, and of its begin."""
    model.warm_up()
    found = model.profile(X)
    (operator,) = found.operators
    return [found.call_seconds, operator.seconds, operator.begin_seconds]


def memory(model: LoadedPartition) -> object:
    """Bytes on the device, before and after a call, and after closing."""
    before = model.device_bytes
    model(X)
    return [before, model.device_bytes]


def cleared(model: LoadedPartition) -> object:
    """Leave the device to clear memory, which is freed next, with the model."""
    model._loaded.device.memory.reserve_zeros(1 << 20)
    return True


def product(model: LoadedPartition) -> object:
    """A rank's shard of X through the program."""
    columns = int(model.stage.inputs[0].shape[1])
    x = np.ascontiguousarray(X[:, model.rank * columns % 8 :][:, :columns])
    return [model(x).tolist(), model(x).tolist()]


def calls(model: LoadedPartition) -> object:
    """The outputs for each array of the file beside the artifacts, passed from the host and from the device in turn."""
    with np.load(f"{sys.argv[2]}.npz") as data:
        xs = [data[name] for name in data.files]
    return [np.asarray(model(x if number % 2 else OnDevice(x, 0))).tolist() for number, x in enumerate(xs)]


def timed(model: LoadedPartition) -> object:
    """The seconds of each operator, by its name, and what a call gives after that."""
    shard = X + 100 * model.rank
    found = {operator.name: operator.seconds for operator in model.profile(shard).operators}
    return [found, model(shard).tolist()]


def states(model: LoadedPartition) -> object:
    """Calls with what must change no state between them; then a call, again from its states, and from the first ones.

    The inputs of call ``n`` are ``n_0``, ``n_1`` and so on in the file beside the artifacts.
    """
    with np.load(f"{sys.argv[2]}.npz") as data:
        count = 1 + max(int(name.partition("_")[0]) for name in data.files)
        given = [[data[f"{n}_{i}"] for i in range(len(data.files) // count)] for n in range(count)]
    answers, refused = [], []

    def run(inputs: list[np.ndarray]) -> None:
        answers.append([y.tolist() for y in model.run(inputs)])

    model.warm_up()
    for number, inputs in enumerate(given):
        run(inputs)
        if number % 2:
            model.warm_up({"n": 5})
        else:
            model.profile(*inputs)
    saved = model.save_states()
    for wrong in (
        lambda: model.load_states({"hidden": np.zeros(7, np.float16), "pool": np.zeros((3, 4, 2), np.float32)}),
        lambda: model(*(x.astype(np.float64) if x.dtype == np.float32 else x for x in given[0])),
    ):
        try:
            wrong()
        except InputError as error:
            refused.append(str(error))
    run(given[0])
    model.load_states(saved)
    run(given[0])
    model.reset()
    run(given[0])
    return {"answers": answers, "saved": {name: x.tolist() for name, x in saved.items()}, "refused": refused}


MODES: dict[str, Callable[[LoadedPartition], object]] = {
    each.__name__: each for each in (answers, refusals, profile, memory, cleared, product, calls, timed, states)
}


def main() -> None:
    if len(sys.argv) == 2:
        await_fork(int(sys.argv[1]))
    mode, artifacts = sys.argv[1:]
    if mode in ("product", "calls", "timed"):
        CudaMemory.number = 0  # the kernels are the host's
    with hidet_dist.load_partition(artifacts) as model:
        print(json.dumps({"rank": model.rank, "result": MODES[mode](model)}))


main()
