"""``hidet-dist report``: a plan as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hidet_dist.files import write_text
from hidet_dist.report import Report, render
from hidet_dist.report.measured import read_traces


def draw(path: Path, stage: int, html: Path | None, traces: Sequence[Path], live: bool) -> None:
    """Write the page of a plan, serve it, or print the data of its report. Raises PlanError and OSError."""
    report = Report.load(path, stage)
    if live:
        from hidet_dist.cli.planning import serve

        serve(report)
        return
    if html is None:
        print(report.to_json(), end="")
        return
    write_text(html, render(report, read_traces(traces)))
    print(f"Written to {html}.")
