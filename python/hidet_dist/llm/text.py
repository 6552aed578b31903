"""What a tokenizer offers to the engine and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Texts as tokens, and back. It is used by several threads at once."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens. The model's logits may have more columns, which no text has."""

    @property
    def end(self) -> frozenset[int]:
        """The tokens that end what a model generates."""

    @property
    def special(self) -> frozenset[int]:
        """The tokens that stand for no text of their own, such as those that begin and end a text."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that makes a prompt of messages, or None."""

    @property
    def special_texts(self) -> Mapping[str, str]:
        """What the chat template knows of special tokens: ``bos_token``, ``eos_token`` and the like, as texts."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        ``special`` adds the tokens that begin (and end) a text, as the tokenizer's files say. Names of special tokens
        in the text become these tokens either way.

        Raises
        ------
        InputError
            When the text is none that it takes.
        """

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens. ``special`` keeps the names of special tokens. Raises InputError as encode."""

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text that goes before it: its UTF-8, or a part of a character's.

        A special token gives its name. The pieces of a text's tokens, joined, are the text but for a space in front
        that some tokenizers add.
        """
