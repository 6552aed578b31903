"""A language model built for GPUs on emulated kernels: its steps' logits are those of transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.emulator.emulated import Emulator
from tests.llm.gguf_made import model_of
from tests.llm.test_built import STEPS, THREE_HEADS
from tests.llm.test_ragged import PAGE, PAGES, Sequences, made

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import run_on_one_gpu

import hidet_dist
from hidet_dist import launch
from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle

SERVE = Path(__file__).parents[2] / "llm" / "serve_ragged.py"
TOLERANCES = {"float32": 2e-5, "float16": 2e-2}


def built(model: Any, dtype: str, folder: Path, shares: tuple[int, ...] = (), **options: object) -> None:
    config = type(model.config).from_dict(model.config.to_dict())
    prepare(config)
    module = type(model)(config).eval().to(getattr(torch, dtype))
    module.load_state_dict(model.state_dict())
    settle(module)
    step = RaggedModel(module, PAGES * PAGE, PAGE, device="meta")
    graph = hidet_dist.from_torch(step, step.inputs(), dynamic_shapes=dynamic_shapes())
    symbols = {"tokens": 4, "sequences": 2, "pages": 6, "wanted": 2}
    config = {"target": "cuda", "arch": "sm_90", "symbols": symbols, **options}
    mesh = {"mesh_shape": [len(shares)], "shares": {"axis0": shares}} if shares else {"mesh_shape": [1]}
    hidet_dist.auto_parallel(graph, mesh, config, folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("dtype", "shares"), [("float32", ()), ("float16", ()), ("float32", (1, 2)), ("float16", (1, 2))]
)
def test_steps_find_the_rows_of_the_steps_before(
    emulator: Emulator,
    stand_ins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    shares: tuple[int, ...],
) -> None:
    """Each size of a step comes once or twice, so that steps are launched, captured and replayed.

    With shares, the budget has no room for all pools and weights, so that one rank has one of three heads of keys, the
    other two.
    """
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    model = model_of("llama", head_dim=16, **THREE_HEADS) if shares else made("llama")
    options: dict[str, object] = {"cuda": {"cuda_graph": dtype == "float16", "cublas": False}}
    if shares:
        element_bytes = 2 if dtype == "float16" else 4
        options["mem_budget"] = int(0.9 * sum(x.numel() * element_bytes for x in model.parameters()))
    built(model, dtype, tmp_path / "built", shares, **options)
    generator = np.random.default_rng(1)
    sequences = Sequences(*(list(map(int, generator.integers(3, 90, 20))) for _ in range(2)))
    with torch.no_grad():
        whole = [model(input_ids=torch.tensor([tokens])).logits[0].numpy() for tokens in sequences.tokens]
    given, expected = {}, []
    for number, counts in enumerate(STEPS):
        given.update({f"{number}.{name}": x.numpy() for name, x in sequences.step(counts).items()})
        expected.append(np.stack([whole[one][sequences.done[one] - 1] for one in counts]))
    np.savez(tmp_path / "steps.npz", **given)
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    what = (
        "-n",
        str(len(shares) or 1),
        str(SERVE),
        str(tmp_path / "built"),
        str(tmp_path / "steps.npz"),
        str(tmp_path),
    )
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_on_one_gpu(stand_ins, exchange, Path(launch.__file__), *what, seconds=1500, **path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, heads in enumerate(shares or (2,)):
        with np.load(tmp_path / f"rank{rank}.npz") as told:
            assert tuple(told["shape.keys_0"]) == (PAGES * PAGE, heads, 16)
            for number, logits in enumerate(expected):
                error = np.abs(told[str(number)] - logits).max()
                assert error <= TOLERANCES[dtype] * max(1, np.abs(logits).max())
