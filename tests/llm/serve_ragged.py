"""A serving process of a model over ragged tokens: it makes the steps of a file, and writes the logits."""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    logits = {}
    with np.load(given) as data, load_partition(folder) as partition:
        partition.warm_up()
        steps = sorted({name.partition(".")[0] for name in data.files})
        for step in steps:
            inputs = {name.partition(".")[2]: data[name] for name in data.files if name.startswith(f"{step}.")}
            logits[step] = partition(**inputs)
        shapes = {f"shape.{name}": np.array(state.shape) for name, state in partition.states.items()}
        np.savez(out / f"rank{partition.rank}.npz", **logits, **shapes)


main()
