"""Decoding of dataclasses from plain JSON values, which are checked against the type annotations."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from hidet_dist.checks import shown
from hidet_dist.errors import SpecError

_T = TypeVar("_T")
_SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def decode(kind: type[_T], value: Any, where: str = "the data") -> _T:
    """Decode a JSON object to the dataclass ``kind``; fields with defaults may be missing.

    Fields may be text, numbers, flags, None, dataclasses, tuples and dicts of these, and unions.

    Raises
    ------
    SpecError
        When a value does not fit its type; the message has its path, which begins with ``where``.
    """
    result: _T = _decode(kind, value, where)
    return result


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(kind, value, where)
    if origin is tuple:
        (element, _) = typing.get_args(kind)
        if not isinstance(value, list):
            raise SpecError(f"{where} must be a list; got {shown(value)}.")
        return tuple(_decode(element, item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        _, element = typing.get_args(kind)
        if not isinstance(value, dict):
            raise SpecError(f"{where} must be an object; got {shown(value)}.")
        return {_decode(str, key, where): _decode(element, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise SpecError(f"{where} must be {_SCALARS[kind]}; got {shown(value)}.")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SpecError(f"{where} must be text without lone surrogates; got {shown(value)}.") from None
    return value


def _union(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    for option in others:
        if type(value) is option:
            return _decode(option, value, where)
    if len(others) == 1:
        return _decode(others[0], value, where)
    raise SpecError(f"{where} must be {' or '.join(_SCALARS[option] for option in others)}; got {shown(value)}.")


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """List the name and type of each field of a dataclass, and whether it is required."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        (declared.name, hints[declared.name], declared.default is missing and declared.default_factory is missing)
        for declared in dataclasses.fields(kind)
    )


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise SpecError(f"{where} must be an object; got {shown(value)}.")
    values = {}
    for name, declared, needed in _fields(kind):
        if name in value:
            values[name] = _decode(declared, value[name], f"{where}.{name}")
        elif needed:
            raise SpecError(f"{where} has no {name!r}.")
    return kind(**values)
