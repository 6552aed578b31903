"""What a wheel leaves out, by the list of ``pyproject.toml`` beside the folders."""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
TESTING_FOR_USERS = {"__init__.py", "minilm.py"}


def test_the_wheel_leaves_out_what_only_tests_use() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (override,) = listed["tool"]["scikit-build"]["overrides"]
    excluded = set(override["wheel"]["exclude"])
    modules = {file.name for file in (ROOT / "python" / "hidet_dist" / "testing").glob("*.py")} - TESTING_FOR_USERS
    assert excluded == {"hidet_dist/soundness/**", *(f"hidet_dist/testing/{name}" for name in modules)}
