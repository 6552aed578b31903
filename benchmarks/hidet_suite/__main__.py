"""hidet's own tests and examples through ``auto_parallel`` on two ranks: a table, and as last line JSON.

The folder is a clone of hidet at 0.6.1. Each of its tests of operators, graphs, models and front ends runs as it is,
and compares with what it compares with; but what it has hidet compute is planned for two ranks under a tight memory
budget, built, and computed by two processes from the artifacts; with ``--no-processes`` in the simulator. The results
of examples are compared with hidet's own. A case is
``right``, ``refused`` (with the reason) or ``wrong``; or ``outside``: it never gets as far (it needs a GPU's operators,
a download or a package that is not installed), or hidet alone fails as well. The exit status is 1 if any is wrong.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import hidet
import pytest
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hidet_suite import examples
from benchmarks.hidet_suite.ranks import Ranks
from benchmarks.hidet_suite.verdicts import OUTSIDE, REFUSED, RIGHT, WRONG, Suite, Verdict
from hidet_dist.testing.model_zoo import torchvision_models

VERSION = "0.6.1"
FOLDERS = ("operators_core", "operators_vision", "flowgraph", "models", "frontends", "minimal", "unit_tests")
"""The folders of hidet's tests that compute graphs; the others are of its IR, its CUDA kernels and its runtime."""
EXAMPLES = "examples"
SECONDS = 1800  # that one case may take; on a busy machine the slowest take long


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hidet_suite", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"a clone of hidet at {VERSION}")
    parser.add_argument("tests", nargs="*", help="files or folders below tests/, or examples; all by default")
    parser.add_argument("-k", help="an expression that chooses tests by name, as pytest has it", default="")
    parser.add_argument("--cases", type=int, help="the most cases of a test, spread over all of them; all by default")
    parser.add_argument("--no-processes", action="store_true", help="compute in the simulator, without processes")
    parser.add_argument("--libraries", type=Path, help="a folder with torchvision, where that is not installed")
    parser.add_argument("--out", type=Path, help="a file for the verdicts of each test, as JSON; other tests' stay")
    arguments = parser.parse_intermixed_args()
    tests = (arguments.folder / "tests").resolve()
    names = arguments.tests or (*FOLDERS, EXAMPLES)
    if not (tests / "operators_core").is_dir():
        parser.error(f"{arguments.folder} is no clone of hidet: it has no tests/operators_core")
    if hidet.__version__ != VERSION:
        parser.error(f"hidet {hidet.__version__} is installed; the tests are those of {VERSION}")
    warnings.filterwarnings("ignore")
    console = Console(stderr=True, width=160)
    out = arguments.out.resolve() if arguments.out is not None else None

    def report(own: Verdict) -> None:
        console.print(f"{own.test}{own.case}: {own.verdict}, {own.reason}", markup=False, highlight=False)
        console.print(own.traceback, markup=False, highlight=False, end="")
        if out is not None:
            write(suite.verdicts, out)

    if arguments.libraries is not None:
        sys.path.append(str(arguments.libraries.resolve()))
        torchvision_models()  # so that tests import it even if it was built for another PyTorch
    if not hasattr(torch._C, "_nccl_all_reduce"):
        torch._C.__dict__["_nccl_all_reduce"] = None  # hidet's front end names it on import
    chosen = [str((tests.parent if name.startswith(EXAMPLES) else tests) / name) for name in names]
    options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull, "--rootdir", str(tests.parent)]
    options += [
        "--continue-on-collection-errors",
        "--confcutdir",
        str(tests),
        f"--timeout={SECONDS}",
        *(["-k", arguments.k] if arguments.k else []),
    ]
    hidet.option.cache_dir(str(Path(hidet.option.get_cache_dir()).resolve()))  # tests run, and write, in another folder
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),
        contextlib.redirect_stdout(sys.stderr),
        Ranks(SECONDS, simulated=arguments.no_processes) as ranks,
    ):
        suite = Suite(ranks.computed, report, arguments.cases)
        status = pytest.main([*options, *chosen], plugins=[suite, examples])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        parser.error(f"pytest ended with {status!r}")
    show(suite.verdicts, console)
    if out is not None:
        write(suite.verdicts, out)
    return 1 if any(own.verdict == WRONG for own in suite.verdicts) else 0


@dataclass(frozen=True)
class Outcome:
    """The verdicts of the cases of one test.

    Attributes
    ----------
    right, refused, wrong, outside: the number of cases.
    why: the reason of the first wrong case; or refused, or outside, where there is none.
    cpu_seconds: of the test's own process.
    """

    right: int
    refused: int
    wrong: int
    outside: int
    why: str
    cpu_seconds: float

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Outcome:
        """Count the verdicts of a test."""
        counts = Counter(own.verdict for own in verdicts)
        why = next((own.reason for kind in (WRONG, REFUSED, OUTSIDE) for own in verdicts if own.verdict == kind), "")
        seconds = sum(own.cpu_seconds for own in verdicts)
        return cls(counts[RIGHT], counts[REFUSED], counts[WRONG], counts[OUTSIDE], why, round(seconds, 1))

    @property
    def verdict(self) -> str:
        """The verdict of the whole test: the worst of its cases, where "outside" is none at all."""
        return next((kind for kind in (WRONG, REFUSED, RIGHT) if getattr(self, kind)), OUTSIDE)


def outcomes_of(verdicts: Sequence[Verdict]) -> dict[str, Outcome]:
    """The outcome of each test, in the order in which they ran."""
    tests: dict[str, list[Verdict]] = defaultdict(list)
    for own in verdicts:
        tests[own.test].append(own)
    return {test: Outcome.of(own) for test, own in tests.items()}


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the table, and the JSON."""
    table = Table("test", RIGHT, REFUSED, WRONG, OUTSIDE, "why", "CPU s")
    by_name: dict[str, list[str]] = {RIGHT: [], REFUSED: [], WRONG: [], OUTSIDE: []}
    for test, own in outcomes_of(verdicts).items():
        by_name[own.verdict].append(test)
        counts = [str(count or "") for count in (own.right, own.refused, own.wrong, own.outside)]
        table.add_row(test, *counts, own.why, f"{own.cpu_seconds:.1f}")
    console.print(table)
    counted = {kind: len(names) for kind, names in by_name.items()}
    cases = Counter(one.verdict for one in verdicts)
    models = sum(count for kind, count in counted.items() if kind != OUTSIDE)
    result = {"models": models, **counted, "cases": {kind: cases[kind] for kind in by_name}, "by_name": by_name}
    print(json.dumps(result), flush=True)


def write(verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the outcome of each test to a file, in which those of other tests stay."""
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    results |= {test: asdict(own) for test, own in outcomes_of(verdicts).items()}
    document = {"benchmark": "benchmarks/hidet_suite", "hidet": VERSION, "results": dict(sorted(results.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # hidet's tensors that share PyTorch's memory end a process that takes itself apart with a crash
