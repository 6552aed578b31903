"""Sizes, times and counts as text."""

from __future__ import annotations

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def bytes_text(count: float) -> str:
    """Write an amount of memory in bytes with three digits, such as ``3.20 GiB``."""
    sign, value = ("-" if count < 0 else ""), abs(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{_three_digits(value)} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes any value")


def seconds_text(seconds: float) -> str:
    """Write a time in seconds with three digits, such as ``41.3 ms``."""
    sign, value = ("-" if seconds < 0 else ""), abs(seconds)
    for factor, unit in _TIME_UNITS:
        if value >= 0.9995 * factor:
            return f"{sign}{_three_digits(value / factor)} {unit}"
    return f"{sign}{_three_digits(value / _TIME_UNITS[-1][0])} ns" if value else "0 s"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def count_text(count: int, noun: str) -> str:
    """Write a count, such as ``2 stages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
