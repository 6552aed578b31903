"""JSON forms of dataclasses: what is written and read follows from the types of their fields.

A dataclass is an object with a key for each field, in the order of the fields. Fields are text, numbers, flags, None,
dataclasses, tuples, mappings and unions of these. Two kinds of classes have forms of their own: one with the class
method ``parse`` is text, as ``str`` writes it, and one with ``to_plain`` and ``from_plain`` is what these make of it.

Numbers are finite, and from 0 to :data:`LARGEST`, unless the annotation of the field has another :class:`Range`. A
field with a default may be missing; one that is annotated with :data:`OMITTED` is left out where it has its default.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import SpecError

LARGEST: Final = 2**63 - 1
"""The largest accepted number of bytes, elements or seconds: sums of larger ones could overflow."""

_MOST_DIGITS = 18  # of a key that is a whole number


@dataclass(frozen=True)
class Range:
    """The annotation of a number: the least and the greatest that are accepted."""

    least: float
    greatest: float = LARGEST


@dataclass(frozen=True)
class Key:
    """The annotation of a field whose key in JSON is not its name."""

    name: str


class _Mark:
    """An annotation that has no values."""


OMITTED: Final = _Mark()
"""The annotation of a field that is not written where it has its default."""

UNWRITTEN: Final = _Mark()
"""The annotation of a field that has no JSON form: it is not written, and has its default when it is read."""

Positive = Annotated[int, Range(1)]
"""A whole number of 1 or more."""

Signed = Annotated[float, Range(-LARGEST)]
"""A number that may be below 0."""

RUNS: Final = _Mark()
"""The annotation of ascending whole numbers that are written as ranges, the first and the last number of each."""

MOST_RUN_NUMBERS: Final = 2**24
"""The limit of the numbers that ranges stand for, more than any plan file can hold."""

T = TypeVar("T")
_Reader = Callable[[Any], Any]


class _Unfit(Exception):
    """A value that does not fit its type: the path to it, from the inside out, and what it must be."""

    def __init__(self, requirement: str):
        super().__init__(requirement)
        self.path: list[str] = []


def encode(value: Any) -> Any:
    """Convert a dataclass, or a value of another type that its fields may have, to plain JSON values."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): encode(each) for key, each in value.items()}
    kind: Any = type(value)
    if hasattr(kind, "to_plain"):
        return value.to_plain()
    if hasattr(kind, "parse"):
        return str(value)
    return {
        form.key: _runs(part) if form.runs else encode(part)
        for form in _forms(kind)
        if form.written
        for part in (getattr(value, form.name),)
        if not (form.omitted and part == form.default)
    }


def decode(kind: type[T], value: Any, what: str) -> T:
    """Convert plain JSON values to an instance of the dataclass ``kind``.

    Parameters
    ----------
    what: the name of the value in messages, such as ``the report``.

    Raises
    ------
    SpecError
        When a value does not fit its type, a key is unknown, or one is missing; the message says where.
    """
    try:
        read = _reader(typing.cast(Any, kind))
        result: T = read(value)
    except _Unfit as error:
        path = "".join(reversed(error.path))
        raise SpecError(f"{what}{path} {error}.") from None
    return result


def encode_with_format(value: Any, number: int) -> dict[str, Any]:
    """Convert a dataclass to plain JSON values, after the number of the format in which it is written."""
    return {"format": number, **encode(value)}


def of_format(value: Any, number: int) -> dict[str, Any]:
    """Return what :func:`decode` takes of a JSON value that :func:`encode_with_format` made.

    Raises
    ------
    SpecError
        When the value is not an object, or is of another format; the message is a clause without a full stop.
    """
    if not isinstance(value, dict):
        raise SpecError(f"it must be an object; got {shown(value)}")
    fields = dict(value)
    found = fields.pop("format", None)
    if type(found) is not int or found != number:
        raise SpecError(f"it has format {shown(found)}, and this version reads format {number} only")
    return fields


@dataclass(frozen=True)
class _FieldForm:
    """How a field is written: its name, key and default, and the marks that it has."""

    name: str
    key: str
    default: Any
    required: bool
    written: bool
    omitted: bool
    runs: bool


