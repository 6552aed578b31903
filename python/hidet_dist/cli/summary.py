"""The summary of a plan: what ``hidet-dist plan`` prints, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hidet_dist.cli.quantities import bytes_text, seconds_text
from hidet_dist.progress import report_console
from hidet_dist.report.data import Report


def summarize(report: Report) -> dict[str, Any]:
    """The summary of a report as plain JSON values: seconds, bytes, and shares of 1."""
    sent = sum(one.seconds for one in report.communications)
    memory = report.memory
    point = memory.peak
    at = point // memory.points_per_operator
    search = report.search
    return {
        "title": report.title,
        "mesh": dict(zip(report.mesh_axes, report.mesh_shape, strict=True)),
        "device": report.machine.device,
        "seconds": report.makespan_seconds,
        "seconds_without_overlap": report.seconds,
        "communication_seconds": sent,
        "hidden_seconds": sum(one.hidden_seconds for one in report.communications),
        "bound_seconds": None if search is None or search.mode != "search" else search.bound_seconds,
        "gap": None if search is None or search.mode != "search" else search.gap,
        "time_limit_reached": search is not None and search.time_limit_reached,
        "memory": {
            "peak_bytes": memory.held_bytes[point],
            "budget_bytes": memory.budget_bytes,
            "peak_at": _operator_text(report, at),
            **_held(report, point),
        },
        "collectives": _collectives(report),
        "runner_up": _runner_up(report),
    }


def _operator_text(report: Report, number: int) -> str:
    if number >= len(report.operators):
        return "graph outputs"
    operator = report.operators[number]
    return f"{operator.kind} {number}" + (f" ({operator.label or operator.module})" if operator.module else "")


def _held(report: Report, point: int) -> dict[str, int]:
    """Bytes held at a program point, by kind."""
    held = {"weights_bytes": 0, "inputs_and_outputs_bytes": 0, "activations_bytes": 0}
    kinds = {"weight": "weights_bytes", "input": "inputs_and_outputs_bytes", "output": "inputs_and_outputs_bytes"}
    for holding in report.memory.holdings:
        if holding.begin <= point <= holding.end:
            held[kinds.get(holding.what, "activations_bytes")] += holding.nbytes
    return held


def _collectives(report: Report) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for communication in report.communications:
        total = totals.setdefault(communication.kind, {"count": 0, "bytes": 0, "seconds": 0.0})
        total["count"] += 1
        total["bytes"] += communication.nbytes
        total["seconds"] += communication.seconds
    return dict(sorted(totals.items()))


def _runner_up(report: Report) -> dict[str, Any] | None:
    """The best choice that differs from the plan's: of the least bound, then the least seconds of its operator."""
    others = [(operator, operator.runner_up) for operator in report.operators if operator.runner_up is not None]
    if not others:
        return None
    operator, choice = min(others, key=lambda one: (one[1].at_least_seconds or 0.0, one[1].alone_seconds))
    return {
        "operator": _operator_text(report, operator.index),
        "spec": choice.spec,
        "at_least_seconds": choice.at_least_seconds,
        "alone_seconds": choice.alone_seconds,
    }


def print_summary(report: Report, as_json: bool) -> None:
    """Print the summary of a report, for people or for programs."""
    if as_json:
        print(json.dumps(summarize(report), indent=1))
    else:
        show(report, report_console())


def show(report: Report, console: Console) -> None:
    """Print the summary of a report."""
    own = summarize(report)
    memory = own["memory"]
    console.print(Text(f"{report.title or 'Plan'} on {_mesh_text(own)}", style="bold"))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, text: str) -> None:
        table.add_row(Text(name), Text(text))

    overlap = ""
    if (alone := seconds_text(own["seconds_without_overlap"])) != seconds_text(own["seconds"]):
        overlap = f" ({alone} without overlap)"
    line("predicted time", f"{seconds_text(own['seconds'])} a run{overlap}")
    if own["bound_seconds"] is not None:
        distance = f"at most {own['gap']:.2%}" if own["gap"] > 1e-12 else "none: the plan is optimal"
        line("distance from the bound", f"{distance}; no plan takes less than {seconds_text(own['bound_seconds'])}")
    if own["time_limit_reached"]:
        line("", "the search was cut short by its time limit")
    line("communication", _communication_text(own))
    line(
        "memory of a device",
        f"{bytes_text(memory['peak_bytes'])} of {bytes_text(memory['budget_bytes'])} at {memory['peak_at']}: weights "
        f"{bytes_text(memory['weights_bytes'])}, inputs and outputs {bytes_text(memory['inputs_and_outputs_bytes'])}, "
        f"activations {bytes_text(memory['activations_bytes'])}",
    )
    line("runner-up", _runner_up_text(own, report.seconds))
    console.print(table)


def _mesh_text(own: dict[str, Any]) -> str:
    sizes = " x ".join(f"{size} {name}" if len(own["mesh"]) > 1 else str(size) for name, size in own["mesh"].items())
    return f"{sizes} {own['device']}"


def _communication_text(own: dict[str, Any]) -> str:
    if not own["collectives"]:
        return "none"
    kinds = ", ".join(f"{one['count']} {kind} ({bytes_text(one['bytes'])})" for kind, one in own["collectives"].items())
    hidden = f", {seconds_text(own['hidden_seconds'])} of it beside computation" if own["hidden_seconds"] else ""
    return f"{seconds_text(own['communication_seconds'])}{hidden}: {kinds}"


def _runner_up_text(own: dict[str, Any], seconds: float) -> str:
    other = own["runner_up"]
    if other is None:
        return "there is no other choice"
    least = other["at_least_seconds"]
    more = max(0.0, other["alone_seconds" if least is None else "at_least_seconds"] - seconds)
    how = "up to" if least is None else "at least"
    cost = f"{how} {seconds_text(more)} more" if more > 1e-6 * seconds else "no longer"
    return f"{other['operator']} as {other['spec']}: {cost}"
