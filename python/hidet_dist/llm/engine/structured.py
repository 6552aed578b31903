"""Answers that match a JSON schema, a regular expression or a grammar, by llguidance.

At each place it says which tokens can go on: all others are left out of the choice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hidet_dist.checks import shown
from hidet_dist.errors import EngineError, RequestError
from hidet_dist.limits import MOST_GRAMMAR_CHARACTERS
from hidet_dist.llm.confined import Confined, ExceededError
from hidet_dist.llm.confined.grammars import KINDS, compiled
from hidet_dist.llm.engine.request import Grammar
from hidet_dist.llm.text import Tokenizer

_TRIAL = Confined("hidet_dist.llm.confined.grammars")


@functools.lru_cache(maxsize=64)
def _problem_of(kind: str, text: str) -> str:
    """Say what is wrong with a grammar, after it was compiled in a process with bounds. Raises ExceededError."""
    return str(_TRIAL.call({"kind": kind, "text": text}))


class _Tokens:
    """The tokenizer, as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end)
        self.special_token_ids = sorted(tokenizer.special | tokenizer.end)
        self.tokens = [tokenizer.piece(token) for token in range(tokenizer.vocabulary)]

    def __call__(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, special=False)


class Grammars:
    """The grammars of a tokenizer's texts. Its first use prepares the vocabulary, which takes a part of a second.

    Parameters
    ----------
    tokenizer: Tokenizer
        The tokens that texts consist of.
    vocabulary: int
        Columns of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._prepared: Any = None

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return the state of an answer that is to match a grammar, at its beginning.

        Raises
        ------
        RequestError
            When the grammar is malformed or too complex, or llguidance is not installed.
        """
        if grammar.kind not in KINDS:
            raise RequestError(
                f"There is no grammar {grammar.kind!r}; give one of {', '.join(KINDS)}.", "response_format"
            )
        if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"The {grammar.kind} of the answer has {len(grammar.text)} characters; at most "
                f"{MOST_GRAMMAR_CHARACTERS} are taken.",
                "response_format",
            )
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "Answers that match a grammar need llguidance: pip install 'hidet_dist[llm]'.", "response_format"
            ) from error
        if not self._tokenizer.end:
            raise RequestError(
                "This model's tokenizer has no token that ends an answer, so that none can end where a grammar does.",
                "response_format",
            )
        try:
            problem = _problem_of(grammar.kind, grammar.text)
        except ExceededError as error:
            problem = str(error)
        if problem:
            raise RequestError(
                f"The {grammar.kind} of the answer is malformed or too complex: {shown(problem)}", "response_format"
            )
        with self._lock:
            if self._prepared is None:
                self._prepared = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Tokens(self._tokenizer)),
                    n_vocab=max(self._vocabulary, self._tokenizer.vocabulary),
                    eos_token=sorted(self._tokenizer.end),
                )
        matcher = compiled(grammar.kind, grammar.text, self._prepared)
        if matcher.is_error():
            raise RequestError(
                f"The {grammar.kind} of the answer is too complex: {shown(matcher.get_error())}", "response_format"
            )
        return Matcher(matcher, self._vocabulary)


class Matcher:
    """How far an answer matches its grammar."""

    def __init__(self, matcher: Any, vocabulary: int):
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def complete(self) -> bool:
        """Whether the answer matches, and nothing can go on."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> Matcher:
        """Return a state of its own for another answer."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens can go on [vocabulary].

        Raises
        ------
        EngineError
            When the grammar proved too complex.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise EngineError(f"The answer cannot follow its grammar any further: {self._matcher.get_error()}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocabulary]
        return np.pad(bits, (0, self._vocabulary - len(bits))).astype(bool)

    def consume(self, token: int) -> None:
        """Go on by a token.

        Raises
        ------
        EngineError
            When it does not match.
        """
        if not self._matcher.consume_token(token):
            raise EngineError(f"Token {token} does not match the answer's grammar: {self._matcher.get_error()}")
