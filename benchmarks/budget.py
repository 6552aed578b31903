"""Plan under tight memory budgets: CPU seconds, gaps and memory of planning; the last line is JSON.

    python -m benchmarks.budget [--cases NAME ...] [--seconds CPU_SECONDS] [--without STEP ...]

A case is a model on a mesh (``gpt2_4l_2x2``). Its least budget is looked for first, beside a plan without a budget:
``free`` is the latter, ``refused`` a budget of one byte. Then the model is planned at multiples of the least budget:
``gpt2_4l_2x2@1.02``. ``--cases`` takes the names of models, of cases, or the beginnings of either. Every figure is of a
process of its own, which ends after ``--seconds``; planning is told to end at half of them. Time is CPU time, so that
other work on the machine does not matter. ``--without`` leaves out steps of the search, which are listed in
hidet_dist/search/steps.py. Of each:

seconds          CPU seconds from the traced graph to the plan, or to the refusal.
gap              (plan - bound) / plan, of the plan of the least sum of seconds; for a refusal (least - bound) / least.
predicted_seconds  of a run: with overlap, where the machine has it.
peak_rss_bytes   of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hidet.graph import FlowGraph
from rich.console import Console
from rich.table import Table

from benchmarks.without import add_without, passed_on
from hidet_dist.errors import HidetDistError, InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import bert, models, shapes
from hidet_dist.view import GraphView

SECONDS = 120.0
TIGHT = (1.02, 1.1, 1.3)
SMALL_LLAMA = shapes.LlamaConfig(4, 512, 8, 4, 1024, 1000, 2, 64, "float32")  # that of tests/gpu/build.py


@dataclass(frozen=True)
class Model:
    """A case: a model, a machine, and the budgets as multiples of the least that any plan needs."""

    build: Callable[[], FlowGraph]
    mesh: tuple[int, ...]
    machine: str
    multiples: tuple[float, ...] = TIGHT


def _minilm() -> FlowGraph:
    """The demo's batch: 6 sentences of 32 tokens."""
    return bert.trace(bert.load_minilm()[0], batch=6, seq=32)


def _gpt2(layers: int) -> Callable[[], FlowGraph]:
    return lambda: models.gpt2(layers)[0]


MODELS: dict[str, Model] = {
    "minilm_4": Model(_minilm, (4,), "cpu"),
    "minilm_2x2": Model(_minilm, (2, 2), "cpu"),
    "small_llama_2": Model(lambda: shapes.llama(SMALL_LLAMA), (2,), "dgx-h100"),
    "small_llama_4": Model(lambda: shapes.llama(SMALL_LLAMA), (4,), "dgx-h100"),
    **{
        f"{name}_{'x'.join(map(str, mesh))}": Model(build, mesh, machine, (1.02, 1.1, 1.3, 2.0))
        for name, build, machine in (
            ("llama_1b", lambda: shapes.llama(shapes.TINY_LLAMA), "cpu"),
            ("gpt2_124m", lambda: shapes.gpt(shapes.GPT2), "dgx-a100"),
        )
        for mesh in ((2,), (4,), (2, 4))
    },
    "gpt3_175b_8x8": Model(lambda: shapes.gpt(shapes.GPT3_175B), (8, 8), "dgx-a100-pod", (1.1,)),
    "gpt2_2l_2x2": Model(_gpt2(2), (2, 2), "cpu"),
    "gpt2_4l_2x2": Model(_gpt2(4), (2, 2), "cpu"),
    "gpt2_12l_2x2": Model(_gpt2(12), (2, 2), "cpu"),
    "llama3_8b_4l_2x2x2": Model(
        lambda: shapes.llama(replace(shapes.LLAMA3_8B, layers=4)), (2, 2, 2), "dgx-a100", (1.03,)
    ),
    "llama3_8b_8": Model(lambda: shapes.llama(shapes.LLAMA3_8B), (8,), "dgx-a100", (1.02, 1.2)),
    "llama3_8b_2x4": Model(lambda: shapes.llama(shapes.LLAMA3_8B), (2, 4), "dgx-a100", (1.02, 1.07, 1.2)),
    "llama3_70b_2x8": Model(lambda: shapes.llama(shapes.LLAMA3_70B), (2, 8), "dgx-a100-pod", (1.02, 1.2)),
}


