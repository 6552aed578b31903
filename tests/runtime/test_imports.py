"""The imports of serving processes, which must not take seconds for modules that serving does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.launch import free_port

SERVE = """
import json, sys
import numpy as np
import hidet_dist
with hidet_dist.load_partition(sys.argv[1]) as model:
    y = model(np.ones((4, 8), np.float32))
    shared = model._communicator.shared_groups
loaded = sorted({name for name in sys.modules if "." not in name} | {m for m in sys.modules if "hidet_dist" in m})
maps = open("/proc/self/maps").read()
libraries = [name for name in ("libhidet_dist", "libhidet_dist_search") if f"/{name}.so" in maps]
answer = {"y": y.tolist(), "shared": shared, "modules": loaded, "libraries": libraries}
open(f"{sys.argv[2]}.{model.rank}", "w").write(json.dumps(answer))
"""

HEAVY = {"torch", "hidet", "pulp", "highspy", "hidet_dist.search", "hidet_dist.api", "hidet_dist.rules", "rich"}


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("hidet_dist.launch", 1), ("hidet_dist.launch", 2), pytest.param("torchrun", 2, marks=pytest.mark.slow)],
)
def test_serving_imports_no_compiler_no_search_and_no_pytorch(
    launcher: str, ranks: int, tmp_path: Path, no_launch_variables: None
) -> None:
    """PyTorch's own launcher imports it, but its workers need not."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    weight = np.arange(48, dtype=np.float32).reshape(8, 6)
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.asarray(weight)), [x])
    pins = {"w0": "(S0, R)"} if ranks > 1 else {}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [ranks]}, {"pins": pins}, tmp_path / "artifacts")
    assert bool(result.communications) == (ranks > 1)
    (tmp_path / "serve.py").write_text(SERVE)
    if launcher == "torchrun":
        arguments = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    else:
        arguments = ["-m", launcher, "-n", str(ranks)]
    command = [sys.executable, *arguments, str(tmp_path / "serve.py")]
    env = {name: value for name, value in os.environ.items() if name != "HIDET_DIST_TRANSPORT"}
    done = subprocess.run(
        [*command, str(tmp_path / "artifacts"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        answer = json.loads((tmp_path / f"out.{rank}").read_text())
        np.testing.assert_allclose(answer["y"], np.ones((4, 8), np.float32) @ weight)
        assert answer["shared"] == ([[0, 1]] if ranks > 1 else [])
        assert "hidet_dist" in answer["modules"]
        assert answer["libraries"] == ["libhidet_dist"]
        assert not HEAVY & set(answer["modules"])
