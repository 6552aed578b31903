"""``hidet-dist plan`` and ``hidet-dist build``: plan or build a model for a described machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hidet_dist.cli.quiet import quiet
from hidet_dist.cli.request import BATCH, SEQ, PlanRequest, check_destination
from hidet_dist.cli.stages import print_plan
from hidet_dist.errors import ConfigError
from hidet_dist.files import write_text
from hidet_dist.progress import Progress, report_console
from hidet_dist.report.data import Report, report_beside
from hidet_dist.spec import Plan


def trace(request: PlanRequest, weights: str | None) -> Any:
    """Convert the model to a graph; ``weights`` as for :func:`hidet_dist.frontends.load.load_model`."""
    with Progress() as progress, progress.task("Importing PyTorch and hidet") as task:
        from hidet_dist.frontends.load import load_model

        quiet()
        task.say(f"Tracing {request.title}")
        return load_model(
            request.model,
            dtype=request.value("dtype"),
            batch=request.value("batch", BATCH),
            seq=request.value("seq", SEQ),
            dims=request.value("dims", {}),
            weights=weights,
            architecture=request.value("architecture"),
            logits=request.value("logits"),
            dynamic=tuple(request.value("dynamic", {})),
        )


def plan(
    request: PlanRequest,
    out: Path | None,
    html: Path | None,
    export: Path | None,
    serving: Mapping[str, int | None],
    as_json: bool,
) -> None:
    """Plan a model and print the summary.

    Write the plan with its report to ``out``, the page to ``html`` and the problem that is solved to ``export``. The
    options ``serving`` must be left out.
    """
    request.check()
    if given := [name for name, value in serving.items() if value is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for plans with --serve.")
    if export is not None and "objective" in request.given:
        raise ConfigError("--export is for plans without stages; a pipeline is planned as many problems.")
    for path in (out, html, export):
        check_destination(path)

    distributed, optimization = request.configurations()
    graph = trace(request, None)

    from hidet_dist.phases import Traced

    prepared = Traced.of(graph, distributed, optimization).prepare()
    if export is not None:
        # Before planning, so that a problem without a solution, or a slow one, can be exported.
        unit = prepared.export_problem(export)
        if not as_json:
            report_console().print(f"Exported to {export}, with costs in units of {unit:.0e} s.")
    prepared.check_weights(required=False)
    planned = prepared.plan()
    reports = planned.reports(request.title)
    if "objective" not in request.given:
        reports = [replace(report, origin=request.origin()) for report in reports]
    if out is not None:
        _save(planned.plan, reports, out)
    pages = [] if html is None else _draw(reports, html)
    print_plan(planned.plan, reports, as_json)
    if len(pages) > 1 and not as_json:
        print(f"Written to {', '.join(map(str, pages))}.")


def _save(plan: Plan, reports: Sequence[Report], out: Path) -> None:
    """Write a plan, and the report on each stage beside it; remove reports on other plans that the file held."""
    files = [report_beside(out, stage, len(reports)) for stage in range(len(reports))]
    for stale in (report_beside(out, 0, 1), *out.parent.glob(report_beside(out, 0, 2).name.replace("0", "*"))):
        if stale not in files:
            stale.unlink(missing_ok=True)
    for report, file in zip(reports, files, strict=True):
        report.save(file)
    plan.save(out)


def _draw(reports: Sequence[Report], html: Path) -> list[Path]:
    """Write the page of each stage; with several stages, its number is in the name of the file."""
    from hidet_dist.report import render

    several = len(reports) > 1
    pages = [html.with_stem(f"{html.stem}.stage{stage}") if several else html for stage in range(len(reports))]
    for report, page in zip(reports, pages, strict=True):
        write_text(page, render(report))
    return pages


def build(request: PlanRequest, out: Path, random_weights: bool, as_json: bool) -> None:
    """Plan and compile a model, by default for this machine's processors, and write artifacts to the folder ``out``."""
    request.check()
    request.check_weights(random_weights)

    distributed, optimization = request.configurations()
    graph = trace(request, "random" if random_weights else "files")

    from hidet_dist.api import auto_parallel

    auto_parallel(graph, distributed, optimization, out)
    planned = Plan.load(out / "plan.json")
    print_plan(planned, [Report.load(out, stage) for stage in range(len(planned.stages))], as_json)
    if not as_json:
        print(f"Written to {out}: `hidet-dist run {out}` runs it.")