@functools.cache
def _forms(kind: Any) -> tuple[_FieldForm, ...]:
    """List how the fields of a dataclass are written."""
    hints = _hints(kind)
    forms = []
    for declared in dataclasses.fields(kind):
        marks = getattr(hints[declared.name], "__metadata__", ())
        key = next((mark.name for mark in marks if isinstance(mark, Key)), declared.name)
        default = declared.default
        if declared.default_factory is not dataclasses.MISSING:
            default = declared.default_factory()
        required = default is dataclasses.MISSING
        shown_as = (UNWRITTEN not in marks, OMITTED in marks, RUNS in marks)
        forms.append(_FieldForm(declared.name, key, default, required, *shown_as))
    return tuple(forms)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Make the function that converts JSON values to a type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        if RUNS in inner:
            return _numbers_of_runs
        allowed = next((mark for mark in inner[1:] if isinstance(mark, Range)), None)
        return _reader(inner[0]) if allowed is None else _number(inner[0], allowed)
    if origin in (typing.Union, types.UnionType):
        return _union(inner)
    if origin is tuple:
        return _sequence(_reader(inner[0])) if inner[-1] is Ellipsis else _fixed([_reader(each) for each in inner])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(inner[0], _reader(inner[1]))
    if kind in (int, float):
        return _number(kind, Range(0))
    if kind in _PLAIN:
        return _PLAIN[kind]
    for method in ("from_plain", "parse"):
        if hasattr(kind, method):
            return _own(getattr(kind, method), text=method == "parse")
    return _object(kind)


def _unfit(requirement: str, value: Any) -> _Unfit:
    return _Unfit(f"must be {requirement}; got {shown(value)}")


def _at(read: _Reader, value: Any, place: Any) -> Any:
    """Read a part of a value; an error has the place of the part."""
    try:
        return read(value)
    except _Unfit as error:
        error.path.append(f"[{place}]" if isinstance(place, int) else f".{place}")
        raise


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _unfit("text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _unfit("text without lone surrogates", value) from None
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unfit("true or false", value)
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise _unfit("null", value)


_PLAIN: dict[Any, _Reader] = {str: _text, bool: _flag, type(None): _nothing}


def _number(kind: Any, allowed: Range) -> _Reader:
    """Read a whole number, or a number; one that is whole stays an int, so that it is written as it was."""
    what = "a whole number" if kind is int else "a number"

    def read(value: Any) -> Any:
        fits = is_whole(value) if kind is int else is_finite(value)
        if not fits or not allowed.least <= value <= allowed.greatest:
            raise _unfit(f"{what} from {allowed.least} to {allowed.greatest}", value)
        return value

    return read


def _own(convert: Callable[[Any], Any], text: bool) -> _Reader:
    """Read a value by its class's own method, which raises ``SpecError``."""

    def read(value: Any) -> Any:
        try:
            return convert(_text(value) if text else value)
        except SpecError as error:
            raise _Unfit(f"is malformed: {str(error).rstrip('.')}") from error

    return read


def _sequence(element: _Reader) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unfit("a list", value)
        return tuple([_at(element, each, number) for number, each in enumerate(value)])

    return read


def _fixed(elements: list[_Reader]) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(elements):
            raise _unfit(f"a list of {len(elements)}", value)
        pairs = enumerate(zip(elements, value, strict=True))
        return tuple([_at(element, each, number) for number, (element, each) in pairs])

    return read


def _runs(numbers: tuple[int, ...]) -> list[list[int]]:
    """Write ascending numbers as ranges, both ends included."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _numbers_of_runs(value: Any) -> tuple[int, ...]:
    """Read what :func:`_runs` wrote."""
    whole = _number(int, Range(0))
    runs = _sequence(_fixed([whole, whole]))(value)
    if sum(max(0, last - first + 1) for first, last in runs) > MOST_RUN_NUMBERS:
        raise _Unfit(f"has more than {MOST_RUN_NUMBERS} numbers")
    return tuple(number for first, last in runs for number in range(first, last + 1))


def _mapping(key: Any, element: _Reader) -> _Reader:
    def read_key(text: str) -> Any:
        if key is str:
            return _text(text)
        if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS:
            raise _Unfit(f"has the key {shown(text)}; its keys are whole numbers")
        return int(text)

    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _unfit("an object", value)
        return {read_key(text): _at(element, each, text) for text, each in value.items()}

    return read


def _union(kinds: tuple[Any, ...]) -> _Reader:
    """Read a value of one of several types: of a plain one that it has, otherwise of the one that is not plain."""
    plain = {kind: _reader(kind) for kind in kinds if kind in (str, int, float, bool, type(None))}
    others = [_reader(kind) for kind in kinds if kind not in plain]
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in plain)
    assert len(others) <= 1, kinds

    def read(value: Any) -> Any:
        if type(value) in plain:
            return plain[type(value)](value)
        if float in plain and isinstance(value, int):
            return plain[float](value)
        if not others:
            raise _unfit(names, value)
        return others[0](value)

    return read


def _object(kind: Any) -> _Reader:
    hints = _hints(kind)
    forms = {form.key: (form, _reader(hints[form.name])) for form in _forms(kind) if form.written}
    required = [form.key for form, _ in forms.values() if form.required]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unfit("an object", value)
        values = {}
        for key, part in value.items():
            if key not in forms:
                raise _Unfit(f"has the unknown key {shown(key)}")
            form, reader = forms[key]
            values[form.name] = _at(reader, part, key)
        for key in required:
            if key not in value:
                raise _Unfit(f"has no {key!r}")
        return kind(**values)

    return read
