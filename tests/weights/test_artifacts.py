"""Artifacts of weights that lie in files: the same as those of constants, whatever the dtype."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def linear(w: hidet.Tensor, b: hidet.Tensor) -> hidet.FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    return hidet.trace_from(hidet.ops.matmul(x, w) + b, [x])


def test_they_are_those_of_the_same_weights_as_constants(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (6,)))
    save_file({"w": torch.from_numpy(w), "b": torch.from_numpy(b)}, tmp_path / "model.safetensors")
    dist, mesh = hidet.distributed, {"mesh_shape": [1]}
    dist.auto_parallel(linear(hidet.asarray(w), hidet.asarray(b)), mesh, {}, tmp_path / "constants")
    named = linear(dist.weight("w", [8, 6]), dist.weight("b", [6]))
    dist.auto_parallel(named, mesh, {"weights": str(tmp_path)}, tmp_path / "named")
    stored = dist.weights_from_safetensors(tmp_path / "model.safetensors")
    dist.auto_parallel(linear(stored["w"], stored["b"]), mesh, {}, tmp_path / "stored")
    for other in ("named", "stored"):
        for path in (tmp_path / "constants/stage0").rglob("*.*"):
            assert path.read_bytes() == (tmp_path / other / path.relative_to(tmp_path / "constants")).read_bytes()
        plan = dist.Plan.load(tmp_path / other / "plan.json")
        assert [weight.label for weight in plan.stages[0].weights] == ["w", "b"]
    x = rng.standard_normal((4, 8)).astype(np.float32)
    with dist.load_partition(tmp_path / "named", 0) as model:
        np.testing.assert_allclose(model(x), x @ w + b, rtol=1e-5, atol=1e-5)


def test_half_types_keep_their_bits(tmp_path: Path) -> None:
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    weights = {name: torch.randn(8, 6).to(dtype) for name, dtype in dtypes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    inputs = [hidet.symbol([8, 6], name, "cpu") for name in dtypes]
    outputs = [x + hidet.distributed.weight(x.dtype.name, [8, 6], x.dtype.name) for x in inputs]
    config = {"weights": tmp_path / "model.safetensors", "pins": {"float16": "(S0, R)", "bfloat16": "(R, S0)"}}
    out = tmp_path / "out"
    result = hidet.distributed.auto_parallel(hidet.trace_from(outputs, inputs), {"mesh_shape": [2]}, config, out)
    assert result.weight_bytes_per_rank == [8 * 6 * 2] * 2
    assert [weight.dtype for weight in result.plan.stages[0].weights] == list(dtypes)
    for rank in range(2):
        with safe_open(out / f"weights/rank{rank}.safetensors", "pt") as file:
            for weight, whole in zip(result.plan.stages[0].weights, weights.values(), strict=True):
                own = weight.spec.slices(weight.shape, result.plan.stages[0].mesh, (rank,))
                assert torch.equal(file.get_tensor(weight.name), whole[own])
