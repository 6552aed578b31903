"""Packing of dataclasses as compact JSON: fields by position, texts by number, and a schema to unpack them."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

_DIGITS = 7  # significant digits of a float; the page shows fewer


def pack(value: Any) -> dict[str, Any]:
    """Pack a dataclass into ``{"schema", "texts", "value"}``.

    ``schema`` maps the name of each dataclass to the names and types of its fields. A type is ``text`` (an index of
    ``texts``), ``raw`` (the value itself), ``["list", type]``, or the name of a dataclass (its fields in a list, or
    None).
    """
    schema: dict[str, list[tuple[str, Any]]] = {}
    texts: dict[str, int] = {}
    packed = _pack(_type(type(value), schema), value, schema, texts)
    return {"schema": schema, "texts": list(texts), "value": packed, "type": type(value).__name__}


def _type(kind: Any, schema: dict[str, list[tuple[str, Any]]]) -> Any:
    """Convert the type of a field for the schema; add the dataclasses that it refers to to the schema."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [option for option in typing.get_args(kind) if option is not type(None)]
        return _type(others[0], schema) if len(others) == 1 and dataclasses.is_dataclass(others[0]) else "raw"
    if typing.get_origin(kind) is tuple:
        element = _type(typing.get_args(kind)[0], schema)
        return "raw" if element == "raw" else ["list", element]
    if dataclasses.is_dataclass(kind):
        name: str = getattr(kind, "__name__")  # noqa: B009  mypy takes it for an instance
        if name not in schema:
            schema[name] = []
            schema[name] += [
                (field, _type(hint, schema)) for field, hint in _hints(typing.cast(typing.Hashable, kind)).items()
            ]
        return name
    return "text" if kind is str else "raw"


def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {declared.name: hints[declared.name] for declared in dataclasses.fields(kind)}


def _pack(kind: Any, value: Any, schema: dict[str, list[tuple[str, Any]]], texts: dict[str, int]) -> Any:
    if value is None:
        return None
    if kind == "text":
        return texts.setdefault(value, len(texts))
    if kind == "raw":
        return _rounded(value)
    if isinstance(kind, list):
        return [_pack(kind[1], item, schema, texts) for item in value]
    return [_pack(declared, getattr(value, name), schema, texts) for name, declared in schema[kind]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    return value
