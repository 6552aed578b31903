"""Programs for GPUs whose parts are unequal: emulated kernels of all ranks against the whole model, NCCL's calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.emulator.emulated import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import run_on_one_gpu

import hidet_dist
from hidet_dist import launch
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.machine import Link, builtin
from hidet_dist.spec import DeviceMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VOCABULARY, TOKENS = 96, 8
PROGRAM = Path(__file__).with_name("checks_emulated.py")


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_head=12, n_embd=192, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=144,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "ranks", "dtype", "tolerance"),
    [(gpt2, 5, "float32", 1e-4), (llama, 2, "float32", 1e-4), (llama, 2, "float16", 2e-2)],
)
def test_ranks_answer_as_the_whole_model_does(
    emulator: Emulator,
    stand_ins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], torch.nn.Module],
    ranks: int,
    dtype: str,
    tolerance: float,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(0, VOCABULARY, (1, TOKENS))
    graph, out = hidet_dist.from_torch(model, {"input_ids": ids}), tmp_path / "artifacts"
    gpus = builtin("dgx-h100", DeviceMesh((ranks,)))
    # Where nothing that is sent takes time, heads are split, of GPT-2 where arithmetic is slow and launches are free.
    slow = replace(gpus.device, flops_per_second={"default": 1e9}, launch_seconds=0.0)
    device = slow if make is gpt2 else gpus.device
    machine = replace(gpus, device=device, links=(Link(0.0, 1e18),))
    options = {"target": "cuda", "arch": "sm_90", "cuda": {"cublas": False}}
    options |= {"precision": dtype} if dtype != "float32" else {}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [ranks], "machine": machine}, options, out)
    (stage,) = Manifest.load(out).program().stages
    assert stage.parts
    with torch.no_grad():
        want = model.double()(ids)[0].numpy()
    np.savez(tmp_path / "artifacts.npz", ids.numpy(), expected=want, tolerance=tolerance, rms=tolerance * want.std())
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    launched = ("-n", str(ranks), str(PROGRAM), "serve", str(out))
    done = run_on_one_gpu(stand_ins, exchange, Path(launch.__file__), *launched, seconds=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    gathered = [line for line in result.communications if line.startswith("all_gather") and "part_of" in line]
    elements = [int(line.rpartition("[")[2].rstrip("]")) for line in gathered]
    for rank in range(ranks):
        calls = (exchange / f"calls.{rank}").read_text().splitlines()
        broadcast = [int(line.split()[1]) for line in calls if line.startswith("broadcast ")]
        count, rest = divmod(sum(broadcast), sum(elements))  # of the program's calls
        assert count > 0
        assert rest == 0
        assert len(broadcast) == count * ranks * len(elements)
        assert all(line.endswith(" grouped") for line in calls if line.startswith("broadcast "))
