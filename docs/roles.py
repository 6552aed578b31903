"""Sphinx roles in docstrings (``:class:`hidet_dist.spec.Plan```) as the cross-references of mkdocstrings."""

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
            obj.docstring.value = rewrite(obj.docstring.value, obj)


def rewrite(text: str, place: griffe.Object | None = None) -> str:
    """Turn the roles of a text, which stands at ``place``, into cross-references, and ``::`` into a colon."""
    return re.sub(r"::$", ":", _ROLE.sub(lambda match: _reference(match["target"], place), text), flags=re.MULTILINE)


def _reference(target: str, place: griffe.Object | None) -> str:
    """A link to what a role names: a full path, or a name that is known where the docstring stands."""
    first, dot, rest = target.partition(".")
    try:
        path = target if first == "hidet_dist" or place is None else place.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        return f"`{target}`"
    return f"[`{target}`][{path}]" if path.startswith("hidet_dist.") else f"`{target}`"
