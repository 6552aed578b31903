"""Answers in OpenAI's forms: completions and chats, whole and in parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hidet_dist.llm.engine import Event, Scored, Stream
from hidet_dist.llm.text import Tokenizer

_LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


@dataclass
class AnswerChoice:
    """What is new of an answer, or the whole of it."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish: str | None = None

    def add(self, event: Event) -> None:
        """Add an event."""
        self.text += event.text
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish = event.finish or self.finish


def gather(events: Iterable[Event]) -> dict[int, AnswerChoice]:
    """Return what events tell of each answer, by its number."""
    choices: dict[int, AnswerChoice] = {}
    for event in events:
        choices.setdefault(event.choice, AnswerChoice()).add(event)
    return choices


@dataclass
class Usage:
    """The tokens that requests took, for their bill."""

    prompt: int = 0
    shared: int = 0
    generated: int = 0

    def add(self, stream: Stream) -> None:
        """Count the prompt of a request."""
        self.prompt += len(stream.request.prompt)
        self.shared += stream.shared

    def object(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.shared},
        }


def finish_reason(finish: str | None) -> str | None:
    """Return the reason of an end by OpenAI's names, which have none for an answer that was cancelled."""
    return "stop" if finish == "cancelled" else finish


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; ``bytes:`` and its bytes where these are no whole characters."""
    piece = token_bytes(tokenizer, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of one token; none for a column of the logits that is no token."""
    return tokenizer.piece(token) if token < tokenizer.vocabulary else b""


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


class CompletionLogprobs:
    """The log-probabilities of a completion, in parts that follow each other."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._offset = 0

    def object(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        """Return those of the next tokens."""
        texts = [token_text(self._tokenizer, each.token) for each in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if each.logprob is None else _number(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": offsets,
        }

    def _top(self, scored: Scored) -> dict[str, float] | None:
        if scored.logprob is None:
            return None
        # The token itself is listed, too, as OpenAI does. Of two tokens with one text the more probable one counts.
        ranked = [(scored.token, scored.logprob), *scored.top[::-1]]
        return {token_text(self._tokenizer, token): _number(logprob) for token, logprob in ranked}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Scored]) -> dict[str, Any]:
    """Return the log-probabilities of tokens of a chat."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        piece = token_bytes(tokenizer, token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": _number(logprob or 0.0), "bytes": list(piece)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}
