"""Pipelines planned for described machines and run on this host, beside others; the last line is JSON.

    python benchmarks/stages [--planning | --running] [case ...]

See ``planning.py`` and ``running.py`` for the cases and the figures.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from planning import CASES, measure, show, three_objectives
from rich.console import Console

ROUNDS, ROUND_SECONDS = 3, 15.0  # of each build of a model that runs


def main(arguments: list[str]) -> None:
    """Run both halves, or the one that is asked for, or the cases named."""
    import running

    halves = [one for one in ("--planning", "--running") if one in arguments] or ["--planning", "--running"]
    names = [one for one in arguments if not one.startswith("--")]
    known = (*CASES, *running.RUNS)
    unknown = [one for one in arguments if one not in (*known, "--planning", "--running")]
    if unknown:
        sys.exit(f"No case {unknown[0]!r}; there are {', '.join(known)}.")
    console = Console(width=160)
    results: dict[str, Any] = {}
    planned = [name for name in names or CASES if name in CASES]
    if "--planning" in halves and planned:
        results["planning"] = show(console, planned)
        results["objectives"] = three_objectives(console)
    run = [name for name in names or running.RUNS if name in running.RUNS]
    if "--running" in halves and run:
        results["running"] = running.show(console, run, ROUNDS, ROUND_SECONDS)
    print(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:])
