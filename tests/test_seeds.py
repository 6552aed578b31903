"""The seed of random instances is that of the environment, and failures say it."""

from __future__ import annotations

import pytest
from tests.seeds import VARIABLE, how_to_repeat, seed


def test_the_seed_is_fixed_unless_the_environment_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert seed() == 0
    monkeypatch.setenv(VARIABLE, "12")
    assert (seed(), how_to_repeat()) == (12, "HIDET_DIST_SEED=12")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "seven", "1" * 19, "²"])
def test_what_is_no_seed_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="set it to a whole number"):
        seed()