def measure(name: str, budget: int | None, seconds: float, without: Sequence[str] = ()) -> dict[str, Any]:
    """Plan one model with a budget, in this process."""
    model = MODELS[name]
    graph = model.build()
    cluster = builtin(model.machine, DeviceMesh(model.mesh))
    result: dict[str, Any] = {"budget": budget}
    begin = time.process_time()
    graph = normalize(graph)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = search(
                graph,
                cluster,
                mem_budget=budget,
                refine_mesh=False,
                report=False,
                solver_time_limit_seconds=seconds,
                clock=time.process_time,
                without=without,
            )
    except InfeasibleError as error:
        result |= {"least": error.least_budget, "bound_bytes": error.bound_bytes}
        result["gap"] = 1 - error.bound_bytes / error.least_budget
    except HidetDistError as error:
        result |= {"gap": None, "error": str(error)}
    else:
        result |= {
            "gap": found.gap,
            "predicted_seconds": found.plan.makespan_seconds,
            "held_bytes": max(live_bytes(GraphView(graph), found.plan.stages[0], cluster.device.places_shards)),
            "time_limit_reached": found.time_limit_reached,
        }
    result["seconds"] = round(time.process_time() - begin, 3)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def child(name: str, budget: int | None, seconds: float, without: Sequence[str]) -> dict[str, Any]:
    """Plan in a process of its own, which the system ends after so many CPU seconds."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))

    command = [
        sys.executable,
        "-m",
        "benchmarks.budget",
        "--one",
        name,
        "--budget",
        str(budget or 0),
        "--seconds",
        str(seconds / 2),
    ]
    command += passed_on(without)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"budget": budget, "gap": None, "seconds": None, "error": lines[-1] if lines else f"{done.returncode}"}
    own: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""], help="models or cases, or how their names begin")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds after which a process ends")
    add_without(parser)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.budget or None, given.seconds, given.without)))
        return
    table = Table(title="Planning under tight memory", header_style="")
    for column in ("case", "CPU seconds", "gap", "peak RSS [MiB]", "bytes a device", "predicted [ms]"):
        table.add_column(column, justify="left" if column == "case" else "right")
    results: dict[str, dict[str, Any]] = {}
    console = Console(width=140, stderr=True)

    def add(case: str, own: dict[str, Any]) -> dict[str, Any]:
        results[case] = own
        gap, time_, predicted = own["gap"], own["seconds"], own.get("predicted_seconds")
        table.add_row(
            case,
            "-" if time_ is None else f"{time_:.2f}",
            "-" if gap is None else f"{gap:.1e}",
            f"{own['peak_rss_bytes'] / 2**20:.0f}" if "peak_rss_bytes" in own else "-",
            str(own.get("held_bytes", own.get("least", "-"))),
            f"{predicted * 1e3:.5g}" if predicted else "-",
        )
        console.print(f"{case}: {json.dumps(own)}", highlight=False)
        return own

    for name, model in MODELS.items():
        cases = {f"{name}@{multiple:g}": multiple for multiple in model.multiples}
        chosen = [case for case in (name, *cases) if any(case.startswith(part) for part in given.cases)]
        if not chosen:
            continue
        if name in chosen:
            add(f"{name}@free", child(name, None, given.seconds, given.without))
        refused = add(f"{name}@refused", child(name, 1, given.seconds, given.without))
        if "least" not in refused:
            continue
        for case in chosen:
            if case in cases:
                add(case, child(name, int(cases[case] * refused["least"]), given.seconds, given.without))
    Console(width=140).print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
