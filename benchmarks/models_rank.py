"""One rank of a model: ``models_rank.py FOLDER``, with the artifacts and the inputs of each rank in the folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hidet_dist.runtime.partition import load_partition


def main(folder: Path) -> None:
    """Run the artifacts once on ``inputs0.npz`` (of rank 0), and write ``outputs0.npz``."""
    with load_partition(folder / "artifacts") as model:
        with np.load(folder / f"inputs{model.rank}.npz") as arrays:
            inputs = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
        np.savez(folder / f"outputs{model.rank}.npz", *model.run(inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
