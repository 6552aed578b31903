"""Which models the front end of PyTorch traces right: a table, and as last line JSON.

Each model of ``hidet_dist.testing.model_zoo`` is traced, planned on two devices and on a mesh of 2 x 2, and computed by
all ranks in the simulator; with ``--processes`` also by two processes from artifacts. Results are compared with
PyTorch's. A model is ``right``, ``refused`` (with the reason), or ``wrong``; the exit status is 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import hidet_dist
from hidet_dist.errors import HidetDistError, InfeasibleError, TraceError
from hidet_dist.simulate import simulate
from hidet_dist.spec.interface import Interface, interface_of
from hidet_dist.testing.model_zoo import CASES, Case

MESHES = ((2,), (2, 2))
TOLERANCE = 1e-4  # of the largest value of an output, or of 1
SHARE = 0.75  # of what a device without sharding needs: so that something is sharded
SECONDS = 600.0  # that two processes may take


def difference(got: Any, want: Any) -> float:
    """The largest difference of two nested results, relative to the largest value (or 1) of each tensor."""
    if isinstance(want, torch.Tensor):
        a, b = np.asarray(got, np.float64), want.double().numpy()
        if a.shape != b.shape:
            return float("inf")
        return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max()))) if b.size else 0.0
    if isinstance(want, Mapping):
        return max([difference(got[key], value) for key, value in want.items()], default=0.0)
    if isinstance(want, tuple | list):
        return max([difference(a, b) for a, b in zip(got, want, strict=True)], default=0.0)
    return 0.0 if got == want else float("inf")


def planned(graph: Any, mesh: tuple[int, ...]) -> hidet_dist.Plan:
    """A plan that the memory budget forces to shard, where there is one."""
    config = {"mesh_shape": list(mesh)}
    free = hidet_dist.make_plan(graph, config)
    share = int(free.stages[0].weight_bytes_per_device * SHARE)
    try:
        return hidet_dist.make_plan(graph, config, {"mem_budget": max(1, share)})
    except InfeasibleError as error:
        try:
            return hidet_dist.make_plan(graph, config, {"mem_budget": error.least_budget})
        except InfeasibleError:
            return free


def simulated(graph: Any, mesh: tuple[int, ...], interface: Interface, flat: list[np.ndarray]) -> Any:
    """The nested result of all ranks, in the simulator."""
    return interface.nest(simulate(hidet_dist.partition(graph, planned(graph, mesh)), flat))


def served(graph: Any, interface: Interface, flat: list[np.ndarray]) -> Any:
    """The nested result of two processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = {"input_specs": [None] * len(flat)}
        plan = planned(graph, (2,))
        hidet_dist.auto_parallel(graph, {"mesh_shape": [2]}, None, folder / "artifacts", plan=plan)
        del whole
        mesh = plan.stages[0].mesh
        for rank in range(2):
            own = [
                x[i.spec.slices(x.shape, mesh, mesh.coordinate(rank))]
                for x, i in zip(flat, plan.stages[0].inputs, strict=True)
            ]
            np.savez(folder / f"inputs{rank}.npz", *own)
        command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", __file__, "--serve", str(folder)]
        subprocess.run(command, check=True, timeout=SECONDS)
        outputs = []
        for number, y in enumerate(plan.stages[0].outputs):
            parts = [np.load(folder / f"outputs{rank}.npz")[f"arr_{number}"] for rank in range(2)]
            value = np.empty(y.shape, parts[0].dtype)
            for rank, part in enumerate(parts):
                value[y.spec.slices(value.shape, mesh, mesh.coordinate(rank))] = part
            outputs.append(value)
        return interface.nest(outputs)


def serve(folder: Path) -> None:
    """What each of the two processes does."""
    with hidet_dist.load_partition(folder / "artifacts") as model:
        with np.load(folder / f"inputs{model.rank}.npz") as arrays:
            inputs = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
        np.savez(folder / f"outputs{model.rank}.npz", *model.run(inputs))


def check(case: Case, processes: bool) -> tuple[str, str]:
    """Whether a model is right, refused or wrong, and why."""
    try:
        module, inputs = case.build()
    except ModuleNotFoundError as error:
        return "refused", f"{error.name} is not installed"
    try:
        graph = hidet_dist.from_torch(module, inputs)
    except TraceError as error:
        return "refused", " ".join(str(error).split())[:300]
    interface = interface_of(graph)
    assert interface is not None
    flat = [x.numpy() for x in interface.flatten(**inputs)]
    with torch.no_grad():
        want = module(**inputs)
    worst = 0.0
    try:
        for mesh in MESHES:
            worst = max(worst, difference(simulated(graph, mesh, interface, flat), want))
        if processes:
            worst = max(worst, difference(served(graph, interface, flat), want))
    except HidetDistError as error:
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ("right" if worst <= TOLERANCE else "wrong"), f"off by {worst:.1e}"


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--processes", action="store_true", help="run two processes as well")
    parser.add_argument("--serve", type=Path, help="what it starts itself with, once a rank")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    warnings.filterwarnings("ignore", category=FutureWarning)
    found: dict[str, list[str]] = {"right": [], "refused": [], "wrong": []}
    table = Table("model", "verdict", "why", "CPU s")
    console = Console(stderr=True, width=160)
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        begin = time.process_time()
        verdict, reason = check(case, arguments.processes)
        found[verdict].append(case.name)
        table.add_row(case.name, verdict, reason, f"{time.process_time() - begin:.1f}")
        console.print(f"{case.name}: {verdict}, {reason}", markup=False, highlight=False)
    console.print(table)
    counts = {verdict: len(names) for verdict, names in found.items()}
    print(json.dumps({"models": sum(counts.values()), **counts, "by_name": found}), flush=True)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
