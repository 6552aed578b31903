"""Fixtures of the tests of corrections of hidet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hidet_dist.compat.quick import quick_hidet


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Let hidet build operators quickly, as it does while this package plans and builds."""
    with quick_hidet():
        yield
