"""Choosing tokens from logits.

A token depends on its own logits, its own sequence's tokens, the seed, and its place in the answer, and on nothing
else: the random number of a place is a digest of the seed and the place, so that it does not matter what was drawn
before, or for whom. Equal probabilities are ordered by the tokens' numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import EngineError
from hidet_dist.llm.engine.request import Sampling

_FIRST_SORTED = 256  # of the most probable tokens, where nothing but their sum says how many are needed


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the most probable tokens at its place with theirs.

    The log-probability is that of the model's own logits, before a temperature, penalties or a grammar change them. It
    is None where nothing stands before the token.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, choice: int, place: int) -> float:
    """Return the random number, from 0 to below 1, of a place in a request's answer."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)  # all bits that a float64 has


class Sampler:
    """The choice of the tokens of one answer.

    Parameters
    ----------
    sampling: Sampling
        How tokens are chosen.
    seed, choice: int
        The seed of the request, and the answer's number in it.
    prompt: iterable of int
        The tokens of the prompt, which a repetition penalty counts.
    """

    def __init__(self, sampling: Sampling, seed: int, choice: int, prompt: Iterable[int]):
        self._sampling = sampling
        self._seed = seed
        self._choice = choice
        self._place = 0
        self._seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        self._counts: dict[int, int] = {}
        self._bias = (
            np.array(list(sampling.bias), np.int64),
            np.array(list(sampling.bias.values()), np.float32),
        )

    def choose(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None = None) -> int:
        """Choose the next token.

        Parameters
        ----------
        logits: array [vocabulary]
            The model's logits. They are not changed.
        allowed: array [vocabulary], optional
            The tokens that may be chosen.

        Raises
        ------
        EngineError
            When no token can be chosen, as where the model computed no numbers.
        """
        changed = self._changed(logits)
        if allowed is not None:
            changed = np.where(allowed, changed, np.float32(-np.inf))
        best = int(changed.argmax())
        if not math.isfinite(changed[best]):
            raise EngineError(
                f"No token can be chosen: the largest logit is {changed[best]}. The model computed no finite numbers, "
                "or nothing is left that the grammar allows."
            )
        sampling = self._sampling
        token = best
        if sampling.temperature > 0 and sampling.top_k != 1:
            token = _draw(changed, sampling, uniform(self._seed, self._choice, self._place))
        self._place += 1
        if sampling.repetition_penalty != 1:
            self._seen.add(token)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        return token

    def _changed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits with the bias and the penalties."""
        sampling = self._sampling
        ids, bias = self._bias
        if not (len(ids) or self._seen or self._counts):
            return logits
        changed = logits.astype(np.float32)
        if self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = changed[seen]
            penalty = np.float32(sampling.repetition_penalty)
            changed[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            tokens = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            changed[tokens] -= np.float32(sampling.presence_penalty) + counts * np.float32(sampling.frequency_penalty)
        if len(ids):
            changed[ids] += bias
        return changed


def _draw(logits: NDArray[np.float32], sampling: Sampling, number: float) -> int:
    """Draw a token: the temperature first, then top-k, top-p and min-p in this order, as in transformers."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= sampling.temperature
    ids: NDArray[np.int64] | None = None  # all of them
    if 0 < sampling.top_k < len(scaled):
        ids = _largest(scaled, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(scaled, ids, sampling.top_p)
    chances = np.exp(scaled if ids is None else scaled[ids])
    if sampling.min_p > 0:
        enough = chances >= sampling.min_p  # the most probable token has the chance 1
        ids = np.flatnonzero(enough) if ids is None else ids[enough]
        chances = chances[enough]
    sums = np.cumsum(chances)
    # The rounding of a product may reach the sum itself, past which there is no token.
    index = min(int(np.searchsorted(sums, number * sums[-1], side="right")), int(np.flatnonzero(chances)[-1]))
    return index if ids is None else int(ids[index])


def _largest(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` largest scores, in descending order; of equal ones the first."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= least)
    else:
        ids = np.arange(len(scores))
    return ids[np.argsort(-scores[ids], kind="stable")][:count]


def _nucleus(scaled: NDArray[np.float64], ids: NDArray[np.int64] | None, top_p: float) -> NDArray[np.int64]:
    """Return the fewest of the most probable tokens whose chances sum up to ``top_p`` of all, in descending order."""
    total = float(np.exp(scaled if ids is None else scaled[ids]).sum())
    count = _FIRST_SORTED
    while True:
        ordered = _largest(scaled, count) if ids is None else ids
        sums = np.cumsum(np.exp(scaled[ordered]))
        if ids is not None or count >= len(scaled) or sums[-1] >= top_p * total:
            return ordered[: int(np.searchsorted(sums, top_p * total)) + 1]
        count *= 8


def scored(logits: NDArray[np.float32], token: int, top: int) -> Scored:
    """Return a token with its log-probability, and those of the ``top`` most probable tokens."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    best = _largest(scores, top) if top else ()
    return Scored(token, float(scores[token]), tuple((int(each), float(scores[each])) for each in best))
