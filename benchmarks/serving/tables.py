"""The tables of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.serving.goals import Goal

LONGEST = 15
"""Kernels of a variant that are shown one by one."""


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _columns(cases: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """The variants of all cases, in the order of their first."""
    return list(dict.fromkeys(variant for own in cases.values() for variant in own[key]))


def answers_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """The differences between the outputs of each variant and those of PyTorch eager."""
    columns = _columns(cases, "max_abs_error")
    table = _table("Largest absolute difference from PyTorch eager's answers", "model", columns)
    for own in cases.values():
        errors = own["max_abs_error"]
        table.add_row(own["title"], *(f"{errors[name]:.1e}" if name in errors else "-" for name in columns))
    return table


def times_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """The median of each variant's calls."""
    columns = _columns(cases, "median_seconds")
    table = _table("Median time of a call [ms]", "model", columns)
    for own in cases.values():
        seconds = own["median_seconds"]
        table.add_row(own["title"], *(f"{seconds[name] * 1e3:.1f}" if name in seconds else "-" for name in columns))
    return table


def goals_table(rows: Mapping[str, Mapping[str, Goal]]) -> Table:
    """Each ratio, with its goal."""
    table = _table("Goals", "model", [])
    table.add_column("ratio")
    for column in ("value", "goal"):
        table.add_column(column, justify="right")
    table.add_column("")
    for title, goals in rows.items():
        for number, (name, goal) in enumerate(goals.items()):
            met = "[green]met[/]" if goal.met else "[bold red]not met[/]"
            bound = f"{'<=' if goal.at_most else '>='} {goal.bound:g}"
            table.add_row("" if number else title, name, f"{goal.value:.3g}", bound, met)
        table.add_section()
    return table


def prediction_table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """The predicted and the measured times."""
    table = _table("The cost model of this machine, as calibrated, against reality [ms]", "model", [])
    table.add_column("variant")
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for own in cases.values():
        for variant, predicted in own["predicted_seconds"].items():
            if variant in own["median_seconds"]:
                measured = own["median_seconds"][variant]
                figures = (f"{predicted * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{predicted / measured - 1:+.0%}")
                table.add_row(own["title"], variant, *figures)
    return table


def all_reduce_table(times: Mapping[str, Mapping[str, float]]) -> Table:
    """All-reduce through shared memory and through Gloo, by bytes."""
    table = _table("All-reduce between two processes [us]", "bytes", ["shared memory", "Gloo", "ratio"])
    for nbytes, own in times.items():
        shared, gloo = own["shared_memory_seconds"] * 1e6, own["gloo_seconds"] * 1e6
        table.add_row(nbytes, f"{shared:.0f}", f"{gloo:.0f}", f"{own['ratio']:.1f}")
    return table


def kernels_table(title: str, parts: Mapping[str, float], profile: Mapping[str, Any]) -> Table:
    """The predicted time of each class of kernels, and the longest measured kernels."""
    table = _table(f"Kernels of {title} [ms]", "kernel", [])
    table.add_column("writes")
    for column in ("count", "predicted", "measured"):
        table.add_column(column, justify="right")
    for kernel, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        measured = f"{profile['communication_seconds'] * 1e3:.3f}" if kernel == "communication" else ""
        table.add_row(kernel, "", "", f"{seconds * 1e3:.3f}", measured)
    table.add_section()
    for own in profile["kernels"][:LONGEST]:
        table.add_row(own["name"], own["writes"], str(own["count"]), "", f"{own['seconds'] * 1e3:.3f}")
    others = profile["kernels"][LONGEST:]
    if others:
        seconds = sum(own["seconds"] for own in others)
        table.add_row("others", "", str(sum(own["count"] for own in others)), "", f"{seconds * 1e3:.3f}")
    return table
