"""A serving process of a pipeline with states: it makes the calls of a file, then the first again from other states."""

import json
import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition
from hidet_dist.errors import InputError


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    answers, said = {}, {}
    with np.load(given) as data, load_partition(folder) as partition:
        calls = [(data[f"x{number}"], data[f"slots{number}"]) for number in range(len(data.files) // 2)]
        partition.warm_up()
        first = partition.save_states()
        for number, call in enumerate(calls):
            answers[f"y{number}"] = partition(*call)
            partition.profile(*call)
            try:
                partition(call[0][:1], call[1])
            except InputError:
                continue
            raise AssertionError("a call of another shape was not refused")
        partition.reset()
        answers[f"y{len(calls)}"] = partition(*calls[0])
        partition.load_states(first)
        answers[f"y{len(calls) + 1}"] = partition(*calls[0])
        said["states"] = list(partition.states)
        try:
            partition.stream(calls)
        except InputError as error:
            said["stream"] = str(error)
        np.savez(out / f"rank{partition.rank}.npz", **answers, said=json.dumps(said))


main()
