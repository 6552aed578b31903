"""Tokenizers of checkpoints: of a transformers folder, and of the metadata of a GGUF file.

The ``tokenizers`` library does the work, in a process with bounds of time and memory: a tokenizer is data from outside.
transformers, which takes seconds to import, is not needed for a folder.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError, InputError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_CONFIGURATION_BYTES, MOST_TOKENIZER_BYTES, MOST_TOKENIZER_SECONDS
from hidet_dist.llm.confined import Confined, ExceededError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_CONTINUES = "##"
"""What WordPiece writes in front of a piece that continues a word."""
_BYTES_OF_TOKEN = 6  # characters of a token such as <0x0A>, which is a byte


def tokenizer_process() -> Confined:
    """Make the process of one tokenizer. It may be started before the tokenizer is read."""
    return Confined("hidet_dist.llm.confined.tokenization")


class CheckpointTokenizer:
    """A tokenizer of the ``tokenizers`` library with what a checkpoint says of it.

    Parameters
    ----------
    text: str
        The tokenizer in the library's JSON form, as in ``tokenizer.json``.
    special_texts: mapping
        The texts of special tokens by name: ``bos_token``, ``eos_token`` and the like.
    end: iterable of int
        The tokens that end what a model generates.
    chat_template: str, optional
        The Jinja template that makes a prompt of messages.
    where: str
        What the tokenizer is from, for errors.
    end_text: str, optional
        The text of one more token that ends it; none where the vocabulary has no such token.
    process: Confined, optional
        What :func:`tokenizer_process` made, where it was started ahead.

    Raises
    ------
    ConfigError
        When the library cannot read it, or its decoder is none of byte-level, SentencePiece and WordPiece models, whose
        pieces of text are not known.
    ImportError
        When the library is not installed.
    """

    def __init__(
        self,
        text: str,
        special_texts: Mapping[str, str],
        end: Iterable[int],
        chat_template: str | None = None,
        where: str = "the tokenizer",
        end_text: str | None = None,
        process: Confined | None = None,
    ):
        self._library = _Library(text, process or tokenizer_process())
        try:
            read = self._library.read()
        except (ExceededError, _RefusedError) as error:
            raise ConfigError(f"{where} is not a tokenizer that can be read: {shown(str(error))}.") from error
        self._kind = _kind_of(read["decoders"], where)
        self._tokens: dict[str, int] = dict(zip(read["texts"], read["tokens"], strict=True))
        self._texts: dict[int, str] = dict(zip(read["tokens"], read["texts"], strict=True))
        self._added: dict[int, str] = {token: text for token, text, _ in read["added"]}
        self.special = frozenset(token for token, _, is_special in read["added"] if is_special)
        self.vocabulary = max(self._texts, default=-1) + 1
        self.special_texts: Mapping[str, str] = dict(special_texts)
        self.chat_template = chat_template
        own = None if end_text is None else self.token(end_text)
        self.end = frozenset(end) | ({own} if own is not None else set())
        if wrong := sorted(token for token in self.end if not 0 <= token < self.vocabulary):
            raise ConfigError(
                f"{where} has {self.vocabulary} tokens, and the token {wrong[0]}, which is to end texts, is none."
            )

    @classmethod
    def of_folder(cls, folder: str | Path, process: Confined | None = None) -> CheckpointTokenizer:
        """Read the tokenizer of a transformers folder.

        It is read from ``tokenizer.json``; ``tokenizer_config.json``, ``generation_config.json``, ``config.json`` and
        ``chat_template.jinja`` say the rest, as far as they exist. No code of the folder is run.

        Raises
        ------
        ConfigError
            When there is no ``tokenizer.json``, or a file is malformed or too large.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json: make it with transformers, by "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        text = _text(file, MOST_TOKENIZER_BYTES)
        settings = _fields(folder / "tokenizer_config.json")
        specials = {**_texts_of(_fields(folder / "special_tokens_map.json")), **_texts_of(settings)}
        generation = _fields(folder / "generation_config.json")
        configuration = generation if generation.get("eos_token_id") is not None else _fields(folder / "config.json")
        template = folder / "chat_template.jinja"
        chat = _text(template, MOST_CONFIGURATION_BYTES) if template.is_file() else _template_of(settings, folder)
        end = _ids(configuration.get("eos_token_id"), str(folder))
        return cls(text, specials, end, chat, str(file), specials.get("eos_token"), process)

    def save(self, folder: str | Path) -> None:
        """Write the files from which :meth:`of_folder` reads an equal tokenizer."""
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self._library.text)
        settings = {**self.special_texts, **({"chat_template": self.chat_template} if self.chat_template else {})}
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=1))
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": sorted(self.end)}))

    def token(self, text: str) -> int | None:
        """Return the token that is written as ``text`` in the vocabulary, or None."""
        return self._tokens.get(text)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text. ``special`` adds those that begin (and end) a text, as the files say.

        Raises
        ------
        InputError
            When that takes more time or memory than it may, or the library cannot do it.
        """
        tokens: list[int] = self._asked({"text": text, "special": special}, len(text), "characters")["tokens"]
        return tokens

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens. ``special`` keeps the names of special tokens. Raises InputError as encode."""
        tokens = list(tokens)
        return str(self._asked({"tokens": tokens, "special": special}, len(tokens), "tokens")["text"])

    def _asked(self, request: Mapping[str, Any], count: int, unit: str) -> Any:
        try:
            return self._library.call(request)
        except (ExceededError, _RefusedError) as error:
            raise InputError(
                f"The tokenizer of the model does not take {count} {unit}: {shown(str(error))}."
            ) from error

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 - a tokenizer lives as long as its model
    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text before it; none for a number that is no token."""
        if token in self._added:
            return self._added[token].encode("utf-8")
        text = self._texts.get(token)
        if text is None:
            return b""
        if self._kind == "WordPiece":
            return text.removeprefix(_CONTINUES).encode() if text.startswith(_CONTINUES) else f" {text}".encode()
        if self._kind == "ByteLevel":
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return text.encode("utf-8")
        if len(text) == _BYTES_OF_TOKEN and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:-1], 16)])
            except ValueError:
                pass
        return text.replace(SPACE, " ").encode("utf-8")


class _RefusedError(Exception):
    """The library refused what it was given; the message says why."""


class _Library:
    """The library's tokenizer, in a process with bounds of time and memory that reads it again after it ended.

    Parameters
    ----------
    text: str
        The tokenizer in the library's JSON form.
    process: Confined
        The process.
    """

    def __init__(self, text: str, process: Confined):
        self.text = text
        self._lock = threading.Lock()
        self._process = process

    def read(self) -> dict[str, Any]:
        """Have the process read it, and return what it says. Raises ImportError, ExceededError and _RefusedError."""
        return _accepted(self._process.call({"read": self.text}, MOST_TOKENIZER_SECONDS, apart="read"))

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises ExceededError and _RefusedError."""
        with self._lock:
            answer = self._process.call(request)
            if "unread" in answer:
                self.read()
                answer = self._process.call(request)
        return _accepted(answer)


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "missing" in answer:
        raise ImportError(f"No module named {answer['missing']!r}", name=answer["missing"])
    if "wrong" in answer:
        raise _RefusedError(answer["wrong"])
    return answer


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes.

    Bytes that are printable in Latin-1 stand for themselves, and the others for the characters from 256 on (Radford et
    al., "Language Models are Unsupervised Multitask Learners", 2019, and the code that came with it).
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in own}
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(b for b in range(256) if b not in own)})
    return alphabet


