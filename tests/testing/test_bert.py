from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import hidet
import numpy as np
import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.testing import bert, minilm

TINY = bert.BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
)


def tiny_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Two sentences of 8 tokens, the second with 3 of padding."""
    random = np.random.default_rng(1)
    input_ids = random.integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)
    attention_mask = np.array([[1] * 8, [1] * 5 + [0] * 3], dtype=np.float32)
    return input_ids, attention_mask


def minilm_dir() -> Path:
    """The folder of the packaged model, or a skip."""
    pytest.importorskip(minilm.PACKAGE)
    return minilm.minilm_dir()


@pytest.mark.slow
def test_hidet_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    weights = bert.random_weights(TINY, seed=3)
    peer = transformers.BertModel(transformers.BertConfig(**asdict(TINY)), add_pooling_layer=False).eval()
    peer.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=True)
    input_ids, attention_mask = tiny_inputs()

    graph = bert.trace(bert.random_bert(TINY, seed=3), batch=2, seq=8)
    actual = graph(hidet.asarray(input_ids), hidet.asarray(attention_mask)).numpy()

    encoder = minilm.SentenceEncoder(peer)
    tokens = {"input_ids": input_ids.astype(np.int64), "attention_mask": attention_mask.astype(np.int64)}
    expected = minilm.embed(encoder, tokens)
    assert actual.shape == (2, TINY.hidden_size)
    assert np.abs(actual - expected).max() < 1e-4
    # Padding must not count: an embedding that ignored the mask would be far off.
    unmasked = minilm.embed(encoder, tokens | {"attention_mask": np.ones_like(tokens["attention_mask"])})
    assert np.abs(actual[1] - unmasked[1]).max() > 1e-2


def test_random_weights_follow_the_seed() -> None:
    first, again, other = (bert.random_weights(TINY, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_graph_is_of_separate_operators_on_constants() -> None:
    graph = bert.trace(bert.random_bert(TINY, seed=0), batch=2, seq=8)
    count = Counter(type(node).__name__ for node in graph.nodes)
    layers = TINY.num_hidden_layers
    assert count["TakeOp"] == 1
    assert count["MatmulOp"] == 8 * layers
    assert count["NormalizeOp"] == 2 * layers + 1
    assert count["ReduceMaxOp"] == count["ExpOp"] == count["GeluOp"] == layers
    assert count["PermuteDimsOp"] == 4 * layers  # q, k, v and the context: none of a weight
    assert [(x.dtype.name, list(x.shape)) for x in graph.inputs] == [("int32", [2, 8]), ("float32", [2, 8])]
    assert [(x.dtype.name, list(x.shape)) for x in graph.outputs] == [("float32", [2, 32])]


def test_minilm_loads_every_weight_once() -> None:
    model, config = bert.load_minilm(minilm_dir())
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (6, 384, 30522)
    # 5 of the embeddings, 16 a layer; and of the published 22.7 million less the pooler and the row of token type 1.
    parameters = dict(model.named_parameters())
    per_layer = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    embeddings = (30522 + 512 + 1 + 2) * 384
    assert len(parameters) == 5 + 16 * 6
    assert sum(x.numpy().size for x in parameters.values()) == embeddings + 6 * per_layer

    graph = bert.trace(model, batch=2, seq=32)
    assert bert.weight_bytes(graph) == 4 * (embeddings - (512 - 32) * 384 + 6 * per_layer)


def test_minilm_linear_weights_are_in_by_out() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = minilm_dir()
    stored = safetensors.load_file(folder / "model.safetensors")
    model, _ = bert.load_minilm(folder)
    up = dict(model.named_parameters())["layers.5.up.weight"].numpy()
    assert up.shape == (384, 1536)
    assert np.array_equal(up, stored["encoder.layer.5.intermediate.dense.weight"].T)


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        replace(TINY, num_attention_heads=5)
    with pytest.raises(ConfigError, match="num_hidden_layers must be positive"):
        replace(TINY, num_hidden_layers=0)
    with pytest.raises(ConfigError, match="17 tokens is longer than the 16 positions"):
        bert.trace(bert.random_bert(TINY, seed=0), batch=1, seq=17)

    weights = bert.random_weights(TINY, seed=0)
    with pytest.raises(ConfigError, match=r"shape \(50, 32\).*\(51, 32\)"):
        bert.BertEncoder(replace(TINY, vocab_size=51), weights)
    del weights["encoder.layer.1.output.dense.bias"]
    with pytest.raises(ConfigError, match=r"no weight 'encoder\.layer\.1\.output\.dense\.bias'"):
        bert.BertEncoder(TINY, weights)

    path = tmp_path / "config.json"
    path.write_text(json.dumps(asdict(TINY) | {"hidden_act": "relu"}))
    with pytest.raises(ConfigError, match="hidden_act is 'relu'"):
        bert.BertConfig.from_json(path)
    path.write_text(json.dumps({"vocab_size": 3}))
    with pytest.raises(ConfigError, match="hidden_size"):
        bert.BertConfig.from_json(path)
    path.write_text(json.dumps(asdict(TINY)))
    assert bert.BertConfig.from_json(path) == TINY
