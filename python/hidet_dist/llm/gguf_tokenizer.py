"""The tokenizer in the metadata of a GGUF file, as one of the ``tokenizers`` library."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import WeightsError
from hidet_dist.limits import MOST_TOKEN_CHARACTERS
from hidet_dist.llm.tokenizer import SPACE, CheckpointTokenizer
from hidet_dist.weights.gguf_file import GgufFile

_KINDS = ("gpt2", "llama")  # byte-level BPE, and SentencePiece's BPE

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of ways to split text that are GPT-2's after each digit was split off (llama.cpp, ``llama-vocab.cpp``)."""
_AS_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion")
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "tekken",
)
"""Names of those with which a word of the vocabulary is one token, whatever the merges give."""
_BEGIN_BY_DEFAULT = tuple(name for name in _WHOLE_WORDS if name != "tekken")

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(file: GgufFile) -> CheckpointTokenizer:
    """Make the tokenizer that a file describes.

    Raises
    ------
    WeightsError
        When the file describes none, or one of a kind or with a way to split text that is not known; when its lists do
        not fit together, or name tokens that are none.
    """
    tokens = file.value("tokenizer.ggml.tokens", list, [])
    kind = file.value("tokenizer.ggml.model", str)
    split = file.value("tokenizer.ggml.pre", str)
    if kind not in _KINDS or not tokens:
        raise WeightsError(
            f"{file.path} has {len(tokens)} tokens for a tokenizer of the kind {shown(kind)}; those that are read are "
            f"{' and '.join(_KINDS)}."
        )
    _check_lists(file, tokens)
    mapping = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = {*mapping.GGUF_PRE_TOKENIZER_SPLITS, *_DIGITS_APART, *_AS_GPT2}
    if kind == "gpt2" and split not in known:
        raise WeightsError(
            f"{file.path}: tokenizer.ggml.pre is {shown(split)}, and this way to split a text is not known; those that "
            f"are known are {', '.join(sorted(known))}."
        )
    try:
        library = _byte_level(file, mapping, split) if kind == "gpt2" else _sentence_piece(file, mapping)
    except (KeyboardInterrupt, SystemExit, MemoryError, WeightsError):
        raise
    except BaseException as error:  # whatever lists that contradict each other lead to; the library panics, too
        raise WeightsError(f"{file.path} has no tokenizer that can be made: {shown(str(error))}.") from error
    begins = file.value("tokenizer.ggml.add_bos_token", bool, kind == "llama" or split in _BEGIN_BY_DEFAULT)
    ends = file.value("tokenizer.ggml.add_eos_token", bool, False)
    _surround(file, library, tokens, begins, ends)
    texts = {name: tokens[number] for name, key in _SPECIALS.items() if (number := _id(file, key)) is not None}
    end = {number for key in _ENDS if (number := _id(file, key)) is not None}
    template = file.value("tokenizer.chat_template", str)
    return CheckpointTokenizer(library.to_str(), texts, end, template, str(file.path))


