"""hidet's own tests through ``auto_parallel`` on two ranks: a table, and as last line JSON.

The folder is a clone of hidet at 0.6.1. Each of its tests of operators, graphs, models and front ends runs as it is,
and compares with what it compares with; but what it has hidet compute is planned for two ranks under a tight memory
budget, and computed by them in the simulator. A case is ``right``, ``refused`` (with the reason) or ``wrong``; or
``outside``: it never gets as far (it needs a GPU's operators, a download or a package that is not installed), or hidet
alone fails as well. The exit status is 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import hidet
import pytest
from ranks import computed
from rich.console import Console
from rich.table import Table
from verdicts import OUTSIDE, REFUSED, RIGHT, WRONG, Suite, Verdict

VERSION = "0.6.1"
FOLDERS = ("operators_core", "operators_vision", "flowgraph", "models", "frontends", "minimal", "unit_tests")
"""The folders of hidet's tests that compute graphs; the others are of its IR, its CUDA kernels and its runtime."""
SECONDS = 600  # that one case may take


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hidet_suite", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"a clone of hidet at {VERSION}")
    parser.add_argument("tests", nargs="*", help="files or folders below tests/; all by default")
    parser.add_argument("-k", help="an expression that chooses tests by name, as pytest has it", default="")
    parser.add_argument("--cases", type=int, help="the most cases of a test, spread over all of them; all by default")
    arguments = parser.parse_args()
    tests = (arguments.folder / "tests").resolve()
    if not (tests / "operators_core").is_dir():
        parser.error(f"{arguments.folder} is no clone of hidet: it has no tests/operators_core")
    if hidet.__version__ != VERSION:
        parser.error(f"hidet {hidet.__version__} is installed; the tests are those of {VERSION}")
    warnings.filterwarnings("ignore")
    console = Console(stderr=True, width=160)

    def report(own: Verdict) -> None:
        console.print(f"{own.test}{own.case}: {own.verdict}, {own.reason}", markup=False, highlight=False)

    suite = Suite(computed, report, arguments.cases)
    chosen = [str(tests / name) for name in arguments.tests or FOLDERS]
    options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull, "--rootdir", str(tests)]
    options += [
        "--continue-on-collection-errors",
        f"--timeout={SECONDS}",
        *(["-k", arguments.k] if arguments.k else []),
    ]
    hidet.option.cache_dir(str(Path(hidet.option.get_cache_dir()).resolve()))  # tests run, and write, in another folder
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*options, *chosen], plugins=[suite])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        parser.error(f"pytest ended with {status!r}")
    show(suite.verdicts, console)
    return 1 if any(own.verdict == WRONG for own in suite.verdicts) else 0


def show(verdicts: list[Verdict], console: Console) -> None:
    """Print the table, and the JSON."""
    tests: dict[str, list[Verdict]] = defaultdict(list)
    for own in verdicts:
        tests[own.test].append(own)
    table = Table("test", RIGHT, REFUSED, WRONG, OUTSIDE, "why", "CPU s")
    by_name: dict[str, list[str]] = {RIGHT: [], REFUSED: [], WRONG: [], OUTSIDE: []}
    for test, own in tests.items():
        counts = Counter(one.verdict for one in own)
        worst = next(kind for kind in (WRONG, REFUSED, RIGHT, OUTSIDE) if counts[kind])
        by_name[worst].append(test)
        why = next((one.reason for kind in (WRONG, REFUSED, OUTSIDE) for one in own if one.verdict == kind), "")
        numbers = [str(counts[kind] or "") for kind in (RIGHT, REFUSED, WRONG, OUTSIDE)]
        table.add_row(test, *numbers, why, f"{sum(one.cpu_seconds for one in own):.1f}")
    console.print(table)
    counted = {kind: len(names) for kind, names in by_name.items()}
    cases = Counter(one.verdict for one in verdicts)
    models = sum(count for kind, count in counted.items() if kind != OUTSIDE)
    result = {"models": models, **counted, "cases": {kind: cases[kind] for kind in by_name}, "by_name": by_name}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # hidet's tensors that share PyTorch's memory end a process that takes itself apart with a crash
