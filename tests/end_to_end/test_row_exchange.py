"""Rows that go to experts of other processes and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.dispatch import build, case

from .conftest import serve


@pytest.mark.parametrize(("ranks", "dtype", "sizes"), [(2, "float32", [6]), (3, "int32", [3, 300])])
def test_rows_go_to_experts_and_back(tmp_path: Path, ranks: int, dtype: str, sizes: list[int]) -> None:
    artifacts = tmp_path / "artifacts"
    symbols = {"symbols": {"tokens": {"expected": 12, "multiple_of": ranks}}} if len(sizes) > 1 else {}
    build(artifacts, ranks, dtype, "tokens" if symbols else sizes[0], symbols)
    for seed, size in enumerate(sizes):
        x, chosen, expected = case(ranks, size, seed)
        for (y,) in serve(ranks, artifacts, [x.astype(dtype), chosen], tmp_path):
            np.testing.assert_array_equal(y, expected)
