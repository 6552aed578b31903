"""``python -m hidet_dist.explain artifacts``: explain the plan of an artifact folder, or a plan file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hidet_dist.errors import HidetDistError, PlanError
from hidet_dist.explain import Explanation, SearchReport
from hidet_dist.files import parse_json, read_text
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.spec import Plan

FILE = "explain.json"


def load(path: Path) -> Explanation:
    """The explanation of the plan in an artifact folder, or of a plan file. Raises PlanError."""
    if not path.is_dir():
        return Explanation(Plan.load(path))
    plan = Plan.load(path / "plan.json")
    try:
        data = parse_json(read_text(path / FILE, MOST_PLAN_BYTES))
        report = data["report"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"Cannot read the explanation {path / FILE}: {error}") from error
    return Explanation(replace(plan, report=None if report is None else SearchReport.from_json(report)))


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
