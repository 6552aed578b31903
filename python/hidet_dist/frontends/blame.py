"""Which field of a configuration is to blame for an error: the one without which the error does not occur."""

from __future__ import annotations

import heapq
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.limits import MOST_CONFIGURATION_FIELDS

Field = tuple[tuple[str, ...], Any]
"""The names of a field, the outermost first, and its value."""

_MOST_NAMED = 3  # sizes that contradict each other
_MOST_SECONDS = 8.0  # of processor time, behind which nothing is tried any more
_MOST_TEXT = 400  # characters of an error


def fields_to_blame(
    fields: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], object], said: str, tried: str
) -> list[Field]:
    """Find the field that alone leads to an error.

    Parameters
    ----------
    fields: mapping
        The fields of a configuration, some of which have fields themselves.
    attempt: callable
        Does with other fields what led to the error.
    said: str
        The error, which may name a field.
    tried: str
        The error of ``attempt`` with the fields as they are, on one line.

    Returns
    -------
    list of tuple
        The names of the field, the outermost first, and its value; behind it, where it is a size, others beside it that
        it contradicts. Empty if no field alone is to blame.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Search(fields, attempt, said, tried, time.thread_time() + _MOST_SECONDS).found()


def one_line(error: Exception) -> str:
    """Show an error of a library on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MOST_TEXT else f'{text[:_MOST_TEXT]}...'}"


@dataclass(frozen=True)
class _Search:
    """A search for the field to blame, as :func:`fields_to_blame`, until so much processor time."""

    fields: Mapping[str, Any]
    attempt: Callable[[Mapping[str, Any]], object]
    said: str
    tried: str
    until: float

    def found(self) -> list[Field]:
        suspects = _suspects(self.fields, self.said)
        following = []
        for number, (path, value) in enumerate(suspects):
            if time.thread_time() > self.until:
                break
            error = self._error_without(path)
            if error is None:
                others = suspects[number + 1 :] if _is_size(value) else []
                return [(path, value), *self._contradicted(path, others)]
            # Where another field is wrong as well, the error of that one comes next.
            if error != self.tried and _is_named(path[-1], self.said):
                following.append((path, value))
        return following[:1]

    def _contradicted(self, path: tuple[str, ...], suspects: Sequence[Field]) -> list[Field]:
        """List the sizes beside the field at ``path`` without which there is no error, either."""
        found: list[Field] = []
        for other, value in suspects:
            if len(found) == _MOST_NAMED - 1 or time.thread_time() > self.until:
                break
            if other[:-1] == path[:-1] and _is_size(value) and self._error_without(other) is None:
                found.append((other, value))
        return found

    def _error_without(self, path: tuple[str, ...]) -> str | None:
        """Return the error for the fields without the one at ``path``.

        None if there is none, or none with 1 instead of its value: another field may fit 1, which divides any size, and
        not the default.
        """
        raised: str | None = None
        for one in ({}, {path[-1]: 1}):
            changed = dict(self.fields)
            inner = changed
            for name in path[:-1]:
                inner[name] = dict(inner[name])
                inner = inner[name]
            del inner[path[-1]]
            inner.update(one)
            try:
                self.attempt(changed)
            except Exception as error:  # whatever a model's code raises
                raised = raised or one_line(error)
            else:
                return None
        return raised


def _suspects(fields: Mapping[str, Any], said: str) -> list[Field]:
    """Order fields of all depths, those to blame for an error first.

    These are those that it names, those whose value it has, those whose type it has beside numbers', and odd numbers.
    """
    values = set(re.findall(r"'[^']*'|-?[\w.]+", said))

    def innocence(field: Field) -> tuple[bool | int, ...]:
        path, value = field
        return (
            path == ("architectures",),  # without it a model is a smaller one, which may lack what raises the error
            not _is_named(path[-1], said),
            shown(value) not in values,
            _is_number(value) or f"'{type(value).__name__}'" not in values,
            not _is_number(value) or 0 < value < math.inf,
            isinstance(value, Mapping),  # without it, its part of the model has all of the default sizes
            -abs(value) if isinstance(value, int) else 0,
        )

    return heapq.nsmallest(MOST_CONFIGURATION_FIELDS, _all_fields(fields, ()), innocence)


def _all_fields(fields: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Field]:
    for name, value in fields.items():
        if name not in ("model_type", "transformers_version"):
            yield (*path, name), value
            if isinstance(value, Mapping):
                yield from _all_fields(value, (*path, name))


def _is_named(name: str, said: str) -> bool:
    """Whether an error names a field, with underscores or spaces."""
    return name in said or name in said.replace(" ", "_")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    """Whether a value may be a size, or sizes."""
    return (_is_number(value) and 0 < value < math.inf) or isinstance(value, list | tuple)
