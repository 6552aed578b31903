"""Fields of JSON objects read as the types that they must have; each function raises SpecError for any other value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import SpecError

LARGEST = 2**63 - 1
"""Bytes, elements and seconds beyond this are no sensible figures, and sums of them could overflow."""


def read_object(value: Any, what: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _unfit(what, "an object", value)
    return value


def read_field(data: Mapping[str, Any], key: str) -> Any:
    """Any value that an object must have."""
    if key not in data:
        raise SpecError(f"{key!r} is missing.")
    return data[key]


def read_list(data: Mapping[str, Any], key: str) -> list[Any]:
    """A list."""
    value = read_field(data, key)
    if not isinstance(value, list):
        raise _unfit(key, "a list", value)
    return value


def read_text(data: Mapping[str, Any], key: str) -> str:
    """A string that can be printed: one without lone surrogates."""
    return _text(read_field(data, key), key)


def read_texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of such strings."""
    return tuple(_text(value, f"an entry of {key}") for value in read_list(data, key))


def read_whole(data: Mapping[str, Any], key: str, least: int = 0) -> int:
    """A whole number from ``least`` to :data:`LARGEST`."""
    return _whole(read_field(data, key), key, least)


def read_wholes(data: Mapping[str, Any], key: str, least: int = 0) -> tuple[int, ...]:
    """A list of such numbers."""
    return tuple(_whole(value, f"an entry of {key}", least) for value in read_list(data, key))


def read_number(data: Mapping[str, Any], key: str, least: float = 0) -> float:
    """A number from ``least`` to :data:`LARGEST`, such as seconds; a whole number stays one."""
    value = read_field(data, key)
    if not is_finite(value) or not least <= value <= LARGEST:
        raise _unfit(key, f"a number from {least} to {LARGEST}", value)
    number: float = value
    return number


def read_flag(data: Mapping[str, Any], key: str) -> bool:
    """True or false."""
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


def _unfit(what: str, wanted: str, value: Any) -> SpecError:
    return SpecError(f"{what} must be {wanted}; got {shown(value)}.")
