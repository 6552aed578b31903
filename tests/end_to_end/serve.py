"""A serving process: loads its partition, answers once for each input file, and writes what it answered."""

import sys
from pathlib import Path

import hidet
import numpy as np

import hidet_dist  # noqa: F401  (adds load_partition to hidet.distributed)


def main() -> None:
    artifacts, inputs, results, timeout = sys.argv[1:]
    with np.load(inputs) as data:
        arrays = [data[name] for name in data.files]
    with hidet.distributed.load_partition(artifacts, timeout_seconds=float(timeout)) as model:
        for _ in range(2):  # a second call must not see what the first left behind
            outputs = model.run(arrays)
        np.savez(Path(results) / f"rank{model.rank}.npz", *outputs)


main()
