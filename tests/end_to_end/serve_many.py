"""A serving process that loads several partitions, keeps them all, and writes what each answers."""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def main() -> None:
    folder = Path(sys.argv[1])
    models = []
    for artifacts in sorted(path for path in folder.iterdir() if path.is_dir()):
        models.append((artifacts.name, load_partition(artifacts)))
    for name, model in models:
        with np.load(folder / f"{name}.inputs.npz") as data:
            outputs = model.run([data[key] for key in data.files])
        np.savez(folder / f"{name}.rank{model.rank}.npz", *outputs)
    for _, model in models:
        model.close()


main()
