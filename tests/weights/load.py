"""A rank that loads artifacts, and prints its peak of memory in bytes."""

import os
import sys
from pathlib import Path

import hidet

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)

with hidet.distributed.load_partition(sys.argv[1]):
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    os.write(1, f"{int(peak.split()[1]) * 1024}\n".encode())  # at once: ranks share the pipe
