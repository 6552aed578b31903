"""``python -m hidet_dist.explain artifacts``: explain the plan of an artifact folder, or a plan file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hidet_dist.errors import HidetDistError, PlanError
from hidet_dist.explain import Explanation, SearchReport, explanation_file
from hidet_dist.files import parse_json, read_text
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.spec import Plan


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
    return Explanation(Plan(tuple(stages)))


def _report(file: Path) -> SearchReport | None:
    """Read the report of a stage's search. Raises PlanError."""
    try:
        report = parse_json(read_text(file, MOST_PLAN_BYTES))["report"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"Cannot read the explanation {file}: {error}") from error
    return None if report is None else SearchReport.from_json(report)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m hidet_dist.explain") -> int:
    """Print the explanation; the exit status is 1 when there is none. ``prog`` is the command's name in its usage."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("path", type=Path, help="an artifact folder, or a plan file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--schedule", action="store_true", help="print only the lines to apply by hand")
    options = parser.parse_args(arguments)
    try:
        explanation = load(options.path)
    except HidetDistError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(explanation.to_json(), end="")
    elif options.schedule:
        print("\n".join(explanation.schedule))
    else:
        # A pipe has no width: use that of the text form.
        Console(width=None if sys.stdout.isatty() else 160).print(explanation)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
