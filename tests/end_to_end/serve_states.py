"""A serving process of programs with states: it makes the calls of a file in order, and writes answers and states.

The names in the file are those of an input: the number of the call, its program, and the input's place.
"""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    with np.load(given) as file:
        calls: dict[int, tuple[str, list[np.ndarray]]] = {}
        for key in file.files:
            number, program, _ = key.split(":")
            calls.setdefault(int(number), (program, []))[1].append(file[key])
    answers = {}
    with load_partition(folder) as partition:

        def answer(number: int) -> np.ndarray:
            program, inputs = calls[number]
            return np.array(partition.program(program)(*inputs))

        for program in partition.programs:
            partition.program(program).warm_up()
        answers.update({f"y{number}": answer(number) for number in calls})
        states = partition.save_states()
        partition.reset()
        answers["after_reset"] = answer(0)
        partition.load_states(states)
        answers.update({f"state {name}": state for name, state in partition.save_states().items()})
        np.savez(out / f"rank{partition.rank}.npz", **answers)


main()
