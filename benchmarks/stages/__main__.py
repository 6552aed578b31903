"""Pipelines: planned for described machines, beside other ways to cut a graph; the last line is JSON.

python benchmarks/stages [case ...]
"""

from __future__ import annotations

import json
import sys

from planning import CASES, measure, show, three_objectives
from rich.console import Console

if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        unknown = [name for name in sys.argv[1:] if name not in CASES]
        if unknown:
            sys.exit(f"No case {unknown[0]!r}; there are {', '.join(CASES)}.")
        results = {"planning": show(Console(width=160), sys.argv[1:] or list(CASES))}
        results["objectives"] = three_objectives(Console(width=160))
        print(json.dumps(results))
