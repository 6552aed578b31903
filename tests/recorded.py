"""Texts on record beside the tests, so that a change shows in review."""

from __future__ import annotations

import os
from pathlib import Path


def check_recorded(path: Path, text: str) -> None:
    """Compare a text with the one on record. With HIDET_DIST_RECORD=1 in the environment, record it instead."""
    if os.environ.get("HIDET_DIST_RECORD") == "1":
        path.write_text(text, encoding="utf-8")
    on_record = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = zip(text.splitlines(), on_record.splitlines(), strict=False)
    first = next((f"; first: {new!r}, on record {old!r}" for new, old in lines if new != old), "")
    assert text == on_record, f"{path.name} differs from the record{first}. HIDET_DIST_RECORD=1 renews it."
