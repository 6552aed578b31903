"""Sizes, times and meshes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.cli.quantities import bytes_text, seconds_text
from hidet_dist.errors import ConfigError
from hidet_dist.options.texts import parse_bytes, parse_mesh


@pytest.mark.parametrize(
    ("text", "count"),
    [("60GiB", 60 * 2**30), ("60GB", 60 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), ("2k", 2000), ("3b", 3)],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1e9", "60 gigabytes", "0.1"])
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.integers(1, 2**52))
def test_a_size_that_is_printed_is_read_as_nearly_the_same(count):
    assert parse_bytes(bytes_text(count)) == pytest.approx(count, rel=0.006)


def test_times_have_three_digits_and_a_unit():
    assert [seconds_text(s) for s in (0.0413, 1.0, 3.21e-6, 0.99999, 5e-9, 0, -0.002)] == [
        "41.3 ms", "1.00 s", "3.21 µs", "1.00 s", "5.00 ns", "0 s", "-2.00 ms",
    ]  # fmt: skip


def test_meshes_are_read():
    assert parse_mesh("8") == [8]
    assert parse_mesh("2x8") == parse_mesh("2,8") == [2, 8]
    for text in ("", "x", "2x", "2*8", "two"):
        with pytest.raises(ConfigError, match="not a mesh"):
            parse_mesh(text)
