"""Logits of a built model: those of a token are the same bits, whatever shares its step, and whatever came before.

A request is made alone, in a full batch, with its prompt in chunks of other sizes, behind a prefix that is found in the
pages, and after others were cancelled or put back. Each logit row of each step is compared with the row that the same
tokens gave in any other step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.llm.test_load import VOCABULARY, checkpoint

from hidet_dist.llm import LanguageModel, load
from hidet_dist.llm.engine import Engine, EngineOptions, Request, Sampling
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs

pytestmark = pytest.mark.slow

SIZES = {"context": 96, "cached_tokens": 384, "page": 4, "step_tokens": 48, "sequences": 8}


class Recorder:
    """A model whose steps are those of another one. It keeps the logits behind each history of tokens, as bytes."""

    def __init__(self, model: LanguageModel):
        self.sizes: StepSizes = model.sizes
        self.seen: dict[tuple[int, ...], bytes] = {}
        self.repeated = 0
        self.shapes: set[tuple[int, int]] = set()
        self._model = model
        self._rows = np.full(model.sizes.rows, -1, np.int64)

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = self._model.step(inputs).copy()
        self._rows[inputs.slots] = inputs.tokens
        rows = inputs.token_rows()
        self.shapes.add((len(inputs.tokens), len(inputs.tables)))
        for index, of_token in zip(inputs.wanted, logits, strict=True):
            history = tuple(self._rows[rows[index, : inputs.lengths[index]]].tolist())
            assert -1 not in history
            bits = of_token.tobytes()
            self.repeated += history in self.seen
            assert self.seen.setdefault(history, bits) == bits, (
                f"{len(history)} tokens gave other logits in a step of {len(inputs.tokens)} tokens of "
                f"{len(inputs.tables)} sequences; they differ by up to "
                f"{np.abs(np.frombuffer(self.seen[history], np.float32) - of_token).max()}"
            )
        return logits

    def reset(self) -> None:
        self._model.reset()

    def close(self) -> None:
        """Leave the model open, for another engine."""


def prompts() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(5)
    begin = tuple(map(int, generator.integers(3, 330, 24)))
    counts = (1, 3, 9, 17, 33, 40, 5)
    return [begin[: min(count // 2, 24)] + tuple(map(int, generator.integers(3, 330, count))) for count in counts]


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"optimization": {"mem_budget": 540_000}}),
        ("gemma3_text", 3, {}),
        ("gpt2", 2, {}),
        ("phi3", 1, {"dtype": "bfloat16"}),
    ],
)
def test_logits_do_not_depend_on_neighbours(tmp_path: Path, kind: str, ranks: int, options: dict):
    folder = checkpoint(tmp_path / "model", kind)
    asked = [
        Request(prompt, max_tokens=12, ignore_end=True, sampling=Sampling(seed=number))
        for number, prompt in enumerate(prompts())
    ]
    with_prompt = [replace(request, prompt_logprobs=0) for request in asked]  # the logits of all their tokens
    with load(folder, ranks=ranks, cache=tmp_path / "cache", **SIZES, **options) as model:
        assert model.sizes.vocabulary == VOCABULARY
        recorder = Recorder(model)
        alone: list[list[int]] = []
        for request in with_prompt:  # each in an engine of its own: nothing is shared
            recorder.reset()
            with Engine(recorder, model.tokenizer) as engine:
                alone.append(engine.submit(request).answers()[0].ids)
        scored = recorder.repeated
        for step_tokens in (48, 7, 1):
            recorder.reset()
            with Engine(recorder, model.tokenizer, EngineOptions(step_tokens=step_tokens)) as engine:
                for turn, requests in enumerate((with_prompt, asked)):  # the second ones are found in the pages
                    streams = [engine.submit(request) for request in requests]
                    cancelled = [engine.submit(Request(prompt[::-1], max_tokens=20)) for prompt in prompts()]
                    for stream in cancelled:
                        stream.cancel()
                    assert [stream.answers()[0].ids for stream in streams] == alone, (step_tokens, turn)
                    assert sum(stream.shared > 0 for stream in streams) >= (5 if turn else 0)
                assert engine.statistics().pages_used == 0
        assert recorder.repeated > scored + 5 * sum(len(ids) for ids in alone)
        assert len(recorder.shapes) > 12
