"""One host's part in the calibration of two: ``calibrate_host.py out.json node_rank meeting_point``."""

from __future__ import annotations

import sys

from hidet_dist.calibration import calibrate

_SIZES = (2**14, 2**16, 2**18, 2**20)


def main(out: str, node_rank: str, rdzv: str) -> None:
    """Measure a mesh of a device on each host."""
    calibrate([2], out, dtypes=["float32"], sizes=_SIZES, repeats=3, nnodes=2, node_rank=int(node_rank), rdzv=rdzv)


main(*sys.argv[1:])
