"""``hidet-dist report``: a plan as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hidet_dist.files import write_text
from hidet_dist.report import Report, render
from hidet_dist.report.measured import read_traces


def draw(path: Path, html: Path | None, traces: Sequence[Path]) -> None:
    """Write the page of a plan, or print the data of its report. Raises PlanError and OSError."""
    report = Report.load(path)
    if html is None:
        print(report.to_json(), end="")
        return
    write_text(html, render(report, read_traces(traces)))
    print(f"Written to {html}.")
