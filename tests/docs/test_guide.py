"""The code of the guide and of the README, run as a reader would run it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.docs.blocks import blocks, run_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "rfcs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):
        run_page(page, tmp_path)


def test_most_of_the_guide_is_run():
    found = [block for page in PAGES for block in blocks(page) if block.language in {"python", "console"}]
    assert sum(block.run for block in found) > 0.7 * len(found)
