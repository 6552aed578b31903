"""The choice of tokens: distributions as they are defined, and places that do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import EngineError
from hidet_dist.llm.engine.request import Sampling
from hidet_dist.llm.engine.sampling import Sampler, scored, uniform

DRAWS = 1000


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The chances of tokens, from the definitions of the parameters, one token after the other."""
    scores = logits.astype(float) / sampling.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = order[: sampling.top_k] if sampling.top_k else order
    chances = {token: np.exp(scores[token] - scores.max()) for token in kept}
    total, mass, nucleus = sum(chances.values()), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += chances[token]
        if mass >= sampling.top_p * total:
            break
    kept = nucleus if sampling.top_p < 1 else kept
    kept = [token for token in kept if chances[token] >= sampling.min_p]
    result = np.zeros(len(scores))
    for token in kept:
        result[token] = chances[token]
    return result / result.sum()


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=2, max_size=12).map(lambda each: np.array(each, np.float32) / 2),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 2, 3, 100]),
        top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
    seed=st.integers(0, 100),
)
def test_tokens_are_drawn_from_their_distribution(logits: np.ndarray, sampling: Sampling, seed: int):
    sampler = Sampler(sampling, seed, 0, ())
    counts = np.bincount([sampler.choose(logits) for _ in range(DRAWS)], minlength=len(logits))
    chances = distribution(logits, sampling)
    assert not counts[chances == 0].any()
    deviation = np.sqrt(DRAWS * chances * (1 - chances))
    assert (np.abs(counts - DRAWS * chances) <= 5 * deviation + 5).all()


def test_the_nucleus_of_a_flat_distribution_is_large():
    logits = np.zeros(5000, np.float32)
    sampler = Sampler(Sampling(top_p=0.5), 1, 0, ())
    drawn = [sampler.choose(logits) for _ in range(300)]
    assert max(drawn) < 2500  # of equal tokens, the first ones
    assert max(drawn) > 2000


def test_places_seeds_and_answers_have_numbers_of_their_own():
    numbers = {uniform(seed, choice, place) for seed in range(5) for choice in range(5) for place in range(5)}
    assert len(numbers) == 125
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_penalties_and_bias_change_the_logits():
    logits = np.array([2.0, 1.9, -1.0], np.float32)

    def greedy(**values: float) -> Sampling:
        return Sampling(temperature=0, **values)

    assert Sampler(greedy(repetition_penalty=1.5), 0, 0, [0]).choose(logits) == 1
    assert Sampler(greedy(repetition_penalty=0.5), 0, 0, [1]).choose(logits) == 1
    presence = Sampler(greedy(presence_penalty=0.5), 0, 0, [0])  # of the answer, not of the prompt
    assert [presence.choose(logits) for _ in range(3)] == [0, 1, 0]
    frequency = Sampler(greedy(frequency_penalty=1.0), 0, 0, [])
    assert [frequency.choose(logits) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    assert Sampler(Sampling(temperature=0, bias={2: 10.0}), 0, 0, []).choose(logits) == 2
    assert Sampler(Sampling(temperature=0, bias={0: -np.inf}), 0, 0, []).choose(logits) == 1
    assert logits.tolist() == np.array([2.0, 1.9, -1.0], np.float32).tolist()


def test_only_allowed_tokens_are_chosen():
    logits = np.array([5.0, 4.0, 3.0], np.float32)
    allowed = np.array([False, True, True])
    assert Sampler(Sampling(temperature=0), 0, 0, []).choose(logits, allowed) == 1
    sampler = Sampler(Sampling(temperature=9.0), 0, 0, [])
    assert {sampler.choose(logits, allowed) for _ in range(50)} == {1, 2}
    with pytest.raises(EngineError, match="nothing is left that the grammar allows"):
        sampler.choose(logits, np.zeros(3, bool))


def test_log_probabilities_are_of_the_models_logits():
    logits = np.array([0.0, np.log(2), np.log(5)], np.float32)
    told = scored(logits, 1, 2)
    assert told.logprob == pytest.approx(np.log(2 / 8))
    assert [token for token, _ in told.top] == [2, 1]
    assert scored(logits, 1, 0).top == ()
