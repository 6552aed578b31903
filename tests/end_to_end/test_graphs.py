"""Small graphs of many shapes of layer, over two real processes that serve all of them, against the oracle."""

from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist  # noqa: F401
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.soundness.graphs import MODELS, PATTERNS, WITHOUT_KERNELS
from hidet_dist.soundness.plans import evaluate_graph, graph_inputs
from hidet_dist.spec import DeviceMesh

from .conftest import budget, launch

SERVED = [name for name in MODELS if name not in WITHOUT_KERNELS]

# Devices so slow beside their network that even little work is worth splitting.
SLOW = Cluster(DeviceMesh((2,)), (Link(1e-9, 1e12),), Device("slow", {"default": 1e6}, 1e9, 2**30, 1e-9))


def by_rows_then_columns(_):
    """Sums along rows, then along columns: what is split by rows must be split by columns between them."""
    x = hidet.symbol([8, 12], "float32", "cpu")
    return hidet.trace_from(hidet.ops.cumsum(hidet.ops.cumsum(x, 1), 0), [x])


# It has what the other patterns have: products, attention and gates. What does not divide is served in test_padding.py.
QUICK = ("gated_decoder",)


@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param({**{name: PATTERNS[name] for name in QUICK}, "columns": by_rows_then_columns}, id="patterns"),
        pytest.param(
            {name: PATTERNS[name] for name in PATTERNS if name not in QUICK}, id="others", marks=pytest.mark.slow
        ),
        *(pytest.param({name: MODELS[name]}, id=name, marks=pytest.mark.slow) for name in SERVED),
    ],
)
def test_two_processes_serve_graphs(tmp_path, graphs):
    expected = {}
    for name, make in graphs.items():
        rng = np.random.default_rng(0)
        graph = make(rng)
        data = [v.astype(x.dtype.name) for v, x in zip(graph_inputs(graph, rng), graph.inputs, strict=True)]
        expected[name] = evaluate_graph(graph, [v.astype(np.float64) if v.dtype.kind == "f" else v for v in data])
        if make is by_rows_then_columns:
            config = {"mesh_shape": [2], "machine": SLOW}
            made = hidet.distributed.auto_parallel(graph, config, {}, tmp_path / name)
            assert made.plan.collectives() == {"all_gather": 1, "all_to_all": 2}
        else:
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
