"""A sequence that the engine generates: its tokens, how many of them the pages hold, and what it still needs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from hidet_dist.llm.engine.pages import START, Key, page_key
from hidet_dist.llm.step import Integers


@dataclass(eq=False)
class Sequence:
    """The tokens of one answer, its prompt in front.

    Attributes
    ----------
    tokens: list of int
        The prompt, then what was generated. The last one's successor is generated next.
    prompt: int
        Tokens of the prompt.
    scores_prompt: bool
        Whether the logits of all tokens of the prompt are wanted.
    follows: Sequence or None
        A sequence with the same prompt. This one waits until the pages hold the other one's prompt, to share it.
    pages: list of int
        The pages it refers to, in order.
    state: int or None
        Its row of the states beside the pools, while it runs.
    computed: int
        Tokens whose keys and values the pages hold.
    shared: int or None
        Tokens that the pages held already when it ran first.
    scored: int
        Tokens of the prompt whose logits were given, where they are wanted.
    ended: bool
        Whether nothing more will be generated.
    """

    tokens: list[int]
    scores_prompt: bool = False
    follows: Sequence | None = None
    prompt: int = 0
    pages: list[int] = field(default_factory=list)
    state: int | None = None
    computed: int = 0
    shared: int | None = None
    scored: int = 0
    ended: bool = False
    _keys: list[Key] = field(default_factory=list)
    _table: Integers = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that are known, but not computed. One of them, or the whole prompt, stands before the next one."""
        return len(self.tokens) - self.computed

    @property
    def shareable(self) -> int:
        """Tokens that need not be computed where another sequence's pages hold them: one at least is computed."""
        known = len(self.tokens) - 1
        return min(known, self.scored) if self.scores_prompt and self.scored < self.prompt - 1 else known

    def table(self) -> Integers:
        """Return its pages as an array."""
        if len(self._table) != len(self.pages):
            self._table = np.array(self.pages, np.int64)
        return self._table

    def give(self, pages: Items[int]) -> None:
        """Refer to more pages, behind those it has."""
        self.pages.extend(pages)

    def leave(self) -> list[int]:
        """Refer to no page; return those it referred to, the last one first."""
        pages = self.pages[::-1]
        self.pages, self._table = [], np.empty(0, np.int64)
        self.computed, self.state = 0, None
        return pages

    def keys(self, page: int, count: int) -> Items[Key]:
        """Return the keys of the first ``count`` pages of ``page`` rows, all of which its tokens fill."""
        while len(self._keys) < count:
            begin = len(self._keys) * page
            before = self._keys[-1] if self._keys else START
            self._keys.append(page_key(before, self.tokens[begin : begin + page]))
        return self._keys[:count]
