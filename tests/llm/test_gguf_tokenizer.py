"""Tokenizers in the metadata of GGUF files: those that they were made of, and metadata that contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.llm.gguf_made import add
from tests.llm.tokenizers_made import TEXTS, byte_level, sentence_piece
from tokenizers import pre_tokenizers

from hidet_dist.errors import HidetDistError
from hidet_dist.llm.gguf_tokenizer import tokenizer_of
from hidet_dist.llm.tokenizer import CheckpointTokenizer
from hidet_dist.weights.gguf_file import GgufFile


def metadata_of(tokenizer: Any, kind: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer."""
    form = json.loads(tokenizer.to_str())
    added = {entry["id"]: entry for entry in form["added_tokens"]}
    vocabulary = {**form["model"]["vocab"], **{entry["content"]: number for number, entry in added.items()}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [
        (3 if added[n]["special"] else 4) if n in added else 6 if t[:3] == "<0x" else 1 for n, t in enumerate(tokens)
    ]
    metadata = {"model": kind, "tokens": tokens, "token_type": types, "bos_token_id": 1, "eos_token_id": 2}
    merges = [tuple(merge) for merge in form["model"]["merges"]]
    if kind == "llama":
        scores = {"".join(merge): -float(number) for number, merge in enumerate(merges)}
        metadata["scores"] = [scores.get(token, -1000.0) for token in tokens]
    else:
        metadata["merges"] = [" ".join(merge) for merge in merges]
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def read(path: Path, metadata: dict[str, Any]) -> CheckpointTokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizer_of(GgufFile.open(path))


def test_a_byte_level_tokenizer_splits_digits_as_its_file_says(tmp_path: Path):
    made = byte_level()
    metadata = metadata_of(made, "gpt2")
    plain = read(tmp_path / "a.gguf", {**metadata, "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": "x"})
    for text in (*TEXTS, "a <|im_start|>b <think>"):
        assert plain.encode(text) == made.encode(text).ids
        assert plain.decode(plain.encode(text)) == text
    assert plain.end == {2} and plain.special == {0, 1, 2}
    assert plain.chat_template == "x"
    assert plain.special_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert len(plain.encode(" 1234")) == 1
    apart = read(tmp_path / "b.gguf", {**metadata, "tokenizer.ggml.pre": "smollm"})
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert apart.encode(text) == made.encode(text).ids
    assert len(apart.encode(" 1234")) == 5
    first = read(tmp_path / "c.gguf", {**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert first.encode("dog")[0] == 1 and first.encode("dog", special=False)[0] != 1


def test_a_sentence_piece_tokenizer_is_the_one_it_was_made_of(tmp_path: Path):
    made = sentence_piece()
    ours = read(tmp_path / "a.gguf", metadata_of(made, "llama"))
    for text in TEXTS:
        assert ours.encode(text) == made.encode(text).ids
        assert ours.decode(ours.encode(text, special=False)) == text
    assert ours.encode("the")[0] == 1
    bare = read(tmp_path / "b.gguf", {**metadata_of(made, "llama"), "tokenizer.ggml.add_space_prefix": False})
    assert bare.piece(bare.encode("the", special=False)[0]) == b"t"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"pre": "some-bpe"}, "tokenizer.ggml.pre is 'some-bpe'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "has 0 tokens"),
        ({"tokens": ["a", "a"]}, "must be a list of int"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
        ({"tokens": [1, 2]}, "must be a list of str"),
        ({"merges": ["ab"]}, "two tokens with a space"),
        ({"merges": ["never seen"]}, "no tokenizer that can be made"),
        ({"eos_token_id": 100000}, "there are"),
        ({"eos_token_id": -1}, "there are|type"),
        ({"add_bos_token": True, "bos_token_id": None}, "has no tokenizer.ggml.bos_token_id"),
        ({"eos_token_id": "x"}, "must be of type int"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    metadata = {**metadata_of(byte_level(), "gpt2"), "tokenizer.ggml.pre": "gpt-2"}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(HidetDistError, match=said):
        read(tmp_path / "a.gguf", metadata)
