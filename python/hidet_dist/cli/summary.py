"""The summary of a plan that ``hidet-dist plan`` prints, as text or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from hidet_dist.cli.facts import Facts
from hidet_dist.cli.quantities import bytes_text, seconds_text
from hidet_dist.progress import report_console
from hidet_dist.report.data import Report
from hidet_dist.report.reasons import operator_name

_EXACT_GAP = 1e-12  # a relative gap that is rounding
_EQUAL_FRACTION = 1e-6  # times that differ by less than this fraction are equal


def summarize(report: Report) -> dict[str, Any]:
    """Summarize a report as plain JSON values: times in seconds, memory in bytes, the gap as a fraction of 1."""
    memory, search = report.memory, report.search
    peak = memory.peak
    searched = search is not None and search.mode == "search"
    return {
        "title": report.title,
        "mesh": dict(zip(report.mesh_axes, report.mesh_shape, strict=True)),
        "shares": {axis: list(n) for axis, n in zip(report.mesh_axes, report.mesh_shares, strict=False) if n},
        "device": report.machine.device,
        "seconds": report.makespan_seconds,
        "seconds_without_overlap": report.seconds,
        "communication_seconds": sum(collective.seconds for collective in report.communications),
        "hidden_seconds": sum(collective.hidden_seconds for collective in report.communications),
        "bound_seconds": search.bound_seconds if search is not None and searched else None,
        "gap": search.gap if search is not None and searched else None,
        "time_limit_reached": search is not None and search.time_limit_reached,
        "memory": {
            "peak_bytes": memory.held_bytes[peak],
            "budget_bytes": memory.budget_bytes,
            "peak_at": _operator_text(report, peak // memory.points_per_operator),
            **_bytes_by_kind(report, peak),
            "peak_bytes_of_ranks": [rank.peak_bytes for rank in memory.ranks],
        },
        "collectives": _collectives(report),
        "runner_up": _runner_up(report),
    }


def _operator_text(report: Report, number: int) -> str:
    """Name an operator by its number; the number after the last one stands for the graph outputs."""
    return operator_name(report.operators[number]) if number < len(report.operators) else "graph outputs"


def _bytes_by_kind(report: Report, point: int) -> dict[str, int]:
    """Sum the bytes that a device holds at a program point, by kind of tensor."""
    totals = {"weights_bytes": 0, "inputs_and_outputs_bytes": 0, "activations_bytes": 0}
    kinds = {"weight": "weights_bytes", "input": "inputs_and_outputs_bytes", "output": "inputs_and_outputs_bytes"}
    for holding in report.memory.holdings:
        if holding.begin <= point <= holding.end:
            totals[kinds.get(holding.what, "activations_bytes")] += holding.nbytes
    return totals


def _collectives(report: Report) -> dict[str, dict[str, float]]:
    """Count the collectives of each kind, and sum their bytes and seconds."""
    totals: dict[str, dict[str, float]] = {}
    for communication in report.communications:
        total = totals.setdefault(communication.kind, {"count": 0, "bytes": 0, "seconds": 0.0})
        total["count"] += 1
        total["bytes"] += communication.nbytes
        total["seconds"] += communication.seconds
    return dict(sorted(totals.items()))


def _runner_up(report: Report) -> dict[str, Any] | None:
    """Return the best choice that differs from the plan's: that of the lowest bound, then of the least time."""
    others = [(operator, operator.runner_up) for operator in report.operators if operator.runner_up is not None]
    if not others:
        return None
    operator, choice = min(others, key=lambda other: (other[1].at_least_seconds or 0.0, other[1].alone_seconds))
    return {
        "operator": _operator_text(report, operator.index),
        "spec": choice.spec,
        "at_least_seconds": choice.at_least_seconds,
        "alone_seconds": choice.alone_seconds,
    }


def print_summary(report: Report, as_json: bool) -> None:
    """Print the summary of a report, as JSON or as text."""
    if as_json:
        print(json.dumps(summarize(report), indent=1))
    else:
        show(report, report_console())


