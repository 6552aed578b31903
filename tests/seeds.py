"""The seed of random instances: fixed, so that a run has the verdict of the one before, unless the environment has one.

``make slow-test`` draws one. A run prints its seed, and after a failure how to repeat it.
"""

from __future__ import annotations

import os

VARIABLE = "HIDET_DIST_SEED"
_MOST_DIGITS = 18


def seed() -> int:
    """Return the seed of this run. Raises ValueError where the variable has anything but digits."""
    text = os.environ.get(VARIABLE, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ValueError(f"{VARIABLE} is {text!r}; set it to a whole number of at most {_MOST_DIGITS} digits.")
    return int(text)


def how_to_repeat() -> str:
    """Return what a run is started with to have the same random instances."""
    return f"{VARIABLE}={seed()}"
