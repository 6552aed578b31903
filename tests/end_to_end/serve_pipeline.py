"""A serving process of a pipeline: a call, a stream and a profile, with the same inputs; writes what it answered."""

import sys
from pathlib import Path

import numpy as np

from hidet_dist import load_partition


def main() -> None:
    artifacts, inputs, results, timeout = sys.argv[1:]
    with np.load(inputs) as data:
        arrays = [data[name] for name in data.files]
    with load_partition(artifacts, timeout_seconds=float(timeout)) as model:
        outputs = model.run(arrays)
        # Each batch of the stream is another permutation of the rows.
        streamed = list(model.stream([np.roll(x, shift, 0) for x in arrays] for shift in range(3)))
        profile = model.profile(*arrays)
        sent = sum(nbytes for step in profile.steps if step.name == "send" for nbytes in step.nbytes.values())
        np.savez(Path(results) / f"rank{model.rank}.npz", *outputs, *streamed, np.array([sent, profile.busy_share > 0]))


main()
