"""A serving process of a program with states: it makes the calls of a file, and writes answers and states."""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    answers = {}
    with np.load(given) as calls, load_partition(folder) as partition:
        partition.warm_up()
        for number in range(len(calls.files) // 2):
            answers[f"y{number}"] = partition(calls[f"x{number}"], calls[f"slots{number}"])
        states = partition.save_states()
        partition.reset()
        answers["after_reset"] = partition(calls["x0"], calls["slots0"])
        partition.load_states(states)
        answers["pool"] = partition.save_states()["pool"]
        np.savez(out / f"rank{partition.rank}.npz", **answers)


main()
