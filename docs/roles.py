"""Docstrings for mkdocstrings: Sphinx roles become cross-references, and attributes have types and descriptions."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?P<kind>\w+):`~?(?P<target>[\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = rewrite(_described(obj.docstring.value), obj)


def rewrite(text: str, place: griffe.Object | None = None) -> str:
    """Turn the roles of a text, which stands at ``place``, into cross-references, and ``::`` into a colon."""
    return re.sub(r"::$", ":", _ROLE.sub(lambda match: _reference(match["target"], place), text), flags=re.MULTILINE)


_ATTRIBUTES = re.compile(r"^Attributes\n-+\n.*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.+)$", re.MULTILINE)
_LONGEST_TYPE = 60  # characters


def _described(text: str) -> str:
    """Move what stands behind an attribute's name to the next line, unless it is a type.

    In the numpy style, a type stands there. Dataclasses have types already, so that their docstrings have descriptions,
    which are sentences or long.
    """

    def moved(match: re.Match[str]) -> str:
        is_type = len(match["text"]) <= _LONGEST_TYPE and not match["text"].endswith((".", ";", ","))
        return match[0] if is_type else f"{match['names']}:\n    {match['text']}"

    return _ATTRIBUTES.sub(lambda section: _ATTRIBUTE.sub(moved, section[0]), text)


def _reference(target: str, place: griffe.Object | None) -> str:
    """A link to what a role names: a full path, or a name that is known where the docstring stands."""
    first, dot, rest = target.partition(".")
    try:
        path = target if first == "hidet_dist" or place is None else place.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        return f"`{target}`"
    return f"[`{target}`][{path}]" if path.startswith("hidet_dist.") else f"`{target}`"
