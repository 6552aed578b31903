"""Which models the front ends of PyTorch and ONNX trace right: a table, and as last line JSON.

Each model of ``hidet_dist.testing.model_zoo`` is traced, planned on two devices and on a mesh of 2 x 2, compiled, and
computed by all ranks in the simulator, then by two processes from artifacts. Results are compared with PyTorch's. A
model is ``right``, ``refused`` (with the reason), or ``wrong``; the exit status is 1 if any is wrong. Each model has a
process of its own, forked from one that has imported the libraries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hidet.graph import FlowGraph
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import hidet_dist
from hidet_dist.compile.build import optimize_program
from hidet_dist.errors import HidetDistError, InfeasibleError, TraceError
from hidet_dist.simulate import assemble, simulate, split
from hidet_dist.spec.interface import Interface, interface_of
from hidet_dist.testing.model_zoo import CASES, Case, case_named
from hidet_dist.testing.rank_pool import RankPool
from hidet_dist.weights import is_weight

MESHES = ((2,), (2, 2))
TOLERANCE = 1e-4  # of the largest value of an output, or of 1
FRACTION = 0.75  # of what a device without sharding needs: so that something is sharded
SEARCH_SECONDS, GAP = 1200.0, 0.3  # of a plan: any must be right, and a busy machine needs its time
SECONDS = 1800.0  # of a model; only what hangs takes as long
PRELOADED = [
    "transformers",
    "torch.export",
    "hidet_dist.compile.build",
    "hidet_dist.simulate",
    "hidet_dist.testing.model_zoo",
]


@dataclass
class Outcome:
    """What became of a model.

    Attributes
    ----------
    verdict: ``right``, ``refused`` or ``wrong``.
    reason: why it is not right, or nothing.
    difference: the largest one from PyTorch, relative to the largest value of the output, or to 1.
    operators: of the graph as it is planned.
    collectives: of the programs, by mesh.
    processes: how many computed it from artifacts; 0 where that was left out.
    cpu_seconds: of all processes, compilers included.
    """

    verdict: str
    reason: str = ""
    difference: float | None = None
    operators: int = 0
    collectives: Mapping[str, int] | None = None
    processes: int = 0
    cpu_seconds: float = 0.0


def difference(got: Any, want: Any) -> float:
    """The largest difference of two nested results, relative to the largest value (or 1) of each tensor."""
    if isinstance(want, torch.Tensor):
        a, b = np.asarray(got, np.float64), want.double().numpy()
        if a.shape != b.shape:
            return float("inf")
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        return float(np.abs(a - b)[finite].max() / max(1.0, float(np.abs(b)[finite].max()))) if finite.any() else 0.0
    if isinstance(want, Mapping):
        return max([difference(got[key], value) for key, value in want.items()], default=0.0)
    if isinstance(want, tuple | list):
        return max([difference(a, b) for a, b in zip(got, want, strict=True)], default=0.0)
    return 0.0 if got == want else float("inf")


def planned(graph: FlowGraph, mesh: tuple[int, ...]) -> hidet_dist.Plan:
    """A plan that the memory budget forces to shard, where there is one."""
    config, options = {"mesh_shape": list(mesh)}, {"solver_time_limit_seconds": SEARCH_SECONDS, "solver_gap": GAP}
    tensors = {id(x): x for op in graph.nodes for x in op.inputs if is_weight(x)}
    budget = int(FRACTION * sum(int(x.nbytes) for x in tensors.values()))
    try:
        return hidet_dist.make_plan(graph, config, {**options, "mem_budget": max(1, budget)})
    except InfeasibleError as error:
        try:
            return hidet_dist.make_plan(graph, config, {**options, "mem_budget": error.least_budget})
        except InfeasibleError:
            return hidet_dist.make_plan(graph, config, options)


@dataclass
class Model:
    """A model as a graph, the arrays of one call, and what PyTorch computes of them."""

    graph: FlowGraph
    interface: Interface
    inputs: list[np.ndarray]
    want: Any

    def compare(self, outputs: list[np.ndarray]) -> float:
        """How far the graph's outputs are from PyTorch's results."""
        return difference(self.interface.nest(outputs), self.want)


@contextmanager
def traced(case: Case) -> Iterator[Model]:
    """A model of PyTorch, or what it is exported to, as a graph."""
    module, inputs = case.build()
    with torch.no_grad():
        want = module(**inputs)
    if case.form == "torch":
        graph = hidet_dist.from_torch(module, inputs)
        interface = interface_of(graph)
        assert interface is not None
        yield Model(graph, interface, [x.numpy() for x in interface.flatten(**inputs)], want)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(module, kwargs=dict(inputs), f=path, opset_version=18, dynamo=True, verbose=False)
        graph = hidet_dist.from_onnx(path)
        interface = interface_of(graph)
        assert interface is not None
        tensors = [x for x in pytree.tree_leaves(want) if isinstance(x, torch.Tensor)]
        results = dict(zip(interface.output_names, tensors, strict=True))
        yield Model(graph, interface, [inputs[name].numpy() for name in interface.input_names], results)


def simulated(model: Model, plan: hidet_dist.Plan) -> tuple[float, int]:
    """How far the simulated ranks are off, with the kernels that are served, and the number of collectives."""
    program = hidet_dist.partition(model.graph, plan)
    outputs = simulate(program, model.inputs, optimize_program(program))
    return model.compare(outputs), len(program.communications())


def served(model: Model, plan: hidet_dist.Plan) -> float:
    """How far two processes are off that load artifacts. Raises RuntimeError where they fail."""
    with tempfile.TemporaryDirectory() as name, RankPool(2, SECONDS) as ranks:
        artifacts = Path(name) / "artifacts"
        hidet_dist.auto_parallel(model.graph, {"mesh_shape": [2]}, None, artifacts, plan=plan)
        (stage,) = plan.stages
        shards = zip(*map(split, stage.inputs, repeat(stage.mesh), model.inputs), strict=True)
        outputs = zip(*ranks.run(artifacts, list(shards)), strict=True)
        return model.compare(list(map(assemble, stage.outputs, repeat(stage.mesh), outputs)))


def check(case: Case, processes: bool) -> Outcome:
    """Trace, plan, compile and run a model."""
    outcome = Outcome("right", collectives={})
    try:
        with traced(case) as model:
            plans = {mesh: planned(model.graph, mesh) for mesh in MESHES}
            outcome.operators = len(plans[MESHES[0]].stages[0].operators)
            worst = 0.0
            for mesh, plan in plans.items():
                off, collectives = simulated(model, plan)
                worst = max(worst, off)
                outcome.collectives = {**(outcome.collectives or {}), "x".join(map(str, mesh)): collectives}
            if processes:
                worst = max(worst, served(model, plans[2,]))
                outcome.processes = 2
            outcome.difference = worst
            if not worst <= TOLERANCE:
                outcome.verdict, outcome.reason = "wrong", f"off by {worst:.1e}"
    except TraceError as error:
        outcome.verdict, outcome.reason = "refused", _line(error)
    except (HidetDistError, RuntimeError) as error:
        outcome.verdict, outcome.reason = "wrong", f"{type(error).__name__}: {_line(error)}"
    return outcome


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def in_process(case: Case, libraries: Path | None, processes: bool) -> Outcome:
    """Check a model in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder) / "log", Path(folder) / "outcome.json"
        process = context.Process(target=child, args=(case.name, libraries, processes, log, result))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.terminate()
            process.join()
            return Outcome("wrong", f"it took more than {SECONDS:g} s")
        if not result.exists():
            printed = log.read_text(errors="replace") if log.exists() else ""
            return Outcome("wrong", f"it ended with status {process.exitcode}: {' '.join(printed.split())[-300:]}")
        return Outcome(**json.loads(result.read_text()))


