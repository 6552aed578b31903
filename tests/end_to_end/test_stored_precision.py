"""Weights of few bits on two devices: shards of the same groups."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.artifacts import Manifest

from .conftest import serve

RNG = np.random.default_rng(0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_shards_have_the_elements_and_scales_of_the_whole_weights(precision: str, tmp_path: Path) -> None:
    x = hidet.symbol([5, 128], "float32", "cpu")
    up, down = (hidet.asarray(RNG.standard_normal(shape, np.float32) / 8) for shape in ((128, 256), (256, 128)))
    graph = hidet.trace_from(ops.matmul(ops.relu(ops.matmul(x, up)), down), [x])
    config = {"weights": {"precision": precision}, "pins": {"w0": "(R, S0)", "w1": "(S0, R)"}}
    given, answers = RNG.standard_normal((5, 128), np.float32), {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        own = config if ranks == 2 else {"weights": config["weights"]}
        result = hidet_dist.auto_parallel(graph, {"mesh_shape": [ranks]}, own, folder / "out")
        if ranks == 2:
            assert [str(weight.spec) for weight in result.plan.stages[0].weights] == ["(R, S0)", "(S0, R)"]
        (stage,) = Manifest.load(folder / "out").program().stages
        assert {panels.precision for panels in stage.panels.values()} == {precision}
        answers[ranks] = serve(ranks, folder / "out", [given], folder)
    (whole,) = answers[1][0]
    exact = np.maximum(given @ up.numpy(), 0) @ down.numpy()
    assert np.linalg.norm(whole - exact) > 1e-3 * np.linalg.norm(exact)  # the weights are rounded
    for (sharded,) in answers[2]:
        np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
