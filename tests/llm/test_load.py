"""Checkpoints loaded over ranks: greedy tokens are those of transformers, and what was built is found again."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.llm.gguf_made import model_of
from tests.llm.tokenizers_made import byte_level, write_folder

from hidet_dist.errors import ArtifactError, ConfigError, EngineError
from hidet_dist.llm import LanguageModel, load
from hidet_dist.llm.engine import Engine, Request, Sampling
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.stored import StoredModel

ROOT = Path(__file__).parents[2]
VOCABULARY = 341  # odd, so that no number of ranks but 11 and 31 divides it
TOKENS = 64
SIZES = {"context": 128, "cached_tokens": 256, "page": 4, "step_tokens": 24}
KINDS = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3", "olmo2")
OF_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


@functools.cache
def made(kind: str) -> Any:
    """A random model with 6 heads of queries and 3 of keys and values, which 2 and 4 ranks do not divide."""
    heads = {} if kind == "gpt2" else {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}
    return model_of(kind, vocab_size=VOCABULARY, **heads)


def checkpoint(folder: Path, kind: str) -> Path:
    write_folder(folder, byte_level(), {"eos_token": "<|im_end|>"})
    made(kind).save_pretrained(folder)
    return folder


@functools.cache
def generated(kind: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers generates, greedily."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    with torch.no_grad():
        out = made(kind).generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def prompts() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(0)
    return [tuple(map(int, generator.integers(3, 330, count))) for count in (5, 40, 17)]


def check_answers(model: LanguageModel, kind: str) -> None:
    """Prompts of other lengths join and leave; the longest one is computed in two steps."""
    with Engine(model, model.tokenizer) as engine:
        greedy = {"max_tokens": TOKENS, "ignore_end": True, "sampling": Sampling(temperature=0)}
        streams = [engine.submit(Request(prompt, **greedy)) for prompt in prompts()]
        for prompt, stream in zip(prompts(), streams, strict=True):
            assert stream.answers()[0].ids == generated(kind, prompt)
        (again,) = engine.submit(Request(prompts()[1], **greedy)).answers()
        assert again.ids == generated(kind, prompts()[1])
        statistics = engine.statistics()
        assert (statistics.pages_used, statistics.shared_tokens > 0) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, kind: str, ranks: int):
    check_answers(load(checkpoint(tmp_path / "model", kind), ranks=ranks, cache=tmp_path / "cache", **SIZES), kind)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_greedy_tokens_of_models_of_experts_are_those_of_transformers(tmp_path: Path, kind: str, ranks: int):
    check_answers(load(checkpoint(tmp_path / "model", kind), ranks=ranks, cache=tmp_path / "cache", **SIZES), kind)


@pytest.mark.slow
def test_ranks_that_have_no_room_for_the_model_share_it_and_a_second_start_only_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = checkpoint(tmp_path / "model", "llama")
    options = {"ranks": 2, "optimization": {"mem_budget": 460_000}, "cache": tmp_path / "cache", **SIZES}
    model = load(folder, **options)
    (built,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (stage,) = StoredModel.open(built).manifest.programs[0].stages
    assert stage.communications
    check_answers(model, "llama")

    def fails(*args: Any) -> None:
        raise AssertionError("it is built again")

    monkeypatch.setattr("hidet_dist.llm.building.build", fails)
    for path, given in ((folder, options), (built, {})):  # from the cache, and the folder of the cache by itself
        with load(path, **given) as model:
            assert model.ranks == 2 and model.sizes.context == 128
    with pytest.raises(ConfigError, match="built for 2 ranks"):
        load(built, ranks=3)
    with pytest.raises(ConfigError, match="context decides"):
        load(built, context=64)
    (built / "language-model.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(ArtifactError, match="format is 9"):
        load(built)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wrong": 1}, "no option 'wrong'"),
        ({"ranks": 0}, "number of ranks"),
        ({"context": 0}, "context must be"),
        ({"sequences": True}, "sequences must be"),
        ({"context": 64, "cached_tokens": 32}, "less than the 64 tokens"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"distributed": []}, "distributed must be"),
    ],
)
def test_wrong_options_are_refused_before_work_starts(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        load("nowhere", **options)


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="There is no"):
        load(tmp_path / "nothing", cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="no files of a model"):
        load(tmp_path, cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="trained with sequences of 128"):
        LoadOptions(context=129).context_of(128)
    assert LoadOptions().context_of(128) == 128 and LoadOptions().context_of(10**6) == 4096


@pytest.mark.slow
def test_a_rank_that_dies_ends_open_requests_and_is_told_of(tmp_path: Path):
    model = load(checkpoint(tmp_path / "model", "llama"), ranks=2, cache=tmp_path / "cache", **SIZES)
    died: list[tuple[int, int]] = []
    model.on_death = lambda rank, status: died.append((rank, status))
    with Engine(model, model.tokenizer) as engine:
        stream = engine.submit(Request((5, 6, 7), max_tokens=100, ignore_end=True))
        next(iter(stream))
        os.kill(model._processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="model failed"):
            stream.answers()
        end = time.monotonic() + 60
        while not died:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert died == [(1, -signal.SIGKILL)]


@pytest.mark.slow
def test_commands_answer_and_serve(tmp_path: Path):
    httpx = pytest.importorskip("httpx")
    folder, cache = checkpoint(tmp_path / "model", "llama"), str(tmp_path / "cache")
    command = [sys.executable, "-m", "hidet_dist.cli"]
    given = [str(folder), "-n", "2", "--context", "128", "--cache", cache]
    done = subprocess.run(
        [*command, "generate", *given, "--max-tokens", "12", "the dog"],
        capture_output=True, text=True, timeout=600, check=True, cwd=ROOT,
    )  # fmt: skip
    with load(folder, ranks=2, context=128, cache=cache) as model:
        ids = model.tokenizer.encode("the dog")
        end = model.tokenizer.end
        tokens = generated("llama", tuple(ids))[:12]
        kept = tokens[: next((n for n, token in enumerate(tokens) if token in end), 12)]
        special = model.tokenizer.special
        text = b"".join(model.tokenizer.piece(x) for x in kept if x not in special).decode(errors="replace")
    assert done.stdout == text + "\n"
    assert "tokens in the prompt" in done.stderr

    refused = subprocess.run(
        [*command, "chat", *given], input="hi\n", capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert refused.returncode == 1 and "has no chat template" in refused.stderr
    server = subprocess.Popen([*command, "serve", *given, "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        end_of_time = time.monotonic() + 300
        while httpx.get(f"{url}/health", timeout=60).status_code != 200:
            assert time.monotonic() < end_of_time
            time.sleep(0.1)
        body = {"model": "model", "prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 12
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(60)
