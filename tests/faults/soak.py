"""A serving process that makes very many calls of random sizes, checks each answer, and looks at what it holds.

Writes JSON: the seconds, and by thousands of calls its resident bytes, open descriptors and threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import hidet_dist

MOST_BATCH, MOST_SEQ = 8, 24


def reference(x: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two layers and a softmax, as the whole model has them."""
    y = np.maximum(x @ first, 0) @ second
    y = np.exp(y - y.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


def held() -> dict[str, int]:
    """The resources of this process: resident bytes, open descriptors, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main() -> None:
    """Arguments: the artifacts, the weights, the number of calls, and a folder for the results."""
    artifacts, weights, calls, folder = sys.argv[1:]
    with np.load(weights) as data:
        first, second = data["first"], data["second"]
    rng = np.random.default_rng(0)  # the same on all ranks
    samples = []
    begin = time.monotonic()
    with hidet_dist.load_partition(artifacts) as model:
        for call in range(int(calls)):
            if call % 1000 == 0:
                samples.append(held())
            shape = int(rng.integers(1, MOST_BATCH + 1)), int(rng.integers(1, MOST_SEQ + 1)), first.shape[0]
            x = rng.standard_normal(shape, np.float32)
            np.testing.assert_allclose(model(x), reference(x, first, second), atol=1e-5, err_msg=f"call {call}")
        samples.append(held())
        result = {"seconds": time.monotonic() - begin, "samples": samples}
        (Path(folder) / f"rank{model.rank}.json").write_text(json.dumps(result))


main()
