"""How a language model is loaded: its ranks, its context, its pools, and how it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_DEVICES, MOST_SECONDS

LONGEST_BY_DEFAULT = 4096
"""Tokens of a sequence for which a model is built by default, where it was trained with as many."""
_WHOLE_CONTEXTS = 4
"""Sequences of the longest kind whose rows fit in the pools by default."""
_MOST_TOKENS = 2**31 - 1  # sizes of programs are 32-bit integers


@dataclass(frozen=True)
class LoadOptions:
    """How to build and load a model.

    Attributes
    ----------
    ranks: int, optional
        The number of ranks. By default one for each stage, and for an artifact folder that for which it was built.
    stages: int
        Stages of whole layers, one behind the other, each on ranks of its own. Ranks of one stage share its operators;
        a step goes through all stages, so that more of them give memory and not speed.
    context: int, optional
        Tokens that a sequence may have, its prompt and what is generated together. By default those of the
        configuration, at most 4096.
    sequences: int
        Sequences that run at once.
    step_tokens: int
        Tokens that one step may have. Longer prompts are computed in several steps.
    cached_tokens: int, optional
        Rows of the pools of keys and values: tokens of all sequences together. By default those of 4 whole contexts,
        or of as many as there are sequences if these are fewer.
    page: int
        Rows of a page.
    dtype: str
        The dtype of weights, keys and values: ``float32``, ``float16`` or ``bfloat16``.
    timeout_seconds: float
        How long ranks wait for one another.
    distributed, optimization: mapping
        Further keys of the two configurations of :func:`hidet_dist.auto_parallel`, such as ``machine`` and
        ``mem_budget``.
    """

    ranks: int | None = None
    stages: int = 1
    context: int | None = None
    sequences: int = 8
    step_tokens: int = 256
    cached_tokens: int | None = None
    page: int = 16
    dtype: str = "float32"
    timeout_seconds: float = 60.0
    distributed: Mapping[str, Any] = field(default_factory=dict)
    optimization: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check the values.

        Raises
        ------
        ConfigError
            When one is no positive whole number, or the pools have no room for one sequence.
        """
        for name in ("stages", "context", "sequences", "step_tokens", "cached_tokens", "page"):
            value = getattr(self, name)
            if value is None and name in ("context", "cached_tokens"):
                continue
            if not is_whole(value, 1, _MOST_TOKENS):
                raise ConfigError(f"{name} must be a whole number from 1 to 2**31 - 1; got {shown(value)}.")
        if self.ranks is not None and not is_whole(self.ranks, 1, MOST_DEVICES):
            raise ConfigError(f"The number of ranks must be a whole number from 1 to {MOST_DEVICES}; got {self.ranks}.")
        if self.stages > self.rank_count:
            raise ConfigError(f"{self.stages} stages cannot be on {self.ranks} ranks: each is on ranks of its own.")
        if not 0 < self.timeout_seconds <= MOST_SECONDS:
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; give seconds above 0, up to {MOST_SECONDS}.")
        for name in ("distributed", "optimization"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name} must be a mapping of keys to values; got {shown(getattr(self, name))}.")
        if self.context is not None and self.cached_tokens is not None and self.cached_tokens < self.context:
            raise ConfigError(
                f"cached_tokens is {self.cached_tokens}, less than the {self.context} tokens of one sequence: give at "
                "least as many, or a smaller context."
            )

    @property
    def rank_count(self) -> int:
        """The number of ranks that a model is built for."""
        return self.stages if self.ranks is None else self.ranks

    @property
    def ranks_of_stages(self) -> list[int]:
        """The number of ranks of each stage; where they cannot be equal, the first ones have one more."""
        each, more = divmod(self.rank_count, self.stages)
        return [each + (number < more) for number in range(self.stages)]

    def context_of(self, trained: int | None) -> int:
        """Return the tokens of a sequence for a model that was trained with sequences of ``trained`` tokens.

        Raises
        ------
        ConfigError
            When more are asked for, they do not fit in the pools, or the number is none of tokens.
        """
        if trained is not None and not is_whole(trained, 0):
            raise ConfigError(f"max_position_embeddings gives sequences {shown(trained)} tokens: it must be above 0.")
        if trained is not None and self.context is not None and self.context > trained:
            raise ConfigError(f"context is {self.context}; the model was trained with sequences of {trained} tokens.")
        context = self.context or min(trained or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
        if self.cached_tokens is not None and self.cached_tokens < context:
            raise ConfigError(f"cached_tokens is {self.cached_tokens}, less than the {context} tokens of one sequence.")
        return context

    def pages_of(self, context: int) -> int:
        """Return the number of pages of the pools, for sequences of this many tokens."""
        rows = self.cached_tokens or min(self.sequences, _WHOLE_CONTEXTS) * context
        return -(-rows // self.page)
