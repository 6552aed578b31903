"""Checkpoints loaded over ranks: greedy tokens are those of transformers, and what was built is found again."""

from __future__ import annotations

import ast
import copy
import functools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.frontends.quantized_made import quantize_folder
from tests.llm.gguf_made import Q, model_of, write
from tests.llm.test_gguf_tokenizer import metadata_of
from tests.llm.tokenizers_made import byte_level, write_folder
from typer.testing import CliRunner

from hidet_dist import native
from hidet_dist.cli.app import app
from hidet_dist.errors import ArtifactError, ConfigError, EngineError, RendezvousError
from hidet_dist.launch import free_port
from hidet_dist.llm import LanguageModel, load
from hidet_dist.llm.cached import found_or_built
from hidet_dist.llm.engine import Engine, Request, Sampling
from hidet_dist.llm.loading import Hosts, join, stored_model
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.stored import StoredModel
from hidet_dist.llm.tokenizer import CheckpointTokenizer
from hidet_dist.phases import Prepared, Traced

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


def difference_from(model: Any, loaded: LanguageModel, prompt: list[int]) -> float:
    """The greatest difference between a prompt's log-probabilities and those of a model of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    with Engine(loaded, loaded.tokenizer) as engine:
        stream = engine.submit(Request(prompt, max_tokens=0, prompt_logprobs=0))
        stream.answers()
    assert stream.prompt is not None
    ours = np.array([told.logprob for told in stream.prompt[1:]])
    theirs = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].numpy()
    return float(np.abs(ours - theirs).max())


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
@pytest.mark.parametrize(
    ("kind", "ranks", "stages"),
    [("llama", None, 2), ("gemma3_text", 2, 2), ("gpt2", 3, 2), ("mixtral", 4, 2), ("gpt_oss", 2, 2), ("qwen3", 3, 2)],
)
def test_greedy_tokens_over_stages_are_those_of_transformers(
    tmp_path: Path, kind: str, ranks: int | None, stages: int, monkeypatch: pytest.MonkeyPatch
):
    folder, cache = checkpoint(tmp_path / "model", kind), tmp_path / "cache"
    prepare, prepared = Traced.prepare, []

    def once(traced: Traced) -> Prepared:
        prepared.append(traced)
        return prepare(traced)

    monkeypatch.setattr(Traced, "prepare", once)
    model = load(folder, ranks=ranks, stages=stages, cache=cache, **SIZES)
    assert len(prepared) == 1  # the graph that is cut is the one that is planned
    (built,) = (path for path in cache.iterdir() if path.is_dir())
    program = StoredModel.open(built).manifest.program()
    assert (model.ranks, len(program.stages)) == (ranks or stages, stages)
    layers = made(kind).config.num_hidden_layers
    assert program.stages[0].states and sum(len(stage.states) for stage in program.stages) == 2 * layers
    check_answers(model, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "fraction", "heads"), [(2, 0.85, [2, 1]), (4, 0.65, [3, 3, 3, 3])])
def test_heads_that_ranks_do_not_divide_give_the_tokens_of_one_rank(
    tmp_path: Path, ranks: int, fraction: float, heads: list[int]
):
    """9 heads of queries and 3 of keys and values, in less than the model's bytes; 4 ranks cannot have a head each."""
    config = {"num_hidden_layers": 4, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    folder, model = tmp_path / "model", model_of("llama", vocab_size=VOCABULARY, **config)
    write_folder(folder, byte_level(), {"eos_token": "<|im_end|>"})
    model.save_pretrained(folder)
    whole = sum(x.numel() * 4 for x in model.parameters())
    told, cache = [], tmp_path / "cache"
    for count in (1, ranks):
        options = {"optimization": {"mem_budget": int(whole * fraction)}} if count > 1 else {}
        with (
            load(folder, ranks=count, cache=cache / str(count), **SIZES, **options) as loaded,
            Engine(loaded, loaded.tokenizer) as engine,
        ):
            greedy = {"max_tokens": TOKENS, "ignore_end": True, "sampling": Sampling(temperature=0)}
            streams = [engine.submit(Request(prompt, **greedy)) for prompt in prompts()]
            told.append([stream.answers()[0].ids for stream in streams])
    assert told[0] == told[1]
    (built,) = (path for path in (cache / str(ranks)).iterdir() if path.is_dir())
    (stage,) = StoredModel.open(built).manifest.program().stages
    assert [stage.at(rank).states[0].local_shape[1] for rank in range(ranks)] == heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "options", "most"),
    [
        ("bfloat16", {}, 1e-4),
        ("float16", {"dtype": "float16"}, 0.02),
        ("bfloat16", {"dtype": "bfloat16"}, 0.15),
        ("float32", {"optimization": {"weights": {"precision": "float16"}}}, 0.02),
        ("float32", {"optimization": {"weights": {"precision": "int8"}}}, 0.15),
        ("float32", {"optimization": {"weights": {"precision": "int4"}}}, 2.0),
    ],
)
def test_checkpoints_and_weights_of_fewer_bits(tmp_path: Path, stored: str, options: dict[str, Any], most: float):
    """Log-probabilities of a prompt over 2 ranks, beside those of transformers in float32 with the stored weights."""
    folder = tmp_path / "model"
    write_folder(folder, byte_level(), {"eos_token": "<|im_end|>"})
    model = copy.deepcopy(made("llama")).to(getattr(torch, stored))
    model.save_pretrained(folder)
    prompt = prompts()[1]
    whole = copy.deepcopy(made("llama"))
    whole.load_state_dict(model.float().state_dict())  # the frequencies of positions stay those of float32
    loaded = load(folder, ranks=2, cache=tmp_path / "cache", **SIZES, **options)
    assert difference_from(whole, loaded, prompt) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "precisions", "most"),
    [
        ("gptq", {"ranks": 2}, {"wide_uint4"}, 0.15),
        ("awq", {"ranks": 2, "optimization": {"weights": {"precision": None}}}, set(), 1e-4),
        ("compressed-tensors", {"ranks": 2, "stages": 2}, {"wide_uint4"}, 0.15),
        ("gguf", {"ranks": 2}, {"uint4"}, 0.15),
    ],
)
def test_weights_in_the_bits_of_their_files(
    tmp_path: Path, method: str, options: dict[str, Any], precisions: set[str], most: float
):
    """Log-probabilities of a prompt, beside those of transformers with the weights dequantized, in float32."""
    model = model_of("llama", vocab_size=VOCABULARY)
    path = tmp_path / ("model.gguf" if method == "gguf" else "model")
    if method == "gguf":
        keys = {**metadata_of(byte_level(), "gpt2"), "tokenizer.ggml.pre": "gpt-2"}
        values = write(path, model, "llama", Q.Q4_1, **keys)
    else:
        write_folder(path, byte_level(), {"eos_token": "<|im_end|>"})
        model.save_pretrained(path)
        values = quantize_folder(path, method, 32)
    model.load_state_dict(values, strict=False)
    prompt = prompts()[1]
    loaded = load(path, cache=tmp_path / "cache", **SIZES, **options)
    (built,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    stages = StoredModel.open(built).manifest.program().stages
    found = {one.precision for stage in stages for one in stage.panels.values()} - {""}
    assert found == precisions
    assert difference_from(model, loaded, prompt) < most


def test_other_headers_of_kernels_are_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A built model has kernels that were compiled from them: those of another version are not taken for it."""
    built: list[Path] = []
    monkeypatch.setattr("hidet_dist.llm.building.build", lambda path, name, options, folder: built.append(folder))
    headers, checkpoint_file = tmp_path / "include", tmp_path / "model.gguf"
    shutil.copytree(native.include_dir(), headers)
    checkpoint_file.write_bytes(b"GGUF")
    folders = [found_or_built(checkpoint_file, "model", LoadOptions(), tmp_path / "cache")]
    monkeypatch.setattr(native, "include_dir", lambda: headers)
    folders.append(found_or_built(checkpoint_file, "model", LoadOptions(), tmp_path / "cache"))
    header = headers / "hidet_dist" / "kernels" / "functions.h"
    header.write_text(header.read_text() + "// changed")
    folders.append(found_or_built(checkpoint_file, "model", LoadOptions(), tmp_path / "cache"))
    assert folders[0] == folders[1] != folders[2]
    assert len(built) == 3  # nothing was in any folder


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
    with pytest.raises(ArtifactError, match="has format 9"):
        load(built)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wrong": 1}, "no option 'wrong'"),
        ({"ranks": 0}, "number of ranks"),
        ({"context": 0}, "context must be"),
        ({"sequences": True}, "sequences must be"),
        ({"stages": 0}, "stages must be"),
        ({"stages": 3, "ranks": 2}, "3 stages cannot be on 2 ranks"),
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
    with pytest.raises(ConfigError, match="max_position_embeddings gives sequences -7 tokens"):
        LoadOptions().context_of(-7)
    assert LoadOptions().context_of(128) == 128 and LoadOptions().context_of(10**6) == 4096


@pytest.mark.slow
def test_sizes_that_do_not_fit_each_other_are_refused_by_name(tmp_path: Path):
    """Heads of an odd size cannot be rotated, which shows in a call."""
    folder = write_folder(tmp_path / "model", byte_level(), {"eos_token": "<|im_end|>"})
    model_of("mixtral", vocab_size=VOCABULARY, hidden_size=14, num_attention_heads=2, head_dim=None).save_pretrained(
        folder
    )
    with pytest.raises(ConfigError, match=r"config\.json: \w+ is \d+, and MixtralForCausalLM cannot be called"):
        load(folder, cache=tmp_path / "cache")


@pytest.mark.slow
def test_models_that_compute_with_nothing_are_refused_by_name(tmp_path: Path):
    folder = write_folder(tmp_path / "model", byte_level(), {"eos_token": "<|im_end|>"})
    model_of("mixtral", vocab_size=VOCABULARY, num_experts_per_tok=0).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"config\.json: num_experts_per_tok is 0, and "):
        load(folder, cache=tmp_path / "cache")


def test_the_command_says_nothing_but_why_a_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = {"model_type": "gpt2", "vocab_size": 341, "bos_token_id": 50256, "embd_pdrop": 3}
    folder = write_folder(tmp_path / "model", byte_level(), {"eos_token": "<|im_end|>"}, config=config)
    logger = logging.getLogger("transformers")
    logger.setLevel(logging.WARNING)
    logger.addHandler(caplog.handler)
    try:
        done = CliRunner().invoke(app, ["generate", str(folder), "hi", "--cache", str(tmp_path / "cache")])
    finally:
        logger.removeHandler(caplog.handler)
    assert done.exit_code == 1 and not caplog.records
    assert re.fullmatch(r"hidet-dist: .*config\.json: embd_pdrop is 3, and .*\n", done.output)


def test_a_malformed_chat_template_is_refused_before_a_model_is_made(tmp_path: Path):
    """The configuration alone would be refused, too, which is read after it."""
    folder = write_folder(
        tmp_path / "model", byte_level(), {"chat_template": "{% for %}"}, config={"model_type": "vit"}
    )
    with pytest.raises(ConfigError, match="chat template of the model is malformed"):
        load(folder, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def built_for_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of one layer that was built for two ranks."""
    place = tmp_path_factory.mktemp("two")
    folder = write_folder(place / "model", byte_level(), {"eos_token": "<|im_end|>"})
    model_of("llama", vocab_size=VOCABULARY, num_hidden_layers=1).save_pretrained(folder)
    return stored_model(folder, LoadOptions(ranks=2, **SIZES), place / "cache").folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_with_one_other_byte_is_refused_by_name(built_for_two: Path, tmp_path: Path, rank: int):
    folder = shutil.copytree(built_for_two, tmp_path / "built")
    name = f"weights/rank{rank}.safetensors"
    with (folder / "artifacts" / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises((ArtifactError, RendezvousError), match=f"{name} was altered"):
        load(folder)


def test_files_that_were_opened_ahead_are_closed_where_loading_fails(built_for_two: Path):
    stored = StoredModel.open(built_for_two)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ImportError), stored.verifying(0) as opened:
        assert opened is not None and set(os.listdir("/proc/self/fd")) > before
        raise ImportError
    with stored.verifying(2) as opened:
        assert opened is None  # there is no such rank, which loading says
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_model_that_was_built_is_served_without_what_planning_needs(built_for_two: Path):
    code = """
import sys
from hidet_dist.cli import main
try:
    main()
finally:
    print("loaded", sorted(name for name in sys.modules if name.split(".")[0] == "hidet_dist" or "." not in name))
"""
    command = [sys.executable, "-c", code, "generate", str(built_for_two), "a prompt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ast.literal_eval(done.stdout.splitlines()[-1].removeprefix("loaded "))
    assert "hidet_dist.llm.engine" in loaded and "numpy" in loaded
    heavy = {"hidet", "torch", "transformers", "tokenizers", "jinja2", "pydantic", "rich", "pulp", "highspy"}
    planning = {f"hidet_dist.{name}" for name in ("api", "search", "rules", "machine", "options", "spec.plan")}
    assert not (heavy | planning) & set(loaded)


def test_a_rank_that_dies_ends_open_requests_and_is_told_of(built_for_two: Path):
    model = load(built_for_two)
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


@pytest.mark.slow
def test_a_model_is_served_over_ranks_of_two_hosts(tmp_path: Path):
    """Two hosts, both this one, each with a cache of its own: a rank each, which meet by TCP."""
    httpx = pytest.importorskip("httpx")
    from hidet_dist.llm.server.answers import token_text

    folder = checkpoint(tmp_path / "model", "llama")
    env = {**os.environ, "HIDET_DIST_SECRET": "s" * 32}
    rendezvous = f"127.0.0.1:{free_port()}"

    def started(number: int) -> subprocess.Popen[str]:
        given = [str(folder), "-n", "1", "--context", "128", "--cache", str(tmp_path / f"cache{number}")]
        hosts = ["--nnodes", "2", "--node-rank", str(number), "--rdzv", rendezvous, "--timeout", "300"]
        command = [sys.executable, "-m", "hidet_dist.cli", "serve", *given, *hosts, "--port", "0"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)

    first, second = started(0), started(1)
    try:
        assert first.stdout is not None
        url = first.stdout.readline().split()[-1]
        end = time.monotonic() + 600
        while httpx.get(f"{url}/health", timeout=60).status_code != 200:
            assert time.monotonic() < end and first.poll() is None and second.poll() is None
            time.sleep(0.2)
        prompt = prompts()[1]
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "logprobs": 0}, timeout=60).json()
        tokenizer = CheckpointTokenizer.of_folder(folder)
        expected = [token_text(tokenizer, token) for token in generated("llama", prompt)[:12]]
        assert answer["choices"][0]["logprobs"]["tokens"] == expected
        first.send_signal(signal.SIGTERM)
        assert (first.wait(60), second.wait(60)) == (0, 0)
    finally:
        for process in (first, second):
            process.kill()
            process.wait(60)


@pytest.mark.parametrize(
    ("hosts", "ranks", "said"),
    [
        (Hosts(2), 2, "--node-rank is missing"),
        (Hosts(2, 1), 2, "--rdzv is missing"),
        (Hosts(2, 1, "10.0.0.1"), 2, "an address and a port"),
        (Hosts(2, 1, "10.0.0.1:29500"), 3, "each has equally many"),
        (Hosts(1, 1), 2, "there is one host"),
    ],
)
def test_hosts_that_are_not_described_in_whole_are_refused(
    hosts: Hosts, ranks: int, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HIDET_DIST_SECRET", "s" * 32)
    with pytest.raises(ConfigError, match=said):
        hosts.place(ranks)
    monkeypatch.delenv("HIDET_DIST_SECRET")
    with pytest.raises(ConfigError, match=r"share a secret|node-rank|rdzv|one host"):
        hosts.place(ranks)


def test_rank_0_is_on_host_0_alone():
    with pytest.raises(ConfigError, match="Call join here"):
        load("nowhere", hosts=Hosts(2, 1, "10.0.0.1:29500"))
    with pytest.raises(ConfigError, match="call load here"):
        join("nowhere", Hosts())