def show(report: Report, console: Console) -> None:
    """Print the summary of a report as text."""
    summary = summarize(report)
    memory = summary["memory"]
    facts = Facts(f"{report.title or 'Plan'} on {mesh_text(summary)}")
    overlap = ""
    if (sequential := seconds_text(summary["seconds_without_overlap"])) != seconds_text(summary["seconds"]):
        overlap = f" ({sequential} without overlap)"
    facts.add("predicted time", f"{seconds_text(summary['seconds'])} per run{overlap}")
    if summary["bound_seconds"] is not None:
        distance = f"at most {summary['gap']:.2%}" if summary["gap"] > _EXACT_GAP else "none: the plan is optimal"
        least = f"no plan takes less than {seconds_text(summary['bound_seconds'])}"
        if overlap:
            distance = f"{summary['gap']:.2%}" if summary["gap"] > _EXACT_GAP else "nothing"
            distance = f"the least time without overlap that was found is at most {distance} above the bound"
            least += " without overlap; times with overlap have no bound"
        facts.add("distance from the bound", f"{distance}; {least}")
    if summary["time_limit_reached"]:
        facts.add("", "the search was cut short by its time limit")
    facts.add("communication", communication_text(summary))
    facts.add("memory of a device", _memory_text(memory))
    facts.add("runner-up", _runner_up_text(summary["runner_up"], report.seconds))
    facts.print(console)


def mesh_text(summary: dict[str, Any]) -> str:
    """Write the mesh and the device, such as ``2 node x 8 gpu H100``, with the shares of uneven axes."""
    mesh = summary["mesh"]
    sizes = " x ".join(f"{size} {name}" if len(mesh) > 1 else str(size) for name, size in mesh.items())
    shares = ", ".join(f"{axis} = {':'.join(map(str, of_axis))}" for axis, of_axis in summary["shares"].items())
    return f"{sizes} {summary['device']}" + (f" in shares {shares}" if shares else "")


def _memory_text(memory: dict[str, Any]) -> str:
    """Write the peak of a device's memory, where it is, and its parts."""
    parts = {
        "weights": "weights_bytes",
        "inputs and outputs": "inputs_and_outputs_bytes",
        "activations": "activations_bytes",
    }
    held = ", ".join(f"{name} {bytes_text(memory[key])}" for name, key in parts.items())
    peak, budget = bytes_text(memory["peak_bytes"]), bytes_text(memory["budget_bytes"])
    ranks = ", ".join(map(bytes_text, memory["peak_bytes_of_ranks"]))
    return f"peak {peak} of {budget} at {memory['peak_at']}: {held}" + (f"; by rank {ranks}" if ranks else "")


def communication_text(summary: dict[str, Any]) -> str:
    """Write the time of communication, and the collectives by kind."""
    if not summary["collectives"]:
        return "none"
    kinds = ", ".join(
        f"{total['count']} {kind} ({bytes_text(total['bytes'])})" for kind, total in summary["collectives"].items()
    )
    hidden = summary["hidden_seconds"]
    overlap = f", {seconds_text(hidden)} of it beside computation" if hidden else ""
    return f"{seconds_text(summary['communication_seconds'])}{overlap}: {kinds}"


def _runner_up_text(runner_up: dict[str, Any] | None, seconds: float) -> str:
    """Write a runner-up, and what it adds to the ``seconds`` of the plan."""
    if runner_up is None:
        return "there is no other choice"
    bound = runner_up["at_least_seconds"]
    added = max(0.0, (runner_up["alone_seconds"] if bound is None else bound) - seconds)
    relation = "up to" if bound is None else "at least"
    cost = f"{relation} {seconds_text(added)} more" if added > _EQUAL_FRACTION * seconds else "equally fast"
    return f"{runner_up['operator']} as {runner_up['spec']}: {cost}"
