"""Programs of others that test servers: schemathesis, lm-eval and guidellm. Offline, on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.llm.serving_command import serving
from tests.llm.test_load import checkpoint, made
from tests.llm.test_serving import Server, server, wait_for
from tests.llm.tokenizers_made import byte_level, write_folder

from hidet_dist.limits import MOST_BODY_BYTES
from hidet_dist.llm.tokenizer import CheckpointTokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The dog", "choices": ["jumps over", "is lazy", "naive cafe"], "gold": 0},
    {"question": "A quick brown", "choices": ["fox", "times", "1234"], "gold": 0},
    {"question": "tabs and", "choices": ["lines.", "emoji"], "gold": 1},
]
TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} and the lazy dog."
metric_list: [{metric: bits_per_byte}]
""",
    "own_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: `make slow-test` does it")


def run(*command: str, seconds: int = 900, **given: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=OFFLINE, **given)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_what_schemathesis_makes_of_the_interface_gives_no_server_error_and_the_forms_that_it_says(tmp_path: Path):
    """All its checks but one: which texts and numbers go together, a schema does not say, and they may be refused."""
    needs("schemathesis")
    with server(queue=256, context=128) as made_server:
        told = run(
            *(program("schemathesis"), "run", f"{made_server.url}/openapi.json", "--checks", "all"),
            *("--exclude-checks", "positive_data_acceptance", "--max-examples", "60", "--seed", "1"),
            *("--request-timeout", "120", "--no-color"),
            cwd=tmp_path,
        )
        assert "9 selected / 9 total" in told and "passed" in told
        metrics = made_server.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["pages_used"]) == (0, 0, 0)
        assert metrics['responses_total{path="/v1/completions",status="200"}'] > 0


STREAMS = (1, 4, 16, 64)
SECONDS_EACH = 15


class Disturbers:
    """Clients that leave, that read slowly, and whose bodies are malformed or too large, until they are stopped."""

    def __init__(self, made_server: Server):
        self.counts = dict.fromkeys(("leaves", "slow", "malformed", "large"), 0)
        self.wrong: list[str] = []
        self._server = made_server
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._disturb, args=(kind,), daemon=True) for kind in self.counts]

    def __enter__(self) -> Disturbers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)

    def _disturb(self, kind: str) -> None:
        body = {"model": "tiny", "prompt": "over and over", "max_tokens": 100, "stream": True, "ignore_eos": True}
        # One that reads slowly has an answer long after it was sent, when the server may close the idle connection.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self._server.url, timeout=120, limits=limits) as client:
            while not self._stopped.wait(0.02):
                if kind in ("leaves", "slow"):
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        for count, _ in enumerate(answer.iter_lines()):
                            if kind == "leaves" and count > 7:
                                break
                            time.sleep(0.02 if kind == "slow" else 0)
                    status, expected = answer.status_code, 200
                else:
                    content = b'{"model": "tiny", ' if kind == "malformed" else b'"' + b"x" * MOST_BODY_BYTES + b'"'
                    headers = {"content-type": "application/json"}
                    try:
                        status = client.post("/v1/completions", content=content, headers=headers).status_code
                    except httpx.WriteError:  # the server had answered, and read no more
                        status = 413
                    expected = 400 if kind == "malformed" else 413
                self.counts[kind] += 1
                if status not in (expected, 429):
                    self.wrong.append(f"{kind}: {status}")


def test_under_the_load_of_guidellm_nothing_is_lost_and_memory_is_flat(tmp_path: Path):
    needs("guidellm")
    write_folder(
        tmp_path / "tokenizer", byte_level(), {"eos_token": "<|im_end|>", "tokenizer_class": "TokenizersBackend"}
    )
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"prompt {n % 50} " + "word " * (n % 7), "output_tokens_count": 8 + n % 9}) + "\n"
            for n in range(400)
        )
    )
    with server(queue=512) as made_server, Disturbers(made_server) as others:

        def benchmark(streams: int, seconds: float) -> dict[str, Any]:
            out = tmp_path / f"{streams}.json"
            backend = f"kind=openai_http,target={made_server.url},model=tiny,request_format=/v1/completions"
            run(
                *(program("guidellm"), "run", "--backend", backend, "--profile", f"kind=concurrent,streams={streams}"),
                *("--constraint", f"kind=max_duration,seconds={seconds}", "--data", f"kind=json_file,path={data}"),
                *("--tokenizer", f"kind=hf_auto,model={tmp_path / 'tokenizer'}"),
                *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
                cwd=tmp_path,
            )
            (told,) = json.loads(out.read_text())["benchmarks"]
            totals: dict[str, Any] = told["metrics"]["request_totals"]
            return totals

        benchmark(max(STREAMS), SECONDS_EACH)  # which warms up
        before = made_server.resident_bytes()
        for streams in STREAMS:
            totals = benchmark(streams, SECONDS_EACH)
            assert totals["errored"] == 0 and totals["successful"] > 2 * streams, (streams, totals)
        others.__exit__()
        assert not others.wrong and min(others.counts.values()) > 5, (others.wrong, others.counts)
        wait_for(lambda: made_server.metrics()["running"] == 0)
        metrics = made_server.metrics()
        assert (metrics["waiting"], metrics["pages_used"]) == (0, 0)
        assert made_server.resident_bytes() - before < 32 * 2**20


def log_likelihood(tokens: list[int], begin: int) -> float:
    """The sum of the log-probabilities, by transformers, of the tokens from one on."""
    with torch.no_grad():
        logits = made("llama")(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return float(sum(logits[place - 1, tokens[place]] for place in range(begin, len(tokens))))


def test_evaluations_of_lm_eval_are_those_of_transformers(tmp_path: Path):
    """Choices by likelihood, the likelihood of texts, and answers: each score is computed again by transformers."""
    needs("lm_eval")
    folder = checkpoint(tmp_path / "model", "llama")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (tasks / f"{name}.yaml").write_text(head + text)
    with serving(folder, tmp_path / "cache", "--context", "128") as served:
        model = f"model=model,base_url={served.url}/v1/completions,tokenizer={folder},num_concurrent=4,max_length=127"
        run(
            *(program("lm_eval"), "run", "--model", "local-completions", "--model_args", model),
            *("--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "1"),
            *("--output_path", str(tmp_path / "out"), "--log_samples"),
            cwd=tmp_path,
        )
    tokenizer = CheckpointTokenizer.of_folder(folder)
    samples = {}
    for name in TASKS:
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples[name]) == len(QUESTIONS)
    for sample in samples["own_choice"]:
        for given, told in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            before, whole = (tokenizer.encode(x) for x in (given["arg_0"], given["arg_0"] + given["arg_1"]))
            assert float(told[0]) == pytest.approx(log_likelihood(whole, len(before)), abs=1e-3)
    end = tokenizer.token("<|im_end|>")
    assert end is not None
    for sample in samples["own_text"]:
        tokens = [end, *tokenizer.encode(sample["target"])]  # lm-eval puts the end of a text in front
        assert float(sample["filtered_resps"][0]) == pytest.approx(log_likelihood(tokens, 1), abs=1e-3)
    for sample in samples["own_answer"]:
        prompt = tokenizer.encode(sample["arguments"]["gen_args_0"]["arg_0"])
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = made("llama").generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=end
            )
        kept = [token for token in out[0, len(prompt) :].tolist() if token not in tokenizer.special]
        text = b"".join(map(tokenizer.piece, kept)).decode(errors="replace").partition("\n")[0]
        assert sample["resps"][0][0] == text
