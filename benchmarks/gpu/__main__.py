"""hidet_dist on this machine's GPU beside PyTorch, in one run.

    python -m benchmarks.gpu [--cases gpt2_1_float16,llama_8_float16] [--quick] [--seconds 500]

Each case is planned and compiled for one rank and for two, several at a time on all cores; and, case by case, as soon
as it is built,

* hidet_dist with one rank and with two, kernel by kernel and as a CUDA graph (two ranks share the GPU where there is
  one, which NCCL does from 2.30 on)
* PyTorch on the same GPU: eager, by ``torch.compile``, and by its mode ``reduce-overhead``, which uses CUDA graphs

are loaded side by side, their answers compared, and their calls timed in turns, from the call to the device being
through; what is still built stands still meanwhile. Inputs lie on the device. All is printed as it is found, and
written to a file in ``benchmarks/results`` after each case; what fails, crashes or hangs is left out. The last line is
JSON with the ratios to ``torch.compile``. Exits with 0 when all went well, 1 when something failed or there was no time
for it, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.tables import cases_table, kernels_table, memory_table
from benchmarks.serving.host import describe
from benchmarks.serving.variants import Variant, VariantError, close_all, measure_in_turns, medians
from hidet_dist.errors import HidetDistError
from hidet_dist.files import write_text
from hidet_dist.runtime.cuda import driver
from hidet_dist.testing.processes import Programs, exit_on_sigterm

HERE = Path(__file__).parent
GOAL = 1.1  # of torch.compile's time, for one rank
TIMING_SECONDS, QUICK_SECONDS = 12.0, 2.0  # about: for the calls of one case
BUILD_SECONDS = 300.0
LOAD_SECONDS = 150.0  # for the variants of a case, which are loaded at once: most is torch.compile's
CALL_SECONDS = 10.0
AFTER_SECONDS = 90.0  # that what was begun in time may go on for; then all is ended
BUILD_NICENESS = 5
PROFILED_CALLS = 5
NO_GPU = 2
_LOG_LINES = 5
REFERENCE = "torch_eager"
PEERS = {REFERENCE: "eager", "torch_compile": "compile", "torch_compile_graph": "compile_graph"}
RATIOS = {
    "over_compile": ("hidet_1", "torch_compile"),
    "graph_over_compile": ("hidet_1_graph", "torch_compile"),
    "graph_over_compile_graph": ("hidet_1_graph", "torch_compile_graph"),
    "over_eager": ("hidet_1", REFERENCE),
    "two_ranks_over_one": ("hidet_2", "hidet_1"),
    "two_ranks_graph_over_one": ("hidet_2_graph", "hidet_1_graph"),
}


class GpuBenchmark:
    """One run: what was measured, and what failed.

    Parameters
    ----------
    work: Path
        Where weights and artifacts lie meanwhile.
    arch: str
        The GPU's architecture.
    seconds: float
        About what the calls of one case may take.
    space: int
        As optimization_config's: how many candidates there are of a kernel.
    last_begin: float
        After so many seconds nothing is begun, and what is not built by then is given up; what is being measured has a
        minute and a half from then on.
    console: Console
        Where progress is shown.
    device: str
        PyTorch's device.
    builder, worker: Path
        The programs that build a case and run a variant.
    """

    def __init__(
        self,
        work: Path,
        arch: str,
        seconds: float,
        space: int,
        last_begin: float,
        console: Console,
        device: str = "cuda",
        builder: Sequence[str] = ("-m", "benchmarks.gpu.build"),
        worker: Sequence[str] = ("-m", "benchmarks.gpu.worker"),
    ):
        self.work, self.arch, self.seconds, self.space = work, arch, seconds, space
        self.last_begin = last_begin
        self.console, self.device, self.builder, self.worker = console, device, builder, worker
        self.cases: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.not_run: list[str] = []
        self._programs = Programs()
        self._loaded: list[Variant] = []
        self._begin = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        """Show a line, with the time."""
        self.console.print(f"{self.elapsed():6.1f} s  {escape(text)}", soft_wrap=True)

    def failed(self, what: str, error: object) -> None:
        """Note a failure, and go on."""
        self.failures.append(f"{what}: {error}")
        self.say(f"failed: {self.failures[-1]}")

    def write_weights(self, name: str) -> bool:
        """A file of weights for a case's model; whether it is there."""
        case = CASES[name]
        return self._run(["weights", name, str(self._weights(case))], f"weights of {case.model}") is not None

    def build(self, name: str, ranks: int, weights: Future[bool]) -> dict[str, Any] | None:
        """Plan and compile a case, once its weights are there; None if that fails."""
        if not weights.result():
            return None
        how = [str(ranks), self.arch, str(self.space), str(self._artifacts(name, ranks))]
        out = self._run(["build", name, str(self._weights(CASES[name])), *how], f"{name}, building for {ranks} ranks")
        if out is None:
            return None
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        kernels, collectives = found["kernels"], found["collectives"]
        self.say(
            f"{name}, {ranks} ranks: {kernels} kernels, {collectives} collectives, planned in "
            f"{found['plan_seconds']:.1f} s, compiled in {found['compile_seconds']:.1f} s"
        )
        return found

    def _run(self, arguments: list[str], what: str) -> str | None:
        """The output of the builder; None if it fails."""
        left = min(BUILD_SECONDS, self.last_begin - self.elapsed())
        if left <= 0:
            return None
        done = self._programs.run([sys.executable, *self.builder, *arguments], left, BUILD_NICENESS)
        if done.status is None:
            self.failed(what, f"not done after {done.seconds:.0f} s")
            return None
        if done.status:
            *before, last = done.errors.strip().splitlines() or ["it printed no error"]
            self.failed(what, "\n".join([f"{last} (exit status {done.status})", *before[-_LOG_LINES:]]))
            return None
        return done.output

    def measure(self, name: str, built: dict[int, dict[str, Any]]) -> None:
        """Load, compare and time a case."""
        try:
            started = self._start(name, built)
            errors = self._check(name, started, built)

            def failed(variant: Variant, error: VariantError) -> None:
                self.failed(f"{name}, {variant.name}", error)

            with self._programs.paused():
                times = measure_in_turns(started, self.seconds, failed)
                found = {}
                for variant in started:
                    if variant.name in times:
                        try:
                            found[variant.name] = variant.profile(PROFILED_CALLS)
                        except VariantError as error:
                            failed(variant, error)
        finally:
            close_all(self._loaded)
            self._loaded = []
        seconds = medians(times)
        ratios = {
            ratio: seconds[top] / seconds[bottom]
            for ratio, (top, bottom) in RATIOS.items()
            if top in seconds and bottom in seconds
        }
        self.cases[name] = {
            "title": CASES[name].title,
            "built": {str(ranks): own for ranks, own in built.items()},
            "largest_error": errors,
            "median_seconds": seconds,
            "calls": {variant: len(own) for variant, own in times.items()},
            "ratios": ratios,
            "profile": found,
        }
        for title, own in seconds.items():
            self.say(f"{name}, {title}: {own * 1e3:.3f} ms")
        for ratio, value in ratios.items():
            goal = f" (goal {GOAL})" if ratio.endswith("over_compile") else ""
            self.say(f"{name}, {ratio}: {value:.2f}{goal}")

    def _start(self, name: str, built: dict[int, dict[str, Any]]) -> list[Variant]:
        """The variants of a case that could be loaded."""
        case, started = CASES[name], []
        inputs = self.work / f"{name}.npz"
        np.savez(inputs, *case.inputs())
        common = {
            "inputs": str(inputs),
            "case": name,
            "weights": str(self._weights(case)),
            "device": self.device,
        }
        threads = max(1, (os.cpu_count() or 1) // 8)
        wanted = [(variant, {"how": how}, 1) for variant, how in PEERS.items()]
        for ranks in built:
            folder = self._artifacts(name, ranks)
            wanted.append((f"hidet_{ranks}", {"how": "hidet", "artifacts": str(folder)}, ranks))
            graph = str(folder.with_name(f"{folder.name}-graph"))
            wanted.append((f"hidet_{ranks}_graph", {"how": "hidet", "artifacts": graph}, ranks))
        loading = [
            Variant(variant, {**common, **settings}, ranks, threads, self.work, self.worker, CALL_SECONDS)
            for variant, settings, ranks in wanted
        ]
        self._loaded = list(loading)
        deadline = time.perf_counter() + LOAD_SECONDS
        for own in loading:
            try:
                first = own.ready(max(0.0, deadline - time.perf_counter()))
                self.say(f"{name}: {own.name} is there, first call {first:.2f} s")
                started.append(own)
            except VariantError as error:
                own.close()
                self.failed(f"{name}, loading", error)
        return started

    def _check(self, name: str, started: list[Variant], built: dict[int, dict[str, Any]]) -> dict[str, float]:
        """The largest error of each variant's answers, relative to the largest answer; wrong variants are left out.

        The answers of two programs that round are compared, so twice what rounding explains is taken.
        """
        bound = 2 * max((own["tolerance"] for own in built.values()), default=0.0)
        errors: dict[str, float] = {}
        expected: np.ndarray | None = None
        for variant in list(started):
            try:
                answers = [np.load(file).astype(np.float32) for file in variant.answer(self.work)]
                if expected is None:
                    if variant.name != REFERENCE:
                        self.failed(f"{name}, answers", f"there are none of {REFERENCE}; {variant.name}'s count")
                    expected = answers[0]
                worst = max(
                    float(np.abs(answer - expected).max()) if answer.shape == expected.shape else np.inf
                    for answer in answers
                )
                errors[variant.name] = worst / float(np.abs(expected).max())
                if bound and not errors[variant.name] <= bound:
                    raise VariantError(f"{variant.name} is off by {errors[variant.name]:.2e}; {bound:.2e} is explained")
            except VariantError as error:
                self.failed(f"{name}, answers", error)
                started.remove(variant)
                variant.close()
        return errors

    def run(self, cases: dict[str, Case], after_each: Callable[[], object]) -> None:
        """Build all cases, and measure one after the other, the first of those that are built."""
        watch = threading.Timer(self.last_begin + AFTER_SECONDS, self._end) if math.isfinite(self.last_begin) else None
        if watch is not None:
            watch.daemon = True
            watch.start()
        # Planning takes one core, compiling all.
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:
            try:
                first = {case.model: name for name, case in reversed(cases.items())}
                weights = {
                    model: pool.submit(self.write_weights, first[model])
                    for model in dict.fromkeys(case.model for case in cases.values())
                }
                building = {
                    name: {ranks: pool.submit(self.build, name, ranks, weights[case.model]) for ranks in (1, 2)}
                    for name, case in cases.items()
                }
                while building:
                    name = _first_built(building)
                    self._measure_built(name, {ranks: future.result() for ranks, future in building.pop(name).items()})
                    after_each()
            finally:
                self._end()
                if watch is not None:
                    watch.cancel()

    def _measure_built(self, name: str, results: dict[int, dict[str, Any] | None]) -> None:
        if self.elapsed() > self.last_begin:
            self.not_run.append(name)
            return
        built = {ranks: found for ranks, found in results.items() if found is not None}
        try:
            self.measure(name, built)
        except Exception as error:  # whatever it is, the other cases are to be measured
            self.failed(name, f"{type(error).__name__}: {error}")
        for ranks in built:  # gigabytes of weights
            folder = self._artifacts(name, ranks)
            for own in (folder, folder.with_name(f"{folder.name}-graph")):
                shutil.rmtree(own, ignore_errors=True)

    def _end(self) -> None:
        """End all programs that still run, and begin none."""
        self._programs.end()
        for variant in self._loaded:
            variant.kill()

    def _weights(self, case: Case) -> Path:
        return self.work / f"{case.model}.safetensors"

    def _artifacts(self, name: str, ranks: int) -> Path:
        return self.work / f"{name}-{ranks}"


def _first_built(building: dict[str, dict[int, Future[dict[str, Any] | None]]]) -> str:
    """The first case that is built, or has failed to be; waits for one."""
    while True:
        for name, own in building.items():
            if all(future.done() for future in own.values()):
                return name
        wait(
            [future for own in building.values() for future in own.values() if not future.done()],
            return_when=FIRST_COMPLETED,
        )


def find_gpu() -> tuple[list[str], str]:
    """The names of the GPUs, and the first one's architecture. Raises ``ConfigError`` where there is none."""
    driver.device_of_rank(0)
    system = driver.load()
    major, minor = system.capability(0)
    return [system.device_name(device) for device in range(system.device_count())], f"sm_{major}{minor}"


def report(run: GpuBenchmark, machine: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write what was measured so far; returns the ratios by case."""
    ratios = {
        name: {ratio: round(value, 3) for ratio, value in own["ratios"].items()} for name, own in run.cases.items()
    }
    result = {
        "machine": machine,
        "seconds": round(run.elapsed(), 1),
        "space": run.space,
        "cases": run.cases,
        "failed": run.failures,
        "not_run": run.not_run,
    }
    out.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", machine["gpus"][0].lower()).strip("-")
    write_text(out / f"gpu-{slug}.json", json.dumps(result, indent=1) + "\n")
    return {**ratios, "failed": [text.splitlines()[0] for text in run.failures], "not_run": run.not_run}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measures hidet_dist beside PyTorch on this machine's GPU.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="few calls: to see that all works")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--space", type=int, default=0, help="candidates of kernels: 0 for one, 1 for some, 2 for many")
    parser.add_argument("--kernels", action="store_true", help="also the times of single kernels")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results", help="the folder for the results")
    options = parser.parse_args(given)
    options.cases = options.cases.split(",")
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return options


def main(given: list[str] | None = None) -> int:
    """Measure, and return the exit status."""
    options = arguments(given)
    exit_on_sigterm()
    names = options.cases
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    try:
        gpus, arch = find_gpu()
    except HidetDistError as error:
        console.print(f"no GPU, nothing was measured: {escape(str(error))}")
        print(json.dumps({"failed": ["no GPU"], "not_run": names}))
        return NO_GPU
    machine = {"gpus": gpus, "arch": arch, **describe()}
    console.print(f"{len(gpus)} GPU(s): {', '.join(gpus)}; {arch}; {os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory(prefix="hidet_dist-gpu-bench-") as folder:
        seconds = QUICK_SECONDS if options.quick else TIMING_SECONDS
        run = GpuBenchmark(Path(folder), arch, seconds, options.space, options.seconds, console)
        run.run({name: CASES[name] for name in names}, lambda: report(run, machine, options.out))
    ratios = report(run, machine, options.out)
    if run.cases:
        console.print(cases_table(run.cases))
        console.print(memory_table(run.cases))
    for own in run.cases.values() if options.kernels else ():
        console.print(kernels_table(own))
    for failure in run.failures:
        console.print(f"[bold red]failed[/]: {escape(failure)}")
    for name in run.not_run:
        console.print(f"not run: {name}")
    console.print(f"took {run.elapsed():.0f} s")
    print(json.dumps(ratios))
    return 1 if run.failures or run.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
