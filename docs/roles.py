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
            obj.docstring.value = _ROLE.sub(lambda match: _reference(match["target"], obj), obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)


def _reference(target: str, obj: griffe.Object) -> str:
    """A link to what a role names: a full path, or a name that is known where the docstring stands."""
    first, dot, rest = target.partition(".")
    try:
        path = target if first == "hidet_dist" else obj.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        return f"`{target}`"
    return f"[`{target}`][{path}]" if path.startswith("hidet_dist.") else f"`{target}`"
