"""One way to run a model, as a process: it computes what it is told on its standard input, and says how long it took.

    python -m benchmarks.generation.worker WAY FILE --threads 2 --precision float32 ...

Lines in are JSON lists: ``["prefill", TOKENS]`` and ``["decode", SEQUENCES, PROMPT, NEW]``. Lines out are JSON objects
with ``seconds``, and with ``tokens`` where tokens were generated in this time. The first line out says that the first
token of a short prompt was computed. Prompts differ from call to call, so that nothing of an earlier one is reused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

FIRST_PROMPT = 8  # tokens
CONTEXT, SEQUENCES = 2048, 8


class Way(Protocol):
    """One way to run a model."""

    def prefill(self, prompt: list[int]) -> float:
        """Compute a prompt up to its next token; return the seconds."""

    def decode(self, prompts: list[list[int]], count: int) -> tuple[float, int]:
        """Compute prompts together, then ``count`` more tokens of each; return the seconds of these, and how many."""


class Ours:
    """hidet_dist's engine."""

    def close(self) -> None:
        self._engine.close()

    def __init__(self, file: str, given: argparse.Namespace):
        os.environ["OMP_NUM_THREADS"] = str(given.threads)
        from hidet_dist.llm import load
        from hidet_dist.llm.engine import Engine

        precision: dict[str, dict[str, Any]] = {
            "float32": {},
            "float16": {"weights": {"precision": "float16"}},
            "bfloat16": {"precision": "bfloat16"},
            "int4": {"weights": {"precision": "stored"}},  # the file's own 4 bits, as the others read them
        }
        self._model = load(
            file,
            ranks=given.ranks,
            context=CONTEXT,
            sequences=SEQUENCES,
            step_tokens=1024,
            cached_tokens=SEQUENCES * 512 + CONTEXT,
            optimization=precision[given.precision],
        )
        self._engine = Engine(self._model, self._model.tokenizer)

    def _run(self, prompts: list[list[int]], count: int) -> list[Any]:
        from hidet_dist.llm.engine import Request, Sampling

        greedy = Sampling(temperature=0)
        requests = [Request(tuple(prompt), count, ignore_end=True, sampling=greedy) for prompt in prompts]
        streams = [self._engine.submit(request) for request in requests]
        for stream in streams:
            stream.answers()
        return streams

    def prefill(self, prompt: list[int]) -> float:
        begin = time.monotonic()
        (stream,) = self._run([prompt], 1)
        return float(stream.first - begin)

    def decode(self, prompts: list[list[int]], count: int) -> tuple[float, int]:
        streams = self._run(prompts, count + 1)
        first = max(stream.first for stream in streams)
        return max(stream.ended for stream in streams) - first, count * len(prompts)


class LlamaCpp:
    """llama.cpp, by its C interface."""

    def __init__(self, file: str, given: argparse.Namespace):
        import ctypes

        import llama_cpp

        self._api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_load_model_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = SEQUENCES * 512, SEQUENCES
        params.n_batch, params.n_threads, params.n_threads_batch = CONTEXT, given.threads, given.threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self._context = llama_cpp.llama_new_context_with_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp made no context.")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)

    def _step(self, tokens: list[list[int]], begin: int) -> list[int]:
        """Compute tokens of each sequence from a position on, and return the most probable next ones."""
        import numpy as np

        batch, last = self._batch, []
        count = 0
        for sequence, own in enumerate(tokens):
            for position, token in enumerate(own, begin):
                batch.token[count], batch.pos[count] = token, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = position == begin + len(own) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if self._api.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama.cpp computed no step.")
        return [
            int(np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, one), (self._vocabulary,)).argmax())
            for one in last
        ]

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def prefill(self, prompt: list[int]) -> float:
        self._clear()
        begin = time.monotonic()
        self._step([prompt], 0)
        return time.monotonic() - begin

    def decode(self, prompts: list[list[int]], count: int) -> tuple[float, int]:
        self._clear()
        tokens = self._step(prompts, 0)
        begin = time.monotonic()
        for position in range(len(prompts[0]), len(prompts[0]) + count):
            tokens = self._step([[token] for token in tokens], position)
        return time.monotonic() - begin, count * len(prompts)


class OpenVino:
    """OpenVINO GenAI, which reads the file and computes as it chooses to."""

    def __init__(self, file: str, given: argparse.Namespace):
        import openvino_genai

        properties = {"INFERENCE_NUM_THREADS": given.threads}
        if given.precision == "float32":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipeline = openvino_genai.LLMPipeline(file, "CPU", **properties)
        self._genai = openvino_genai

    def _run(self, prompts: list[list[int]], count: int) -> Any:
        import numpy as np
        import openvino

        ids = openvino.Tensor(np.array(prompts, np.int64))
        config = self._genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        mask = openvino.Tensor(np.ones((len(prompts), len(prompts[0])), np.int64))
        return self._pipeline.generate(self._genai.TokenizedInputs(ids, mask), config).perf_metrics

    def prefill(self, prompt: list[int]) -> float:
        begin = time.monotonic()
        self._run([prompt], 1)
        return time.monotonic() - begin

    def decode(self, prompts: list[list[int]], count: int) -> tuple[float, int]:
        metrics = self._run(prompts, count + 1)
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
        return seconds, count * len(prompts)


class Transformers:
    """transformers, with PyTorch's eager operators."""

    def __init__(self, file: str, given: argparse.Namespace):
        import torch
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        from hidet_dist.llm.checkpoint import Checkpoint

        torch.set_num_threads(given.threads)
        self._torch = torch
        module, _ = Checkpoint.open(file).module("float32")
        weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=module)["tensors"]
        module.load_state_dict(weights, strict=False, assign=True)
        module.tie_weights()
        self._module = module.eval()

    def _step(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            out = self._module(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), out.past_key_values

    def prefill(self, prompt: list[int]) -> float:
        begin = time.monotonic()
        self._step(self._torch.tensor([prompt]), None)
        return time.monotonic() - begin

    def decode(self, prompts: list[list[int]], count: int) -> tuple[float, int]:
        tokens, cache = self._step(self._torch.tensor(prompts), None)
        begin = time.monotonic()
        for _ in range(count):
            tokens, cache = self._step(tokens, cache)
        return time.monotonic() - begin, count * len(prompts)


WAYS: dict[str, Callable[[str, argparse.Namespace], Way]] = {
    "ours": Ours,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "transformers": Transformers,
}


def main() -> None:
    """Load, and compute what is asked for until the standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    given = parser.parse_args()
    # Libraries print to the standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    number = 0

    def prompt(length: int) -> list[int]:
        nonlocal number
        number += 1
        return [1000 + (7919 * number + 104729 * place) % 40000 for place in range(length)]

    way = WAYS[given.way](given.file, given)
    print(json.dumps({"seconds": way.prefill(prompt(FIRST_PROMPT))}), file=answers)
    for line in sys.stdin:
        what, *sizes = json.loads(line)
        if what == "prefill":
            told: dict[str, Any] = {"seconds": way.prefill(prompt(sizes[0]))}
        else:
            sequences, length, count = sizes
            seconds, tokens = way.decode([prompt(length) for _ in range(sequences)], count)
            told = {"seconds": seconds, "tokens": tokens}
        print(json.dumps(told), file=answers)
    if isinstance(way, Ours):
        way.close()
    os._exit(0)  # without the ends of other libraries


if __name__ == "__main__":
    main()
