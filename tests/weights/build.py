"""Builds artifacts for two matrices [width, width] that lie in a file, and prints its peak of memory in bytes."""

import json
import sys
from pathlib import Path

import hidet

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)

folder, width = Path(sys.argv[1]), int(sys.argv[2])
x = hidet.symbol([4, width], "float32", "cpu")
y = x
for name in ("first", "second"):
    y = hidet.ops.matmul(y, hidet.distributed.weight(name, [width, width]))
result = hidet.distributed.auto_parallel(
    hidet.trace_from(y, [x]),
    {"mesh_shape": [2]},
    {"weights": folder / "model.safetensors", "pins": {"first": "(R, S0)", "second": "(S0, R)"}},
    folder / "out",
)
specs = {weight.name: str(weight.spec) for weight in result.plan.stages[0].weights}
# Not ru_maxrss, which a process takes over from the one that starts it.
(peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
print(json.dumps({"peak": int(peak.split()[1]) * 1024, "specs": specs}))