def _byte_level(file: GgufFile, mapping: Any, split: str) -> Any:
    """Make a tokenizer of byte-level BPE, which splits a text in a known way before tokens are merged.

    transformers' own conversion adds a token to vocabularies that lack GPT-2's, and splits as GPT-2 for names that it
    does not know.
    """
    library = importlib.import_module("tokenizers")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    merges = [(merge[: (at := merge.index(" ", 1))], merge[at + 1 :]) for merge in _list(file, "merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = library.models.BPE(vocabulary, merges, ignore_merges=split in _WHOLE_WORDS)
    tokenizer = library.Tokenizer(model)
    byte_level = library.pre_tokenizers.ByteLevel
    if split in _DIGITS_APART:
        steps = [library.pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
    elif split in _AS_GPT2:
        steps = [byte_level(add_prefix_space=False)]
    else:
        pattern = library.Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[split])
        isolated = library.pre_tokenizers.Split(pattern, behavior="isolated")
        steps = [isolated, byte_level(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    for token, kind in zip(tokens, _list(file, "token_type"), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([library.AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _sentence_piece(file: GgufFile, mapping: Any) -> Any:
    """Make a tokenizer of SentencePiece's BPE, whose merges transformers recovers from scores.

    Raises
    ------
    WeightsError
        When transformers adds tokens that the file does not have.
    """
    keys = {f"tokenizer.{key}": name for key, name in mapping.GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    values = {name: value for key, name in keys.items() if (value := file.metadata.get(key)) is not None}
    tokenizer, _ = mapping.convert_gguf_tokenizer(file.metadata["general.architecture"], values)
    if extra := set(tokenizer.get_vocab(with_added_tokens=True)) - set(values["tokens"]) - _respelled(values["tokens"]):
        raise WeightsError(
            f"{file.path} lacks the tokens {', '.join(sorted(extra))}, which SentencePiece's vocabularies have."
        )
    if not file.value("tokenizer.ggml.add_space_prefix", bool, True) and tokenizer.normalizer is None:
        tokenizer.pre_tokenizer = importlib.import_module("tokenizers.pre_tokenizers").Metaspace(
            prepend_scheme="never", split=False
        )
    return tokenizer


def _respelled(tokens: Sequence[str]) -> set[str]:
    """Collect tokens of spaces as SentencePiece writes them; some files have them as they are."""
    return {SPACE * len(token) for token in tokens if token and not token.strip(" ")}


def _list(file: GgufFile, name: str) -> list[Any]:
    values: list[Any] = file.value(f"tokenizer.ggml.{name}", list, [])
    return values


def _check_lists(file: GgufFile, tokens: list[Any]) -> None:
    """Raise WeightsError unless the lists of a tokenizer are of texts and numbers, an entry a token."""
    for key, kind in (("tokens", str), ("merges", str), ("scores", float), ("token_type", int)):
        values = file.value(f"tokenizer.ggml.{key}", list)
        if values is None:
            continue
        is_wrong = not all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
        if is_wrong or (key != "merges" and len(values) != len(tokens)):
            raise WeightsError(
                f"{file.path}: tokenizer.ggml.{key} must be a list of {kind.__name__}, an entry for each of the "
                f"{len(tokens)} tokens; it has {len(values)}."
            )
        if key == "merges" and not all(0 < merge.find(" ", 1) < len(merge) - 1 for merge in values):
            raise WeightsError(f"{file.path}: tokenizer.ggml.merges must have two tokens with a space between in each.")
    if sum(len(token) ** 2 for token in tokens) > MOST_TOKEN_CHARACTERS:
        raise WeightsError(
            f"{file.path}: tokenizer.ggml.tokens has tokens of up to {max(map(len, tokens))} characters; the squares "
            f"of their lengths may add up to {MOST_TOKEN_CHARACTERS}."
        )
    if len(set(tokens)) != len(tokens):
        raise WeightsError(f"{file.path}: tokenizer.ggml.tokens has a token twice.")


def _id(file: GgufFile, name: str) -> int | None:
    """Return the number of a special token, or None. Raises WeightsError if it is no token."""
    number = file.value(f"tokenizer.ggml.{name}_token_id", int)
    count = len(file.metadata["tokenizer.ggml.tokens"])
    if number is not None and not is_whole(number, 0, count - 1):
        raise WeightsError(f"{file.path}: tokenizer.ggml.{name}_token_id is {number}, and there are {count} tokens.")
    return number


def _surround(file: GgufFile, library: Any, tokens: list[str], begins: bool, ends: bool) -> None:
    """Have a text begin and end with special tokens. Raises WeightsError if the file names none."""
    processors = importlib.import_module("tokenizers.processors")
    form, used = ["$A"], []
    for is_used, name, place in ((begins, "bos", 0), (ends, "eos", 2)):
        if not is_used:
            continue
        number = _id(file, name)
        if number is None:
            raise WeightsError(f"{file.path} adds a token {name} to texts, and has no tokenizer.ggml.{name}_token_id.")
        form.insert(place, name)  # the library would take some tokens' own texts, such as "$A", for something else
        used.append({"id": name, "ids": [number], "tokens": [tokens[number]]})
    library.post_processor = processors.TemplateProcessing(single=form, special_tokens=used)
