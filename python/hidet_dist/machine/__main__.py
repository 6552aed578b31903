"""Machines at the command line.

``python -m hidet_dist.machine list`` shows those that can be named, and
``python -m hidet_dist.machine calibrate --mesh 2 --out host.json`` measures this one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hidet_dist.errors import HidetDistError
from hidet_dist.machine.builtin import MACHINES
from hidet_dist.machine.calibration import calibrate
from hidet_dist.machine.calibration.measuring import REPEATS, TIMEOUT_SECONDS

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Machines: the built-in ones, and this one.")
_LOG_WIDTH = 120


@app.command("list")
def show() -> None:
    """Show the machines that distributed_config['machine'] can name."""
    table = Table(title="Built-in machines", title_justify="left")
    for what in ("machine", "device"):
        table.add_column(what, no_wrap=True)
    for figure in ("node", "f32 TFLOP/s", "bf16 TFLOP/s", "memory GB/s", "memory GB", "link GB/s", "network GB/s"):
        table.add_column(figure, justify="right")
    for name, machine in MACHINES.items():
        device, rates = machine.device, machine.device.flops_per_second
        table.add_row(
            name,
            device.name,
            "any" if machine.devices_per_node is None else str(machine.devices_per_node),
            f"{rates['float32'] / 1e12:g}",
            f"{rates.get('bfloat16', rates['default']) / 1e12:g}",
            f"{device.memory_bandwidth_bytes_per_second / 1e9:g}",
            f"{device.memory_bytes / 1e9:.0f}",
            f"{machine.link.bandwidth_bytes_per_second / 1e9:.3g}",
            "-" if machine.network is None else f"{machine.network.bandwidth_bytes_per_second / 1e9:g}",
        )
    _console().print(table)


@app.command("calibrate")
def measure(
    mesh: Annotated[str, typer.Option(help="Devices along each mesh axis, such as 2 or 2,2.")],
    out: Annotated[Path, typer.Option(help="The machine file to write.")],
    repeats: Annotated[int, typer.Option(help="How often each is measured; the median counts.")] = REPEATS,
    timeout: Annotated[float, typer.Option(help="Seconds that the ranks may take.")] = TIMEOUT_SECONDS,
) -> None:
    """Measure this machine as a mesh of processes, and write a machine file."""
    try:
        shape = [int(size) for size in mesh.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{mesh!r} is no mesh such as 2 or 2,2", param_hint="--mesh") from None
    try:
        found = calibrate(shape, out, repeats=repeats, timeout_seconds=timeout)
    except HidetDistError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    console = _console()
    for table in found.tables():
        console.print(table)
    console.print(f"Written to {out}: distributed_config['machine'] takes its path.")


def _console() -> Console:
    """As wide as the terminal; in a log, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


if __name__ == "__main__":
    app()
