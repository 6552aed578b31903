"""Pipelines: planned for described machines beside other ways to cut a graph, and run on this host beside one rank.

python -m benchmarks.stages [case ...]

The cases are those of ``planning.py`` and the models of ``running.py``, all by default. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from benchmarks.stages.planning import CASES, measure, show, small_graph, three_objectives

if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        from benchmarks.stages import running  # not where a case is planned, whose memory is measured

        names = sys.argv[1:] or [*CASES, *running.RUNS]
        unknown = [name for name in names if name not in (*CASES, *running.RUNS)]
        if unknown:
            sys.exit(f"No case {unknown[0]!r}; there are {', '.join((*CASES, *running.RUNS))}.")
        console = Console(width=160)
        results: dict[str, Any] = {}
        planned, run = ([name for name in names if name in known] for known in (CASES, running.RUNS))
        if planned:
            results["planning"] = show(console, planned)
            results["objectives"] = three_objectives(console)
            results["small_graph"] = small_graph(console)
        if run:
            results["running"] = running.show(console, run)
        print(json.dumps(results))
