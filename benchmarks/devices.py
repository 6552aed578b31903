"""Plan LLaMA-3-8B for any number of equal devices; the last line is JSON.

    python -m benchmarks.devices [--devices N ...] [--layers N]

Devices are L40S GPUs on PCIe. The batch is one sequence of 512 tokens. A device holds 1.05 of an equal share of the
weights, and 0.45 GiB beside them. Of each number of devices that does not divide the 8 heads of keys and values:

seconds        predicted, with near-even parts of heads and, in brackets, with equal parts only.
of the line    these seconds beside the line through the predicted seconds of 2, 4 and 8 devices.
planning       CPU seconds to plan, beside those of 8 devices, which are planned once before.
fullest        the weights of the fullest device, beside an equal share; a plan may use what the budget leaves.
least fullest  the same where a device holds 1.02 of a share, and 0.27 GiB beside.
"""

from __future__ import annotations

import argparse
import bisect
import json
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from hidet_dist.machine import builtin
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView

GIB = 2**30
EVEN = (2, 4, 8)
DEVICES = (3, 5, 6, 7)
TIME_LIMIT_SECONDS = 600.0  # which no plan should need, so that plans do not depend on the machine
BUDGET, TIGHT = (1.05, 0.45 * GIB), (1.02, 0.27 * GIB)
"""Budgets of a device: the number of equal shares of the weights, and the bytes beside them."""


def planned(graph: NormalGraph, devices: int, budget: tuple[float, float], unequal: bool) -> dict[str, Any]:
    """Plan a graph for equal devices within a budget."""
    view = GraphView(graph)
    even = sum(map(view.nbytes, view.weights)) / devices
    most, beside = budget
    cluster = builtin("pcie-l40s", DeviceMesh((devices,), ("gpu",)))
    begin = time.process_time()
    stage = search(
        graph,
        cluster,
        mem_budget=int(even * most + beside),
        unequal_parts=unequal,
        solver_time_limit_seconds=TIME_LIMIT_SECONDS,
    ).plan.stages[0]
    return {
        "seconds": stage.seconds,
        "planning": time.process_time() - begin,
        "fullest": max(map(stage.weight_bytes_of, range(devices))) / even,
        "mesh": str(stage.mesh),
        "unequal": not stage.has_equal_shards,
    }


def on_line(seconds: dict[int, float], devices: int) -> float:
    """Interpolate the seconds of even numbers of devices."""
    left = min(max(bisect.bisect(EVEN, devices) - 1, 0), len(EVEN) - 2)
    a, b = EVEN[left : left + 2]
    return seconds[a] + (seconds[b] - seconds[a]) * (devices - a) / (b - a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, choices=range(3, 8))
    parser.add_argument("--layers", type=int, default=shapes.LLAMA3_8B.layers)
    given = parser.parse_args()
    config = replace(shapes.LLAMA3_8B, layers=given.layers, batch=1, sequence=512)
    graph = normalize(shapes.llama(config))
    planned(graph, EVEN[-1], BUDGET, True)  # rules are derived, and local operators are built
    even = {devices: planned(graph, devices, BUDGET, True) for devices in EVEN}
    line = {devices: one["seconds"] for devices, one in even.items()}
    results: dict[str, Any] = {str(devices): one for devices, one in even.items()}
    table = Table("devices", "ms", "of the line", "planning", "fullest", "least fullest", title="LLaMA-3-8B on L40S")
    for devices in given.devices:
        ours, equal = (planned(graph, devices, BUDGET, unequal) for unequal in (True, False))
        tight = planned(graph, devices, TIGHT, True)
        own = {
            **ours,
            "of_line": ours["seconds"] / on_line(line, devices),
            "of_line_equal": equal["seconds"] / on_line(line, devices),
            "planning_of_8": ours["planning"] / even[8]["planning"],
            "planning_of_8_equal": equal["planning"] / even[8]["planning"],
            "least_fullest": tight["fullest"],
        }
        results[str(devices)] = own
        table.add_row(
            str(devices),
            f"{ours['seconds'] * 1e3:.1f} ({equal['seconds'] * 1e3:.1f})",
            f"{own['of_line']:.3f} ({own['of_line_equal']:.3f})",
            f"{own['planning_of_8']:.2f} ({own['planning_of_8_equal']:.2f})",
            f"{ours['fullest']:.3f} ({equal['fullest']:.3f})",
            f"{tight['fullest']:.3f}",
        )
    Console().print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
