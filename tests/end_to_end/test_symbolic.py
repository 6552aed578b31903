"""Models with symbolic dims over two real processes: several sizes through the same artifacts."""

from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist  # noqa: F401
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import InputError
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.testing import models

from .conftest import launch

SIZES = [(2, 5), (2, 16), (8, 5), (8, 16)]


def rows_graph():
    """Each row is changed on its own, and then all rows together: batch is split at first, and at the end."""
    x = hidet.symbol(["batch", "seq", 32], "float32", "cpu")
    y = ops.relu(ops.matmul(x, hidet.asarray(np.eye(32, 16, dtype=np.float32))))
    return hidet.trace_from(y - ops.max(y, dims=[0], keep_dim=True), [x])


@pytest.mark.slow
def test_one_artifact_serves_several_sizes(tmp_path):
    graph, rows = models.encoder_block("batch", "seq"), rows_graph()
    symbols = {"batch": {"expected": 16, "multiple_of": 2}, "seq": 128}
    config = {"symbols": symbols, "pins": {f"w{number}": "(R, S0)" for number in range(3)}}  # by heads
    result = hidet.distributed.auto_parallel(graph, {"mesh_shape": [2]}, config, tmp_path / "heads")
    assert result.communications
    config = {"symbols": symbols, "input_specs": ["(S0, R, R)"], "output_specs": ["(S0, R, R)"]}
    hidet.distributed.auto_parallel(rows, {"mesh_shape": [2]}, config, tmp_path / "rows")
    kernels = Manifest.load(tmp_path / "heads").program().stages[0].kernels
    assert "BlasMatmul" in kernels and "Matmul" not in kernels
    (x,) = Manifest.load(tmp_path / "rows").program().stages[0].inputs
    assert (x.shape, x.whole_shape) == (("batch_over_2", "seq", 32), ("batch", "seq", 32))

    data, wholes = {}, {}
    for number, (batch, seq) in enumerate(SIZES):
        x, mask = models.encoder_inputs(batch, seq, seed=number)
        data |= {f"{number}.x": x, f"{number}.mask": mask}
        wholes[f"heads.{number}"] = evaluate_graph(graph, [x.astype(np.float64), mask.astype(np.float64)])[0]
        wholes[f"rows.{number}"] = evaluate_graph(rows, [x.astype(np.float64)])[0]
    np.savez(tmp_path / "inputs.npz", **data)
    done = launch(2, Path(__file__).with_name("serve_sizes.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        with np.load(tmp_path / f"rank{rank}.npz") as results:
            for name, whole in wholes.items():
                half = whole.shape[0] // 2
                own = whole[rank * half : (rank + 1) * half] if name.startswith("rows") else whole
                np.testing.assert_allclose(results[name], own, atol=1e-4, err_msg=f"{name}, rank {rank}")
            np.testing.assert_allclose(results["heads.again"], wholes["heads.0"], atol=1e-4)
            multiple, disagree, shape, ranks = results["refused"]
        assert multiple == "The symbolic dim batch must be a positive multiple of 2; dim 0 of input 0 says batch = 1."
        assert "seq must be the same everywhere; dim 3 of input 1 says seq = 2, but dim 1 of input 0" in disagree
        assert shape == "Input 0 must have the shape [batch, seq, 32]; got [2, 5, 5]."
        assert "seq must be the same on all ranks" in ranks


def test_sizes_that_leave_nothing_of_an_output_are_refused(tmp_path):
    x = hidet.symbol(["batch", "seq", 8], "float32", "cpu")
    graph = hidet.trace_from(ops.relu(x[:, 1:, :]), [x])
    config = {"symbols": {"batch": 4, "seq": 16}}
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, config, tmp_path / "artifacts")
    data = np.random.default_rng(0).uniform(-1, 1, (2, 3, 8)).astype(np.float32)
    with hidet.distributed.load_partition(tmp_path / "artifacts", rank=0) as model:
        for _ in range(2):
            np.testing.assert_array_equal(model(data), np.maximum(data[:, 1:], 0))
            with pytest.raises(InputError, match=r"too small: output 0, .* would be \[2, 0, 8\]"):
                model(data[:, :1])
