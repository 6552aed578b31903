"""The summary of a plan of any number of stages that ``hidet-dist plan`` and ``build`` print, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hidet_dist.cli.facts import Facts
from hidet_dist.cli.quantities import bytes_text, count_text, seconds_text
from hidet_dist.cli.summary import communication_text, mesh_text, print_summary, summarize
from hidet_dist.codec import encode
from hidet_dist.progress import report_console
from hidet_dist.report.data import Report
from hidet_dist.spec import Plan, StagePlan
from hidet_dist.spec.pipeline import Pipeline


def print_plan(plan: Plan, reports: Sequence[Report], as_json: bool) -> None:
    """Print the summary of a plan with the report on each stage, as JSON or as text."""
    if plan.pipeline is None:
        print_summary(reports[0], as_json)
    elif as_json:
        print(json.dumps(summarize_pipeline(plan, plan.pipeline, reports), indent=1))
    else:
        show_pipeline(plan, plan.pipeline, reports, report_console())


def summarize_pipeline(plan: Plan, pipeline: Pipeline, reports: Sequence[Report]) -> dict[str, Any]:
    """Summarize a pipeline as plain JSON values: times in seconds, memory in bytes, the gap as a fraction of 1.

    ``seconds`` is the time of a call, and ``interval_seconds`` that between calls while the pipeline is full. Each
    stage has the values of :func:`hidet_dist.cli.summary.summarize`, its ranks, the seconds for which a micro-batch
    occupies it, messages included, and the bytes of a device's buffer for the inputs of the next micro-batch, which
    are in addition to the peak.
    """
    periods = pipeline.period_seconds([stage.makespan_seconds for stage in plan.stages])
    search = pipeline.search
    return {
        "title": reports[0].title,
        "seconds": plan.makespan_seconds,
        "interval_seconds": plan.interval_seconds,
        "micro_batches": pipeline.micro_batches,
        "search": None if search is None else {**encode(search), "gap": search.gap},
        "stages": [
            {
                "ranks": list(stage.ranks),
                "period_seconds": period,
                "buffer_bytes": buffer_bytes(pipeline, planned),
                **summarize(report),
            }
            for stage, planned, period, report in zip(pipeline.stages, plan.stages, periods, reports, strict=True)
        ],
        "messages": [
            {
                "tensor": one.tensor,
                "source": one.source.stage,
                "readers": [reader.stage for reader in one.readers],
                "bytes": one.nbytes,
                "seconds": one.seconds,
            }
            for one in pipeline.boundaries
        ],
    }


def buffer_bytes(pipeline: Pipeline, stage: StagePlan) -> int:
    """Compute the bytes of a device's buffer for the inputs of the next micro-batch, as the search counts them."""
    return sum(tensor.local_nbytes(stage.mesh) for tensor in stage.inputs) if pipeline.is_buffered else 0


def show_pipeline(plan: Plan, pipeline: Pipeline, reports: Sequence[Report], console: Console) -> None:
    """Print the summary of a pipeline as text."""
    summary = summarize_pipeline(plan, pipeline, reports)
    facts = Facts(f"{summary['title'] or 'Plan'} in {count_text(len(plan.stages), 'stage')}")
    count = pipeline.micro_batches
    calls = f"a call of {count} micro-batches" if count > 1 else "a call"
    facts.add(
        "predicted time",
        f"{seconds_text(summary['seconds'])} for {calls}; a call every "
        f"{seconds_text(summary['interval_seconds'])} while the pipeline is full",
    )
    if pipeline.search is not None:
        bound = seconds_text(pipeline.search.bound_seconds)
        serially = "" if plan.seconds == plan.makespan_seconds else ", without overlap"
        facts.add(
            "distance from the bound",
            f"at most {pipeline.search.gap:.2%} by {pipeline.search.objective}; no pipeline takes less than {bound}"
            f"{serially}",
        )
    sent = sum(one.nbytes for one in pipeline.boundaries)
    if pipeline.boundaries:
        facts.add(
            "between stages",
            f"{count_text(len(pipeline.boundaries), 'tensor')} ({bytes_text(sent)}) a micro-batch",
        )
    interval = max(stage["period_seconds"] for stage in summary["stages"])
    for number, (ranks, stage) in enumerate(zip(pipeline.stages, summary["stages"], strict=True)):
        first, last = ranks.ranks[0], ranks.ranks[-1]
        where = f"rank {first}" if first == last else f"ranks {first} to {last}"
        memory = stage["memory"]
        facts.add(f"stage {number}", f"{where}: {mesh_text(stage)}, {count_text(len(ranks.operators), 'operator')}")
        facts.add(
            "",
            f"busy {seconds_text(stage['period_seconds'])} a micro-batch, idle "
            f"{1 - stage['period_seconds'] / interval if interval else 0:.0%}; peak "
            f"{bytes_text(memory['peak_bytes'] + stage['buffer_bytes'])} of {bytes_text(memory['budget_bytes'])}"
            + (f", {bytes_text(stage['buffer_bytes'])} for the next micro-batch" if stage["buffer_bytes"] else ""),
        )
        facts.add("", f"communication: {communication_text(stage)}")
    facts.print(console)
