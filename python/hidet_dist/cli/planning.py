"""``hidet-dist plan`` and ``hidet-dist build``: a model planned, or built, for a described machine."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from hidet_dist.cli.job import BATCH, SEQ, Job, check_destination
from hidet_dist.cli.quantities import parse_dims
from hidet_dist.cli.summary import print_summary
from hidet_dist.files import write_text
from hidet_dist.report.data import SUFFIX, Report


def quiet() -> None:
    """Leave warnings of libraries out of the output; errors are errors."""
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b.*")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def trace(job: Job, weights: str | None) -> Any:
    """The model as a graph; ``weights`` as :func:`hidet_dist.frontends.load.load_model` takes it."""
    from hidet_dist.frontends.load import load_model

    quiet()
    return load_model(
        job.model,
        dtype=job.dtype,
        batch=BATCH if job.batch is None else job.batch,
        seq=SEQ if job.seq is None else job.seq,
        dims=parse_dims(job.dims),
        weights=weights,
    )


def plan(job: Job, out: Path | None, html: Path | None, as_json: bool) -> None:
    """Plan a model, print the summary, and write the plan with its report, or the page, where asked for."""
    job.check()
    check_destination(out)
    check_destination(html)

    from hidet_dist.api import describe, make_plan
    from hidet_dist.report import render

    distributed, optimization = job.configurations()
    graph = trace(job, None)
    found = make_plan(graph, distributed, optimization)
    report = replace(describe(found, graph, distributed, optimization, job.title), origin=job.origin())
    if out is not None:
        report.save(out.with_name(out.name.removesuffix(".json") + SUFFIX))
        found.save(out)
    if html is not None:
        write_text(html, render(report))
    print_summary(report, as_json)


def build(job: Job, out: Path, random_weights: bool, as_json: bool) -> None:
    """Plan and compile a model for this machine's processors, and write artifacts."""
    job.check()
    job.check_weights(random_weights)

    from hidet_dist.api import auto_parallel

    distributed, optimization = job.configurations()
    auto_parallel(trace(job, "random" if random_weights else "files"), distributed, optimization, out)
    print_summary(Report.load(out), as_json)
    if not as_json:
        print(f"Written to {out}: `hidet-dist run {out}` runs it.")
