"""``hidet-dist plan --serve``: what serving a language model takes, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hidet_dist.cli.app import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "llama-3-8b"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


def told(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["plan", *arguments, "--serve", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.mark.slow
def test_memory_and_rates_are_those_of_the_steps(tiny: str):
    sizes = ("--mesh", "2", "--machine", "dgx-h100", "--context", "512", "--sequences", "4", "--dtype", "float16")
    found = told(tiny, *sizes)
    rows = 4 * 512
    # Two heads of 16 elements of keys and of values, in one layer: split over two devices, or held by both.
    assert found["cache_bytes"] in {rows * 2 * 2 * 16 * 2 // 2, rows * 2 * 2 * 16 * 2}
    assert 0 < found["weight_bytes"] < 90_000  # the parameters have 87424 bytes
    left = found["memory_bytes"] - found["weight_bytes"] - found["other_bytes"]
    assert found["fitting"] == left * 4 // found["cache_bytes"]
    rates = found["tokens_per_second"]
    assert list(rates) == ["1", "8", "64"] and 0 < rates["1"] < rates["8"] < rates["64"]
    assert 4 / found["token_seconds"] < rates["8"]
    assert 0 < found["first_token_seconds"] <= found["long_prompt_seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--serve", "--batch", "3"), "--batch does not go with --serve"),
        (("--serve", "--out", "x.json"), "--out does not go with --serve"),
        (("--serve", "--context", "0"), "context must be"),
        (("--serve", "--context", "2000"), "trained with sequences of 1024"),
        (("--context", "64"), "--context is for plans with --serve"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tiny: str, arguments: tuple[str, ...], said: str):
    done = CliRunner().invoke(app, ["plan", tiny, "--mesh", "2", "--machine", "dgx-h100", *arguments])
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 3}, "config.json: head_dim is 3, and LlamaForCausalLM cannot be called for ragged tokens"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, and The attention of LlamaAttention has 4 heads of"),
    ],
)
def test_sizes_that_fail_in_a_step_are_refused_by_name_on_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changed: dict[str, int], said: str
):
    (tmp_path / "config.json").write_text(json.dumps(TINY | changed))
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--mesh", "2", "--machine", "dgx-h100", "--serve"])
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 1 and said in done.output
    assert capfd.readouterr().err == ""  # where PyTorch's loggers write


@pytest.mark.slow
def test_llama_3_8b_is_planned_from_its_configuration():
    found = told(str(EXAMPLE), "--mesh", "8", "--machine", "dgx-h100", "--context", "8192", "--sequences", "16")
    whole = 16 * 8192 * 32 * 2 * 8 * 128 * 2
    assert found["cache_bytes"] == whole // 8
    assert found["fitting"] > 100
    assert found["weight_bytes"] < 3e9


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 5, 7])
def test_devices_that_do_not_divide_the_heads_hold_near_even_shares(tmp_path: Path, devices: int):
    """Eight layers of LLaMA-3-8B, of which a device may hold little more than a share: heads are split."""
    layers, context, sequences = 8, 2048, 4
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hidden, keys, inner, vocabulary = 4096, 1024, 14336, 128256
    of_layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    even = 2 * (layers * of_layer + 2 * vocabulary * hidden + hidden) / devices
    heads = -(-8 // devices)
    cache = 2 * layers * keys * heads // 8 * sequences * context * 2
    budget = int(1.03 * even + cache + 0.1 * 2**30)
    sizes = ("--context", str(context), "--sequences", str(sequences), "--budget", str(budget))
    found = told(str(tmp_path), "--mesh", str(devices), "--machine", "pcie-l40s", *sizes)
    assert found["cache_bytes"] == cache
    assert found["weight_bytes"] <= 1.05 * even