def _kind_of(kinds: Sequence[str], where: str) -> str:
    """Return what a tokenizer's decoders take tokens for: ByteLevel, WordPiece or SentencePiece. Raises ConfigError."""
    if "ByteLevel" in kinds:
        return "ByteLevel"
    if "WordPiece" in kinds:
        return "WordPiece"
    if "Metaspace" in kinds or {"Replace", "ByteFallback"} <= set(kinds):
        return "SentencePiece"
    raise ConfigError(
        f"{where} has a decoder of the types {shown(kinds)}, whose pieces of text are not known: only byte-level, "
        "SentencePiece and WordPiece tokenizers are supported."
    )


def _text(file: Path, most_bytes: int) -> str:
    try:
        return read_text(file, most_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def _fields(file: Path) -> dict[str, Any]:
    """Read the object of a JSON file; an empty one if there is no file. Raises ConfigError."""
    if not file.exists():
        return {}
    try:
        fields = parse_json(_text(file, MOST_CONFIGURATION_BYTES))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is not JSON that can be read: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must be a JSON object; got {shown(fields)}.")
    return fields


def _texts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Collect the texts of special tokens, which are texts or objects with one."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_of(settings: Mapping[str, Any], folder: Path) -> str | None:
    """Find the chat template in a tokenizer's settings: a text, or one of several by name. Raises ConfigError."""
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named = {}
    if isinstance(value, list):
        named = {x.get("name"): x.get("template") for x in value if isinstance(x, Mapping) and _is_named(x)}
    if "default" not in named:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of templates with one named "
            f"'default'; got {shown(value)}."
        )
    return named["default"]


def _is_named(template: Mapping[str, Any]) -> bool:
    return isinstance(template.get("name"), str) and isinstance(template.get("template"), str)


def _ids(value: Any, where: str) -> list[int]:
    """List the tokens of a field that is a number, a list of them, or None. Raises ConfigError."""
    tokens = [] if value is None else list(value) if isinstance(value, list) else [value]
    if not all(is_whole(token, 0) for token in tokens):
        raise ConfigError(f"{where}: eos_token_id must be a whole number or a list of them; got {shown(value)}.")
    return tokens
