"""Typed reading of JSON objects' fields; each function raises SpecError for a value of a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import SpecError

LARGEST = 2**63 - 1
"""The largest accepted number of bytes, elements or seconds: sums of larger ones could overflow."""


def read_object(value: Any, what: str) -> Mapping[str, Any]:
    """Read a JSON object."""
    if not isinstance(value, dict):
        raise _unfit(what, "an object", value)
    return value


def read_field(data: Mapping[str, Any], key: str) -> Any:
    """Read a required field of any type."""
    if key not in data:
        raise SpecError(f"{key!r} is missing.")
    return data[key]


def read_list(data: Mapping[str, Any], key: str) -> list[Any]:
    """Read a list."""
    value = read_field(data, key)
    if not isinstance(value, list):
        raise _unfit(key, "a list", value)
    return value


def read_text(data: Mapping[str, Any], key: str) -> str:
    """Read a string without lone surrogates, which cannot be encoded."""
    return _text(read_field(data, key), key)


def read_texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Read a list of strings without lone surrogates."""
    return tuple(_text(value, f"an entry of {key}") for value in read_list(data, key))


def read_whole(data: Mapping[str, Any], key: str, least: int = 0) -> int:
    """Read a whole number from ``least`` to :data:`LARGEST`."""
    return _whole(read_field(data, key), key, least)


def read_wholes(data: Mapping[str, Any], key: str, least: int = 0) -> tuple[int, ...]:
    """Read a list of whole numbers from ``least`` to :data:`LARGEST`."""
    return tuple(_whole(value, f"an entry of {key}", least) for value in read_list(data, key))


def read_number(data: Mapping[str, Any], key: str, least: float = 0) -> float:
    """Read a number from ``least`` to :data:`LARGEST`; a whole number stays an int."""
    value = read_field(data, key)
    if not is_finite(value) or not least <= value <= LARGEST:
        raise _unfit(key, f"a number from {least} to {LARGEST}", value)
    number: float = value
    return number


def read_flag(data: Mapping[str, Any], key: str) -> bool:
    """Read true or false."""
    value = read_field(data, key)
    if not isinstance(value, bool):
        raise _unfit(key, "true or false", value)
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _unfit(what, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _unfit(what, "a string without lone surrogates", value) from None
    return value


def _whole(value: Any, what: str, least: int) -> int:
    if not is_whole(value, least, LARGEST):
        raise _unfit(what, f"a whole number from {least} to {LARGEST}", value)
    number: int = value
    return number


def _unfit(what: str, requirement: str, value: Any) -> SpecError:
    return SpecError(f"{what} must be {requirement}; got {shown(value)}.")
