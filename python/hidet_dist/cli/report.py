"""``hidet-dist report``: a plan as an HTML page, as a summary, or as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hidet_dist.cli.programs import folder_of
from hidet_dist.cli.request import check_destination
from hidet_dist.cli.summary import print_summary
from hidet_dist.files import write_text
from hidet_dist.report import Report, render
from hidet_dist.report.measured import read_traces


def draw(
    path: Path,
    program: str | None,
    stage: int,
    html: Path | None,
    traces: Sequence[Path],
    live: bool,
    as_json: bool,
) -> None:
    """Write the page of a plan, serve it, or print a summary or all data of its report.

    ``path`` is a plan file, or an artifact folder, of whose programs ``program`` names one.

    Raises
    ------
    ConfigError
        When ``html`` cannot be written.
    PlanError
        When there is no report of the plan, or it or a trace is malformed.
    """
    check_destination(html)
    report, measured = Report.load(folder_of(path, program), stage), read_traces(traces)
    if live:
        from hidet_dist.cli.live import serve

        serve(report)
        return
    if html is not None:
        write_text(html, render(report, measured))
    if as_json:
        print(report.to_json(), end="")
    elif html is None:
        print_summary(report, as_json=False)
    else:
        print(f"Written to {html}.")
