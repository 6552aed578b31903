"""``hidet-dist explain``: the explanation of a plan, as text or JSON."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hidet_dist.cli.programs import folder_of
from hidet_dist.errors import PlanError
from hidet_dist.files import parse_json, read_text
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.spec import Plan
from hidet_dist.spec.explanation import Explanation, explanation_file
from hidet_dist.spec.report import SearchReport

_LOG_COLUMNS = 160  # the width of output that is not a terminal


def explain(path: Path, program: str | None, schedule: bool, as_json: bool) -> None:
    """Print the explanation of a plan, or only the lines that shard the model by hand. Raises PlanError.

    ``path`` is a plan file, or an artifact folder, of whose programs ``program`` names one.
    """
    explanation = load(folder_of(path, program))
    if as_json:
        print(explanation.to_json(), end="")
    elif schedule:
        print("\n".join(explanation.schedule))
    else:
        Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS).print(explanation)


def load(path: Path) -> Explanation:
    """Explain the plan in an artifact folder, or a plan file. Raises PlanError."""
    if not path.is_dir():
        return Explanation(Plan.load(path))
    plan = Plan.load(path / "plan.json")
    count = len(plan.stages)
    stages = (
        replace(stage, report=_report(path / explanation_file(number, count)))
        for number, stage in enumerate(plan.stages)
    )
    return Explanation(replace(plan, stages=tuple(stages)))


def _report(file: Path) -> SearchReport | None:
    """Read the report of a stage's search. Raises PlanError."""
    try:
        report = parse_json(read_text(file, MOST_PLAN_BYTES))["report"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"Cannot read the explanation {file}: {error}") from error
    return None if report is None else SearchReport.from_json(report)
