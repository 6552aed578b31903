"""Artifacts for CPUs stand in for those for CUDA, whose weights lie in rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import weights_in_rows


@pytest.fixture(scope="module", autouse=True)
def rows() -> Iterator[None]:
    """Weights in rows."""
    with weights_in_rows():
        yield
