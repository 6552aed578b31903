"""The engine over a random LLaMA of transformers: greedy tokens are those that transformers generates by itself."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.llm.models import Letters

from hidet_dist.llm.engine import Engine, EngineOptions, Request, Sampling
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import StepInputs

pytestmark = pytest.mark.slow  # transformers takes long to import

NAME = "hidet_dist_engine_test"
LETTERS = Letters()
GREEDY = Sampling(temperature=0)


class Pools:
    """A LLaMA over ragged steps: its attention reads and writes pools of rows, in double precision.

    In double precision no two of the largest logits are as near to each other as sums in another order differ.
    """

    def __init__(self, model: Any, sizes: StepSizes):
        self.sizes = sizes
        self._model = model
        config = model.config
        shape = (config.num_hidden_layers, 2, sizes.rows, config.num_key_value_heads, config.head_dim)
        self._pools = torch.full(shape, torch.nan, dtype=torch.float64)  # what nobody wrote must not be read

    def step(self, inputs: StepInputs) -> np.ndarray:
        inputs.check(self.sizes)
        slots, rows, lengths = (torch.from_numpy(x) for x in (inputs.slots, inputs.token_rows(), inputs.lengths))
        unseen = torch.arange(rows.shape[1]) >= lengths[:, None]

        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **others: Any) -> Any:
            keys, values = self._pools[module.layer_idx]
            keys[slots], values[slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
            tokens, groups = len(slots), keys.shape[1]
            q = query[0].transpose(0, 1).reshape(tokens, groups, -1, query.shape[-1])
            scores = torch.einsum("tgrd,tlgd->tgrl", q, keys[rows].masked_fill(unseen[..., None, None], 0)) * scaling
            weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
            y = torch.einsum("tgrl,tlgd->tgrd", weights, values[rows].masked_fill(unseen[..., None, None], 0))
            return y.reshape(1, tokens, -1, query.shape[-1]), None

        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        with torch.no_grad():
            tokens, positions = (torch.from_numpy(x)[None] for x in (inputs.tokens, inputs.positions))
            hidden = self._model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
            return self._model.lm_head(hidden[0, torch.from_numpy(inputs.wanted)]).numpy().astype(np.float32)

    def reset(self) -> None:
        self._pools.fill_(torch.nan)

    def close(self) -> None:
        pass


@functools.cache
def llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attention == NAME:
        ALL_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **others: None)  # each step registers its own
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **others: None)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS.vocabulary,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval().double()


@functools.cache
def generated(prompt: tuple[int, ...], count: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": LETTERS.END, "pad_token_id": 0}
    with torch.no_grad():
        return llama("eager").generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("step_tokens", "pages", "shares"), [(64, 60, True), (5, 60, True), (16, 16, True), (64, 60, False), (3, 14, False)]
)
def test_greedy_tokens_are_those_of_transformers(step_tokens: int, pages: int, shares: bool):
    """Prompts of other lengths join and leave, some share their beginning, and some are cancelled."""
    sizes = StepSizes(LETTERS.vocabulary, context=56, pages=pages, page=4, states=5, tokens=64, shares_prefixes=shares)
    chance = random.Random(5)
    beginning = tuple(chance.randrange(256) for _ in range(11))
    prompts = [
        (*beginning[: chance.choice([0, 9, 11])], *(chance.randrange(256) for _ in range(n))) for n in range(1, 13)
    ]
    model = Pools(llama(NAME), sizes)
    with Engine(model, LETTERS, EngineOptions(step_tokens=step_tokens)) as engine:
        streams = [engine.submit(Request(p, max_tokens=20 + i, sampling=GREEDY)) for i, p in enumerate(prompts)]
        for stream in streams[::4]:
            stream.cancel()
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            if index % 4:
                assert stream.answers()[0].ids == generated(prompt, 20 + index)
        again = engine.submit(Request(prompts[0], max_tokens=20, sampling=GREEDY))
        assert again.answers()[0].ids == generated(prompts[0], 20)
        statistics = engine.statistics()
        assert statistics.pages_used == 0
        assert bool(statistics.shared_tokens) == shares


def test_log_probabilities_of_a_prompt_are_those_of_transformers():
    sizes = StepSizes(LETTERS.vocabulary, context=56, pages=20, page=4, states=5, tokens=8)
    prompt = tuple(range(30, 50))
    with Engine(Pools(llama(NAME), sizes), LETTERS) as engine:
        stream = engine.submit(Request(prompt, max_tokens=0, prompt_logprobs=0))
        stream.answers()
    with torch.no_grad():
        logprobs = llama("eager")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert stream.prompt is not None
    for place, told in enumerate(stream.prompt[1:]):
        assert told.logprob == pytest.approx(float(logprobs[place, prompt[place + 1]]), abs=1e-4)
