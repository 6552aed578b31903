"""A serving process that answers for inputs of several sizes, from two partitions that both have symbolic dims."""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition
from hidet_dist.errors import InputError


def main() -> None:
    folder = Path(sys.argv[1])
    results, refused = {}, []
    with (
        load_partition(folder / "heads") as heads,
        load_partition(folder / "rows") as rows,
        np.load(folder / "inputs.npz") as data,
    ):
        cases = sorted({name.partition(".")[0] for name in data.files})
        for case in (*cases, cases[0]):  # back to the first sizes: nothing of the others may be left
            x, mask = data[f"{case}.x"], data[f"{case}.mask"]
            results[f"heads.{case}"] = heads(x, mask)
            half = x.shape[0] // 2
            results[f"rows.{case}"] = rows(x[heads.rank * half : (heads.rank + 1) * half])
        first, second = (data[f"{case}.x"] for case in cases[:2])
        mask = data[f"{cases[0]}.mask"]
        own = (first, mask) if heads.rank == 0 else (second, data[f"{cases[1]}.mask"])
        for arguments in ((first[:1], mask[:1]), (first, mask[..., :2]), (first[:, :, :5], mask), own):
            try:
                heads(*arguments)
            except InputError as error:
                refused.append(str(error))
        results["heads.again"] = heads(first, mask)
    np.savez(folder / f"rank{heads.rank}.npz", refused=np.array(refused), **results)


main()
