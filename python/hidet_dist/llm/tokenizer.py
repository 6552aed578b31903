"""Tokenizers of checkpoints: of a transformers folder, and of the metadata of a GGUF file.

The ``tokenizers`` library does the work. transformers, which takes seconds to import, is not needed for a folder.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_CONFIGURATION_BYTES, MOST_TOKENIZER_BYTES

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_CONTINUES = "##"
"""What WordPiece writes in front of a piece that continues a word."""
_BYTES_OF_TOKEN = 6  # characters of a token such as <0x0A>, which is a byte


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

    Raises
    ------
    ConfigError
        When the library cannot read it, or its decoder is none of byte-level, SentencePiece and WordPiece models, whose
        pieces of text are not known.
    """

    def __init__(
        self,
        text: str,
        special_texts: Mapping[str, str],
        end: Iterable[int],
        chat_template: str | None = None,
        where: str = "the tokenizer",
        end_text: str | None = None,
    ):
        library = importlib.import_module("tokenizers")
        try:
            self._library = library.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises Exception, and a panic is a BaseException of its own
            raise ConfigError(f"{where} is not a tokenizer that can be read: {_line(error)}.") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._kind = _kind_of(self._library.decoder, where)
        added = self._library.get_added_tokens_decoder()
        self._added = {int(token): str(entry.content) for token, entry in added.items()}
        self.special = frozenset(int(token) for token, entry in added.items() if entry.special)
        self.vocabulary = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_texts: Mapping[str, str] = dict(special_texts)
        self.chat_template = chat_template
        own = None if end_text is None else self.token(end_text)
        self.end = frozenset(end) | ({own} if own is not None else set())
        if wrong := sorted(token for token in self.end if not 0 <= token < self.vocabulary):
            raise ConfigError(
                f"{where} has {self.vocabulary} tokens, and the token {wrong[0]}, which is to end texts, is none."
            )

    @classmethod
    def of_folder(cls, folder: str | Path) -> CheckpointTokenizer:
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
        return cls(text, specials, end, chat, str(file), specials.get("eos_token"))

    def save(self, folder: str | Path) -> None:
        """Write the files from which :meth:`of_folder` reads an equal tokenizer."""
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self._library.to_str())
        settings = {**self.special_texts, **({"chat_template": self.chat_template} if self.chat_template else {})}
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=1))
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": sorted(self.end)}))

    def token(self, text: str) -> int | None:
        """Return the token that is written as ``text`` in the vocabulary, or None."""
        token = self._library.token_to_id(text)
        return None if token is None else int(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text. ``special`` adds those that begin (and end) a text, as the files say."""
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens. ``special`` keeps the names of special tokens."""
        return str(self._library.decode(list(tokens), skip_special_tokens=not special))

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 - a tokenizer lives as long as its model
    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text before it; none for a number that is no token."""
        if token in self._added:
            return self._added[token].encode("utf-8")
        text = self._library.id_to_token(token)
        if text is None:
            return b""
        if self._kind == "WordPiece":
            return str(text).removeprefix(_CONTINUES).encode() if text.startswith(_CONTINUES) else f" {text}".encode()
        if self._kind == "ByteLevel":
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return str(text).encode("utf-8")
        if len(text) == _BYTES_OF_TOKEN and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:-1], 16)])
            except ValueError:
                pass
        return str(text).replace(SPACE, " ").encode("utf-8")


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


def _kind_of(decoder: Any, where: str) -> str:
    """Return what a tokenizer's decoder takes tokens for: ByteLevel, WordPiece or SentencePiece. Raises ConfigError."""
    pending = [] if decoder is None else [parse_json(decoder.__getstate__())]  # its part of the library's JSON form
    kinds = []
    for part in pending:
        if isinstance(part, Mapping):
            kinds.append(part.get("type"))
            pending += part.get("decoders", ())
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


def _line(error: BaseException) -> str:
    return shown(str(error))
