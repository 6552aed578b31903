"""A serving process of artifacts with several programs: it calls each in turn, and writes answers and its memory."""

import json
import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def memory() -> dict[str, int]:
    """The bytes of this process's memory by kind, by the system's names."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    answers = {}
    with np.load(given) as inputs, load_partition(folder) as partition:
        for _ in range(2):  # each program runs before and after the others
            for name in partition.programs:
                answers[name] = partition.program(name)(inputs[name])
        used = memory()
        np.savez(out / f"rank{partition.rank}.npz", **answers)
        (out / f"rank{partition.rank}.json").write_text(json.dumps(used))


main()
