"""``python -m hidet_dist.search solve FILE --seconds S --out SOLUTION.json``: solve a pairwise problem of a file."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hidet_dist.errors import HidetDistError
from hidet_dist.progress import Progress, report_console
from hidet_dist.search.pairwise import Clock, load_problem, save_solution
from hidet_dist.search.pairwise import solve as solve_problem

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Solvers of the search."""


@app.command()
def solve(
    file: Annotated[Path, typer.Argument(help="A problem in the format of google/iopddl, gzipped or not.")],
    seconds: Annotated[float, typer.Option(help="Seconds to search, reading the file not counted.")],
    out: Annotated[Path, typer.Option(help="The JSON file for the solution.")],
    gap: Annotated[float, typer.Option(help="Stop once (cost - bound) / cost is at most this.")] = 1e-9,
    seed: Annotated[int, typer.Option(help="The seed of random choices.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=2, help="With 2, it bounds and searches at the same time.")] = 2,
    clock: Annotated[Clock, typer.Option(help="What the seconds are: of the wall's clock, or of CPU time.")] = "wall",
) -> None:
    """Find an assignment of low cost and a lower bound, print both over time, and write the solution.

    The exit status is 1 if the file is not a problem or no solution was found.
    """
    incumbents: list[tuple[float, float, float]] = []
    try:
        with Progress() as progress:
            with progress.task("Reading"):
                problem = load_problem(file)
            with progress.task("Solving") as task:

                def show(elapsed: float, cost: float, bound: float) -> None:
                    if not incumbents or incumbents[-1][1:] != (cost, bound):
                        incumbents.append((elapsed, cost, bound))
                    task.say(f"Solving: cost {cost:.8g}, lower bound {bound:.8g}")

                solution = solve_problem(
                    problem, seconds, gap=gap, seed=seed, threads=threads, clock=clock, on_incumbent=show
                )
        save_solution(solution.assignment, out)
    except (HidetDistError, OSError) as error:
        print(f"solve: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    table = Table("seconds", "cost", "lower bound", "gap")
    for column in table.columns:
        column.justify = "right"
    for elapsed, cost, bound in incumbents:
        if math.isfinite(cost):
            relative = (cost - bound) / cost if cost else 0.0
            table.add_row(f"{elapsed:.1f}", f"{cost:.10g}", f"{bound:.10g}", f"{relative:.2%}")
    console = report_console()
    console.print(table)
    console.print(
        f"Cost {solution.cost:.12g}, lower bound {solution.bound:.12g} (gap {solution.gap:.2%}); "
        f"{problem.peak_of(solution.assignment):.0f} of {problem.byte_limit:.0f} bytes. Written to {out}."
    )


if __name__ == "__main__":
    app()