def child(name: str, libraries: Path | None, processes: bool, log: Path, result: Path) -> None:
    """Check a model in this process, and write the outcome, and how long it took, to a file."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in any program: hidet's compilers must know what is in force
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes that it started end too
    warnings.simplefilter("ignore")
    case = case_named(name)
    if case.library == "torchvision" and libraries is not None:
        sys.path.append(str(libraries))
    outcome = check(case, processes)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    outcome.cpu_seconds = round(sum(own.ru_utime + own.ru_stime for own in used), 1)
    result.write_text(json.dumps(asdict(outcome)))


def in_order(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """What there is of each model, in the order of the models."""
    return {case.name: outcomes[case.name] for case in CASES if case.name in outcomes}


def write(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Write outcomes to a file, in which those of other models stay."""
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    results |= {name: asdict(outcome) for name, outcome in outcomes.items()}
    path.write_text(json.dumps({"benchmark": "benchmarks/models.py", "results": in_order(results)}, indent=1) + "\n")


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--no-processes", action="store_true", help="leave the two processes out")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--libraries", type=Path, help="a folder with torchvision, where that is not installed")
    parser.add_argument("--out", type=Path, help="a file for the outcome of each model, as JSON")
    arguments = parser.parse_args()
    known = {case.name for case in CASES}
    if unknown := sorted(set(arguments.names) - known):
        parser.error(f"there is no model {unknown[0]!r}; there are {', '.join(sorted(known))}")
    cases = [case for case in CASES if not arguments.names or case.name in arguments.names]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    console = Console(stderr=True, width=160)
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        checks = {
            pool.submit(in_process, case, arguments.libraries, not arguments.no_processes): case.name for case in cases
        }
        try:
            for done in as_completed(checks):
                outcomes[checks[done]] = done.result()
                console.print(f"{checks[done]}: {', '.join(_row(done.result()))}", markup=False, highlight=False)
                if arguments.out is not None:
                    write(outcomes, arguments.out)
        finally:
            pool.shutdown(cancel_futures=True)
    outcomes = in_order(outcomes)
    table = Table("model", "verdict", "difference", "operators", "collectives", "CPU s", "why")
    for name, outcome in outcomes.items():
        table.add_row(name, *_row(outcome))
    console.print(table)
    by_name = {
        verdict: [name for name, own in outcomes.items() if own.verdict == verdict]
        for verdict in ("right", "refused", "wrong")
    }
    counts = {verdict: len(names) for verdict, names in by_name.items()}
    print(json.dumps({"models": len(outcomes), **counts, "by_name": by_name}), flush=True)
    return 1 if by_name["wrong"] else 0


def _row(outcome: Outcome) -> list[str]:
    off = "" if outcome.difference is None else f"{outcome.difference:.1e}"
    collectives = ", ".join(f"{count} on {mesh}" for mesh, count in (outcome.collectives or {}).items())
    return [outcome.verdict, off, str(outcome.operators), collectives, f"{outcome.cpu_seconds:.0f}", outcome.reason]


if __name__ == "__main__":
    sys.exit(main())
