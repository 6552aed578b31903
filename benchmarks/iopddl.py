"""Solve instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism; the last line is JSON.

    python -m benchmarks.iopddl [--folder FOLDER] [--share PART] [--clock cpu] [instance ...]

The folder has the instances (``asplos-2025-iopddl-A.json.gz``, ..., from github.com/google/iopddl) and ``known.csv``,
for each instance the contest's time limit, the best cost of the contest, the best cost and the best bound known since.
``--share`` takes a part of each time limit, for a quick look. With ``--clock cpu`` all seconds of the search are of CPU
time, for machines that do other work, too. For each instance:

seconds_to_feasible, seconds_to_95, seconds_to_within_1_percent
    Until the first assignment within the limit, until best known / cost was 0.95, and until the cost was within 1 % of
    the final one. They count from the begin of the search; ``read_seconds`` is what reading the file took.
score    The best cost known over ours; the sum over all instances is the contest's measure.
gap      (cost - bound) / cost, of our own bound.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from hidet_dist.errors import SolverError
from hidet_dist.search.pairwise import Clock, load_problem, solve

DEFAULT_FOLDER = Path("../shared/iopddl")
NAME = "asplos-2025-iopddl-{}.json.gz"
GOOD_SCORE = 0.95


def known(folder: Path) -> dict[str, dict[str, str]]:
    """The rows of ``known.csv`` by instance."""
    with (folder / "known.csv").open(newline="", encoding="utf-8") as file:
        return {row["instance"]: row for row in csv.DictReader(file)}


def measure(folder: Path, instance: str, fraction: float, threads: int, clock: Clock) -> dict[str, Any]:
    """Solve one instance in this process."""
    row = known(folder)[instance]
    begin = time.perf_counter()
    problem = load_problem(folder / NAME.format(instance))
    read_seconds = time.perf_counter() - begin
    best_known = float(row["best_known"])
    times: list[tuple[float, float]] = []

    def note(elapsed: float, cost: float, bound: float) -> None:
        if math.isfinite(cost):
            times.append((elapsed, cost))

    begin, begin_cpu = time.perf_counter(), time.process_time()
    limit_seconds = fraction * float(row["limit_seconds"])
    result: dict[str, Any] = {
        "limit_seconds": limit_seconds,
        "threads": threads,
        "clock": clock,
        "read_seconds": read_seconds,
    }
    try:
        solution = solve(problem, result["limit_seconds"], threads=threads, clock=clock, on_incumbent=note)
    except SolverError:
        return {**result, "cost": None, "score": 0.0}

    def seconds_until(most: float) -> float | None:
        return next((elapsed for elapsed, cost in times if cost <= most), None)

    assert problem.peak_of(solution.assignment) <= problem.byte_limit
    return {
        **result,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
        "cost": solution.cost,
        "bound": solution.bound,
        "gap": solution.gap,
        "score": best_known / solution.cost,
        "known_bound": float(row["lower_bound"]),
        "seconds_to_feasible": times[0][0] if times else None,
        "seconds_to_95": seconds_until(best_known / GOOD_SCORE),
        "seconds_to_within_1_percent": seconds_until(1.01 * solution.cost),
        "rounds": solution.rounds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Solve each instance in a process of its own, so that one's peak of memory is not another's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", nargs="*", help="letters; all that the folder has when none is given")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--share", type=float, default=1.0, help="the part of each time limit to take")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2, help="1, or 2 to bound and search at the same time")
    parser.add_argument("--clock", choices=get_args(Clock), default="wall", help="what the time limit counts")
    given = parser.parse_args()
    if not (given.folder / "known.csv").is_file():
        sys.exit(f"There is no {given.folder / 'known.csv'}: name the folder with the contest's instances by --folder.")
    there = [name for name in known(given.folder) if (given.folder / NAME.format(name)).is_file()]
    for name in given.instances:
        if name not in there:
            sys.exit(f"{given.folder} has no instance {name!r}; it has {', '.join(there)}.")
    if given.one:
        print(json.dumps(measure(given.folder, given.instances[0], given.share, given.threads, given.clock)))
        return
    table = Table(title="Cost and bound beside the best known", title_justify="left")
    for column in (
        "instance",
        "limit [s]",
        "cost",
        "score",
        "gap",
        "known gap",
        "feasible [s]",
        "0.95 [s]",
        "RSS [MiB]",
    ):
        table.add_column(column, justify="left" if column == "instance" else "right")
    results: dict[str, Any] = {}
    for name in given.instances or there:
        options = ["--folder", str(given.folder), "--share", str(given.share), "--clock", given.clock]
        options += ["--threads", str(given.threads)]
        command = [sys.executable, "-m", "benchmarks.iopddl", name, "--one", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        one = results[name] = json.loads(done.stdout.splitlines()[-1])
        if one["cost"] is None:
            table.add_row(name, f"{one['limit_seconds']:g}", "none")
            continue
        best = one["cost"] * one["score"]
        figures = (one["seconds_to_feasible"], one["seconds_to_95"])
        table.add_row(
            name,
            f"{one['limit_seconds']:g}",
            f"{one['cost']:.6g}",
            f"{one['score']:.4f}",
            f"{one['gap']:.2%}",
            f"{(best - one['known_bound']) / best:.2%}",
            *("-" if figure is None else f"{figure:.1f}" for figure in figures),
            f"{one['peak_rss_bytes'] / 2**20:.0f}",
        )
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(table)
    score = sum(one["score"] for one in results.values())
    console.print(f"Score {score:.4f} of {len(results)}")
    print(json.dumps({"score": score, "instances": len(results), "results": results}))


if __name__ == "__main__":
    main()
