"""The page of what is changed in hidet."""

from __future__ import annotations

import re
from pathlib import Path

import hidet_dist.compat

PAGE = Path(__file__).parents[2] / "docs" / "design" / "hidet.md"
HELPERS = {"definitions", "native_call", "on_import", "quick", "replacing"}
"""The modules that change nothing themselves."""


def test_the_page_lists_every_change() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    modules = {path.stem for path in Path(hidet_dist.compat.__file__).parent.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(modules - HELPERS)
