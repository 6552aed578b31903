"""Tokenizers of checkpoints: texts, pieces of text, special tokens, and files that are malformed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.llm.tokenizers_made import TEXTS, byte_level, sentence_piece, write_folder

from hidet_dist.errors import ConfigError, InputError
from hidet_dist.llm.tokenizer import CheckpointTokenizer

END = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "auto_map": {"AutoTokenizer": "x.Y"}}


MAPPED = json.loads(byte_level().to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path,
        byte_level(),
        {**END, "chat_template": "{{ messages[0].content }}"},
        config={"eos_token_id": 0},
    )


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_pieces_joined_are_the_text(tmp_path: Path, make):
    tokenizer = CheckpointTokenizer.of_folder(write_folder(tmp_path, make(), {}))
    for text in (*TEXTS, "🙂é\n\n  x <|im_start|><think>"):
        tokens = tokenizer.encode(text, special=False)
        joined = b"".join(tokenizer.piece(token) for token in tokens).decode()
        assert joined.removeprefix(" ") == text
        assert tokenizer.decode(tokens) == text
        assert all(token < tokenizer.vocabulary for token in tokens)
    assert tokenizer.piece(tokenizer.vocabulary) == b""


def test_special_tokens_begin_a_text_and_are_left_out_where_asked(tmp_path: Path):
    tokenizer = CheckpointTokenizer.of_folder(write_folder(tmp_path, sentence_piece(), {"eos_token": "</s>"}))
    tokens = tokenizer.encode("the dog")
    assert tokens[0] == tokenizer.token("<s>") and tokens[1:] == tokenizer.encode("the dog", special=False)
    assert tokenizer.decode(tokens, special=False) == "the dog"
    assert tokenizer.decode(tokens).startswith("<s>")
    assert tokenizer.special == {0, 1, 2}
    assert tokenizer.end == {2}


def test_a_folder_says_what_ends_a_text_and_how_a_chat_is_written(folder: Path):
    tokenizer = CheckpointTokenizer.of_folder(folder)
    assert tokenizer.end == {0, tokenizer.token("<|im_end|>")}
    assert tokenizer.special_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "chat_template.jinja").write_text("other")
    tokenizer = CheckpointTokenizer.of_folder(folder)
    assert tokenizer.end == {1, 2}
    assert tokenizer.chat_template == "other"


def test_a_tokenizer_that_is_saved_is_read_as_it_was(folder: Path, tmp_path: Path):
    tokenizer = CheckpointTokenizer.of_folder(folder)
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    copy = CheckpointTokenizer.of_folder(tmp_path / "copy")
    for name in ("end", "special", "special_texts", "chat_template", "vocabulary"):
        assert getattr(copy, name) == getattr(tokenizer, name)
    assert copy.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "not a tokenizer that can be read"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}}}', "not a tokenizer"),
        ("tokenizer.json", "[" * 10000, "tokenizer"),
        # The library makes room for as many nodes as the data's first bytes say, and ends its process.
        ("tokenizer.json", json.dumps(MAPPED), "takes more than"),
        ("tokenizer_config.json", "[]", "must be a JSON object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "other", "template": "x"}]}', "named 'default'"),
        ("config.json", '{"eos_token_id": "2"}', "eos_token_id must be a whole number"),
        ("config.json", '{"eos_token_id": 100000}', "token 100000, which is to end texts, is none"),
    ],
)
def test_malformed_files_are_refused(folder: Path, name: str, content: str, said: str):
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        CheckpointTokenizer.of_folder(folder)


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def chained(name: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": chained("normalizers", [replaced({"String": "q"}, "q" * 1000)] * 9)},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(q+q+)+x"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["chained", "backtracking"],
)
def test_a_text_that_takes_too_much_is_refused_and_others_are_not(folder: Path, changed: dict[str, Any]):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    tokenizer = CheckpointTokenizer.of_folder(folder)
    with pytest.raises(InputError, match=r"does not take 2000 characters: .*(memory|processor time|retry-limit)"):
        tokenizer.encode("q" * 2000)
    assert tokenizer.encode("") == []


def test_tokens_whose_text_takes_too_much_are_refused(tmp_path: Path):
    file = write_folder(tmp_path, sentence_piece(), {}) / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["decoder"]["decoders"] += [replaced({"String": "q"}, "q" * 1000)] * 9
    file.write_text(json.dumps(fields))
    tokenizer = CheckpointTokenizer.of_folder(tmp_path)
    with pytest.raises(InputError, match=r"does not take 4 tokens: .*(memory|processor time)"):
        tokenizer.decode(tokenizer.encode("qqqq", special=False))
    assert tokenizer.decode(tokenizer.encode("dog", special=False)) == "dog"


def test_tokens_beyond_any_context_are_not_listed(folder: Path):
    """Each token of a template may stand for many, and a template may have many of them."""
    many = {"id": "x", "ids": [1] * 4096, "tokens": ["x"] * 4096}
    file = folder / "tokenizer.json"
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 4096,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"x": many},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    tokenizer = CheckpointTokenizer.of_folder(folder)
    with pytest.raises(InputError, match=r"does not take 1 characters: .*(memory|processor time|tokens)"):
        tokenizer.encode("a")
    assert tokenizer.encode("a", special=False) == []  # the template leaves the text out


def test_a_folder_without_a_tokenizer_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"AutoTokenizer\.from_pretrained"):
        CheckpointTokenizer.of_folder(tmp_path)


def test_a_decoder_whose_pieces_are_not_known_is_refused(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.decoder = importlib.import_module("tokenizers").decoders.CTC()
    with pytest.raises(ConfigError, match="decoder of the types"):
        CheckpointTokenizer.of_folder(write_folder(tmp_path, tokenizer, {}))


def test_pieces_of_words_have_a_space_in_front_where_they_begin_one(tmp_path: Path):
    library = importlib.import_module("tokenizers")
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3}
    words = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.decoder = library.decoders.WordPiece()
    tokenizer = CheckpointTokenizer.of_folder(write_folder(tmp_path, words, {"unk_token": "[UNK]"}))
    tokens = tokenizer.encode("a playing")
    assert tokens == [3, 1, 2]
    assert b"".join(map(tokenizer.piece, tokens)) == b" a playing"
