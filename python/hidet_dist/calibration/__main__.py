"""``python -m hidet_dist.calibration --mesh 2 --out host.json``: measure this machine, and write a machine file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hidet_dist.calibration.measuring import REPEATS, TIMEOUT_SECONDS, calibrate
from hidet_dist.errors import HidetDistError
from hidet_dist.progress import report_console

app = typer.Typer(add_completion=False)


@app.command()
def measure(
    mesh: Annotated[str, typer.Option(help="Devices along each mesh axis, such as 2 or 2,2.")],
    out: Annotated[Path, typer.Option(help="The machine file to write.")],
    repeats: Annotated[int, typer.Option(help="Measurements of each figure; the median counts.")] = REPEATS,
    timeout: Annotated[float, typer.Option(help="The time limit of the ranks, in seconds.")] = TIMEOUT_SECONDS,
    nnodes: Annotated[int, typer.Option(help="Hosts; start this on each of them.")] = 1,
    node_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0.")] = None,
    rdzv: Annotated[str | None, typer.Option(help="An address and port of host 0, such as 10.0.0.1:29500.")] = None,
) -> None:
    """Measure this machine as a mesh of processes, and write a machine file."""
    try:
        shape = [int(size) for size in mesh.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{mesh!r} is not a mesh such as 2 or 2,2", param_hint="--mesh") from None
    try:
        calibration = calibrate(
            shape, out, repeats=repeats, timeout_seconds=timeout, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv
        )
    except HidetDistError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    console = report_console()
    for table in calibration.tables():
        console.print(table)
    console.print(f"Written to {out}: distributed_config['machine'] takes its path.")


if __name__ == "__main__":
    app()
