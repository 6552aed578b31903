"""A rank on one of several hosts: serves until a call fails, and writes down what it answered and why it stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

import hidet_dist
from hidet_dist.errors import HidetDistError


def main(artifacts: str, out: str, calls: str, timeout_seconds: str) -> None:
    """Make so many calls, or calls without end for 0."""
    own = Path(out) / f"rank{os.environ['RANK']}"
    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    said: dict[str, object] = {}
    try:
        with hidet_dist.load_partition(artifacts, timeout_seconds=float(timeout_seconds)) as model:
            first = model(x)
            groups = [list(ranks) for ranks in model._communicator.shared_groups]
            _write(own.with_suffix(".first"), {"answer": first.tolist(), "shared": groups})
            made = 1
            while made != int(calls):
                np.testing.assert_array_equal(model(x), first)
                made += 1
    except HidetDistError as error:
        said = {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
    _write(own.with_suffix(".last"), said)
    sys.exit(3 if said else 0)


def _write(file: Path, said: dict[str, object]) -> None:
    """Write it whole: others look for it."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(said))
    part.replace(file)


main(*sys.argv[1:])
