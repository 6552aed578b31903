"""``hidet-dist machines``: a list of the built-in machines, with their rates."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table

from hidet_dist.machine.builtin import MACHINES
from hidet_dist.progress import report_console


def show(as_json: bool) -> None:
    """Print the machines that ``--machine`` and ``distributed_config["machine"]`` can name."""
    if as_json:
        print(json.dumps({name: asdict(machine) for name, machine in MACHINES.items()}, indent=1))
    else:
        report_console().print(_table())


def _table() -> Table:
    table = Table(title="Built-in machines", title_justify="left")
    for column in ("machine", "device"):
        table.add_column(column, no_wrap=True)
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
    return table
