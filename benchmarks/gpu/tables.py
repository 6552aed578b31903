"""The tables of a run on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

LONGEST = 12
"""Kernels of a variant that are shown one by one."""
_MIB = 2.0**20


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _mebibytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _MIB:.1f}"


def cases_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """Each variant's median call, what of it kernels and collectives take, and its ratio to torch.compile."""
    table = _table("Median time of a call [ms]", "call", "kernels", "collectives", "error", "of torch.compile")
    for own in cases.values():
        compiled = own["median_seconds"].get("torch_compile")
        for number, (variant, seconds) in enumerate(own["median_seconds"].items()):
            profile = own["profile"].get(variant, {})
            parts = (profile.get("kernel_seconds"), profile.get("collective_seconds"))
            error = own["largest_error"].get(variant)
            table.add_row(
                "" if number else own["title"],
                variant,
                *map(_milliseconds, (seconds, *parts)),
                "-" if error is None else f"{error:.1e}",
                f"{seconds / compiled:.2f}" if compiled else "-",
            )
        table.add_section()
    return table


def memory_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """The memory of a device: by the plan, by the compiled program, and measured."""
    table = _table("Memory of a rank [MiB]", "weights", "workspace", "planned", "held")
    for own in cases.values():
        for number, (variant, profile) in enumerate(own["profile"].items()):
            built = own["built"].get(variant.split("_")[1], {}) if variant.startswith("hidet_") else {}
            figures = (built.get("weight_bytes"), built.get("workspace_bytes"), built.get("planned_bytes"))
            held = _mebibytes(profile.get("device_bytes"))
            table.add_row("" if number else own["title"], variant, *map(_mebibytes, figures), held)
        table.add_section()
    return table


def kernels_table(case: Mapping[str, Any]) -> Table:
    """The kernels that take longest, by variant."""
    table = _table(f"Kernels of {case['title']} [ms]", "kernel", "writes", "count", "time")
    for variant, profile in case["profile"].items():
        for own in profile.get("kernels", ())[:LONGEST]:
            table.add_row("", variant, own["name"], own["writes"], str(own["count"]), _milliseconds(own["seconds"]))
        table.add_section()
    return table
