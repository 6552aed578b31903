"""Checks of values from users and files, and their text in errors. No function here raises."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any, TypeGuard

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200
_BRIEF.maxlong = 60
_BRIEF.maxtuple = _BRIEF.maxlist = _BRIEF.maxdict = 20


def shown(value: Any) -> str:
    """Show a value of any type and size in an error message: short, on one line, without raising."""
    try:
        text = " ".join(_BRIEF.repr(value).split())
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # whatever a foreign __repr__ raises; integers of more than 4300 digits have no text
        return f"a value of type {type(value).__name__}"


def shortened(text: str, most: int = 1000) -> str:
    """Leave out the middle of a text of more than ``most`` characters, which may have names from outside."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[len(text) - most // 2 :]}"


def is_whole(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Whether a value is an int, not a bool, between two bounds, both included."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def is_finite(value: Any) -> bool:
    """Whether a value is an int or a float, not a bool, that converts to a finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence other than text and bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
