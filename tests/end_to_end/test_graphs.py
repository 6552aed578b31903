"""Small graphs of many shapes of layer, over two real processes that serve all of them, against the unsharded graph."""

from pathlib import Path

import hidet
import numpy as np

import hidet_dist  # noqa: F401
from hidet_dist.rules.soundness.graphs import GRAPHS
from hidet_dist.rules.soundness.plans import graph_inputs
from hidet_dist.testing import models

from .conftest import budget, launch


def test_two_processes_serve_every_graph(tmp_path):
    expected = {}
    for name, make in GRAPHS.items():
        rng = np.random.default_rng(0)
        graph = make(rng)
        data = [v.astype(x.dtype.name) for v, x in zip(graph_inputs(graph, rng), graph.inputs, strict=True)]
        expected[name] = models.run_whole(graph, data)
        config = {"mem_budget": budget(graph, 2)}
        hidet.distributed.auto_parallel(graph, {"mesh_shape": [2]}, config, tmp_path / name)
        np.savez(tmp_path / f"{name}.inputs.npz", *data)
    done = launch(2, Path(__file__).with_name("serve_many.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    for name, wholes in expected.items():
        for rank in range(2):
            with np.load(tmp_path / f"{name}.rank{rank}.npz") as results:
                for key, whole in zip(results.files, wholes, strict=True):
                    np.testing.assert_allclose(results[key], whole, atol=1e-4, err_msg=f"{name}, rank {rank}")
