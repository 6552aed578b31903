"""``hidet-dist plan`` and ``hidet-dist build``: plan or build a model for a described machine."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from hidet_dist.cli.quantities import parse_dims
from hidet_dist.cli.request import BATCH, SEQ, PlanRequest, check_destination
from hidet_dist.cli.summary import print_summary
from hidet_dist.errors import SearchLimitWarning
from hidet_dist.files import write_text
from hidet_dist.progress import report_console
from hidet_dist.report.data import SUFFIX, Report


def quiet() -> None:
    """Hide warnings of libraries, and the warning of the search's time limit, which the summary repeats."""
    warnings.simplefilter("ignore", SearchLimitWarning)
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b.*")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def trace(request: PlanRequest, weights: str | None) -> Any:
    """Convert the model to a graph; ``weights`` as for :func:`hidet_dist.frontends.load.load_model`."""
    from hidet_dist.frontends.load import load_model

    quiet()
    return load_model(
        request.model,
        dtype=request.dtype,
        batch=BATCH if request.batch is None else request.batch,
        seq=SEQ if request.seq is None else request.seq,
        dims=parse_dims(request.dims),
        weights=weights,
    )


def plan(request: PlanRequest, out: Path | None, html: Path | None, export: Path | None, as_json: bool) -> None:
    """Plan a model and print the summary.

    Write the plan with its report to ``out``, the page to ``html`` and the problem that is solved to ``export``.
    """
    request.check()
    for path in (out, html, export):
        check_destination(path)

    from hidet_dist.api import describe, export_problem, make_plan
    from hidet_dist.report import render

    distributed, optimization = request.configurations()
    graph = trace(request, None)
    if export is not None:
        # Before planning, so that a problem without a solution, or a slow one, can be exported.
        unit = export_problem(graph, distributed, optimization, export)
        if not as_json:
            report_console().print(f"Exported to {export}, with costs in units of {unit:.0e} s.")
    planned = make_plan(graph, distributed, optimization)
    report = replace(describe(planned, graph, distributed, optimization, request.title), origin=request.origin())
    if out is not None:
        report.save(out.with_name(out.name.removesuffix(".json") + SUFFIX))
        planned.save(out)
    if html is not None:
        write_text(html, render(report))
    print_summary(report, as_json)


def build(request: PlanRequest, out: Path, random_weights: bool, as_json: bool) -> None:
    """Plan and compile a model for this machine's processors, and write artifacts to the folder ``out``."""
    request.check()
    request.check_weights(random_weights)

    from hidet_dist.api import auto_parallel

    distributed, optimization = request.configurations()
    auto_parallel(trace(request, "random" if random_weights else "files"), distributed, optimization, out)
    print_summary(Report.load(out), as_json)
    if not as_json:
        print(f"Written to {out}: `hidet-dist run {out}` runs it.")
