"""A request to generate tokens: a prompt, how to choose tokens, when to stop, and what to tell of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hidet_dist.errors import RequestError
from hidet_dist.llm.sizes import StepSizes

MOST_CHOICES = 128
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 4096
MOST_LOGPROBS = 128


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    Attributes
    ----------
    temperature: float
        The divisor of the logits. At 0 the token with the largest logit is chosen.
    top_k: int
        Choose among so many of the most probable tokens; 0 for all.
    top_p: float
        Choose among the most probable tokens that have this probability together.
    min_p: float
        Choose among tokens at least this probable in relation to the most probable one.
    repetition_penalty: float
        The divisor of the positive logits, and the factor of the negative ones, of tokens of the prompt and the answer.
    presence_penalty, frequency_penalty: float
        What is subtracted from the logit of a token of the answer: once, and for each time it is there.
    bias: mapping of int to float
        What is added to the logits of tokens.
    seed: int, optional
        Equal requests with an equal seed give equal tokens. By default each request has its own.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def check(self, vocabulary: int) -> None:
        """Check the values.

        Raises
        ------
        RequestError
            When one is outside its range.
        """
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0.0, 100.0),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise RequestError(f"{name} is {value}; give a number from {least:g} to {most:g}.", name)
        if self.top_p == 0:
            raise RequestError("top_p is 0; give a number above 0, up to 1.", "top_p")
        for token, value in self.bias.items():
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"logit_bias names token {token}; the model has tokens 0 to {vocabulary - 1}.", "logit_bias"
                )
            if math.isnan(value) or value == math.inf:
                raise RequestError(f"logit_bias of token {token} is {value}; give a number.", "logit_bias")


@dataclass(frozen=True)
class Grammar:
    """What an answer must match.

    Attributes
    ----------
    kind: str
        ``json_schema``, ``regex`` or ``lark``.
    text: str
        The schema as JSON, the regular expression, or the grammar.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Request:
    """A request to generate tokens.

    Attributes
    ----------
    prompt: tuple of int
        The tokens to go on from; at least one.
    max_tokens: int, optional
        Tokens of an answer, at most. By default as many as the context has room for. With 0, the prompt is computed
        alone.
    choices: int
        The number of answers.
    sampling: Sampling
        How tokens are chosen.
    stop: tuple of str
        Texts that end an answer; they are no part of it.
    stop_tokens: frozenset of int
        Tokens that end an answer, beside the tokenizer's.
    ignore_end: bool
        Go on behind the tokenizer's tokens that end an answer.
    special: bool
        Keep the names of special tokens in the text.
    logprobs: int, optional
        Tell the log-probability of each token of the answer, and so many of the most probable tokens at its place.
    prompt_logprobs: int, optional
        The same for each token of the prompt.
    grammar: Grammar, optional
        What the answer must match.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    choices: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    special: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def check(self, sizes: StepSizes) -> None:
        """Check the request against a model's sizes.

        Raises
        ------
        RequestError
            When it is wrong; it names the parameter.
        """
        if not self.prompt:
            raise RequestError("The prompt has no token; give one at least.", "prompt")
        for name, tokens in (("prompt", self.prompt), ("stop_token_ids", self.stop_tokens)):
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < sizes.vocabulary:
                    raise RequestError(
                        f"{name} has the token {token}; this model has 0 to {sizes.vocabulary - 1}.", name
                    )
        room = room_of(sizes) - len(self.prompt)
        if room < 0 or (room == 0 and self.max_tokens != 0):
            raise RequestError(
                f"The prompt has {len(self.prompt)} tokens; this model has room for {room_of(sizes)} with the answer. "
                "Shorten the prompt.",
                "prompt",
            )
        if self.max_tokens is not None and not 0 <= self.max_tokens <= room:
            raise RequestError(
                f"max_tokens is {self.max_tokens}; behind a prompt of {len(self.prompt)} tokens this model has room "
                f"for {room}. Give 0 to {room}, or shorten the prompt.",
                "max_tokens",
            )
        if not 1 <= self.choices <= MOST_CHOICES:
            raise RequestError(f"n is {self.choices}; give 1 to {MOST_CHOICES}.", "n")
        if len(self.stop) > MOST_STOPS or any(not 1 <= len(stop) <= MOST_STOP_CHARACTERS for stop in self.stop):
            raise RequestError(
                f"stop has {len(self.stop)} texts; give at most {MOST_STOPS}, of 1 to {MOST_STOP_CHARACTERS} "
                "characters each.",
                "stop",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST_LOGPROBS:
                raise RequestError(f"{name} is {value}; give 0 to {MOST_LOGPROBS}.", name)
        self.sampling.check(sizes.vocabulary)

    def limit(self, sizes: StepSizes) -> int:
        """Return the most tokens that an answer may have."""
        room = room_of(sizes) - len(self.prompt)
        return room if self.max_tokens is None else self.max_tokens


def room_of(sizes: StepSizes) -> int:
    """Return the most tokens that a sequence may have: the context, or the rows of the pools where these are fewer."""
    return min(sizes.context, sizes.rows)
