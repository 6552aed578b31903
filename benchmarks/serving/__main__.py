"""hidet_dist beside PyTorch on the models that people serve, in one run on this machine.

    python -m benchmarks.serving [--models minilm_8,gpt2_1] [--quick] [--kernels]

This machine is calibrated, each model is planned and compiled for one rank and for two, and then

* hidet_dist with one rank of all threads, one rank of one thread, and two ranks that share the threads
* PyTorch, eager and compiled, in one process of all threads
* ONNX Runtime and OpenVINO, with all threads and with one, where they are installed (the extra ``bench``)
* PyTorch in two processes that share the threads: DTensor's ``parallelize_module`` over Gloo, where it has a plan

are loaded side by side, their answers compared, and their calls timed in turns. Of a model in 8 bits the runtimes are
as each of them quantizes, and hidet_dist runs in float32, too. The tables say which goals are met, and how far
predicted times are from measured ones. ``--kernels`` says the same of each kernel. All figures go to a file in
``benchmarks/results``; the last line is JSON with the ratios by model. Weights are random where none are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.goals import goals_of, overall, prediction_errors, rounded
from benchmarks.serving.host import describe
from benchmarks.serving.tables import (
    all_reduce_table,
    answers_table,
    goals_table,
    kernels_table,
    prediction_table,
    times_table,
)
from benchmarks.serving.variants import Variant, VariantError, measure_in_turns, medians
from hidet_dist.calibration import calibrate
from hidet_dist.errors import HidetDistError
from hidet_dist.files import write_text
from hidet_dist.progress import Progress, ProgressBar

HERE = Path(__file__).parent
REFERENCE, FLOAT32 = "torch_eager", "float32"
ALL_REDUCE_BYTES = 256 * 1024
TIMING_SECONDS, QUICK_SECONDS = 30.0, 5.0  # about: for the calls of one model
PROFILED = ("hidet_1", "hidet_2")
PROFILED_CALLS = 5
# Of each prediction the build whose plan it is, and the ranks of the machine as it was calibrated.
PREDICTED = {"hidet_1": ("1", 1), "hidet_1_one_thread": ("1", 2), "hidet_2": ("2", 2)}
BUILD_SECONDS = 600.0


def builds_of(case: Case) -> dict[str, tuple[int, str]]:
    """The ranks, and the precision of stored weights, that a case is built for; by name."""
    own = case.precision or FLOAT32
    builds = {"1": (1, own), "2": (2, own)}
    return builds if own == FLOAT32 else {**builds, "1_float32": (1, FLOAT32)}


class Running(NamedTuple):
    """How a variant runs a model, in how many processes, of how many threads each; and what hidet_dist built for it."""

    how: str
    ranks: int
    threads: int
    build: str = ""


def variants_of(case: Case, threads: int) -> dict[str, Running]:
    """The variants of a case, by name."""
    half = max(1, threads // 2)
    found = {
        REFERENCE: Running("eager", 1, threads),
        "torch_compile": Running("compile", 1, threads),
        "torch_parallel": Running("parallel", 2, half),
        "hidet_1": Running("hidet", 1, threads, "1"),
        "hidet_1_one_thread": Running("hidet", 1, 1, "1"),
        "hidet_2": Running("hidet", 2, half, "2"),
    }
    if half > 1:
        found["hidet_2_one_thread"] = Running("hidet", 2, 1, "2")
    if case.parallel is None:
        del found["torch_parallel"]
    if case.precision is not None:
        found["hidet_1_float32"] = Running("hidet", 1, threads, "1_float32")
    for runtime in ("onnxruntime", "openvino"):
        if importlib.util.find_spec(runtime) is not None:
            how = runtime if case.precision is None else f"{runtime}_{case.precision}"
            found[runtime] = Running(how, 1, threads)
            if threads > 1:
                found[f"{runtime}_one_thread"] = Running(how, 1, 1)
    return found


def last_line(text: str) -> str:
    """Of what a process said: its exception, as a rule."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


class Benchmark:
    """One run: what was measured, and what failed."""

    def __init__(self, work: Path, seconds: float, progress: Progress):
        self.work, self.seconds, self.progress = work, seconds, progress
        self.threads = os.cpu_count() or 1
        self.cases: dict[str, dict[str, Any]] = {}
        self.machines: dict[int, Path] = {}
        self.calibrated: dict[str, Any] = {}
        self.all_reduce: dict[str, Any] | None = None
        self.failures: list[str] = []
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[ProgressBar]:
        """A part of the run, which is shown and timed."""
        begin = time.perf_counter()
        with self.progress.task(name) as task:
            if total is not None:
                task.total(total)
            yield task
        self.phases[name] = round(time.perf_counter() - begin, 1)

    def failed(self, what: str, error: object) -> None:
        """Note a failure, and go on."""
        self.failures.append(f"{what}: {error}")

    def calibrate(self, known: Path | None) -> None:
        """Measure this machine as one rank of all threads, and as two that share them; or take what is known of it."""
        with self.phase("Calibrating", 2) as task:
            for ranks in (1, 2):
                file = (known or self.work) / f"machine-{ranks}.json"
                try:
                    if known is None:
                        calibrate([ranks], file, dtypes=["float32"])
                    self.calibrated[str(ranks)] = json.loads(file.read_text(encoding="utf-8"))
                    self.machines[ranks] = file.resolve()
                except (HidetDistError, OSError) as error:
                    self.failed(f"calibration of {ranks} ranks", error)
                task.advance()

    def build(self, name: str) -> dict[str, dict[str, Any]]:
        """Plan and compile a case for one rank and for two, and what else its variants run."""
        case, built = CASES[name], {}
        weights = case.weights(self.work)
        for build, (ranks, precision) in builds_of(case).items():
            machine = str(self.machines.get(ranks, "cpu"))
            others = [
                f"{variant}={self.machines[own]}"
                for variant, (planned, own) in PREDICTED.items()
                if build == planned and own in self.machines
            ]
            out = self.work / f"{name}-{build}"
            given = [name, str(ranks), precision, str(weights), machine, str(out)]
            command = [sys.executable, "-m", "benchmarks.serving.build", *given]
            try:
                done = subprocess.run(
                    [*command, *others], capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
                )
            except subprocess.TimeoutExpired:
                self.failed(f"{name}, building for {ranks} ranks in {precision}", f"not done after {BUILD_SECONDS:g} s")
                continue
            if done.returncode:
                self.failed(f"{name}, building for {ranks} ranks in {precision}", last_line(done.stderr))
            else:
                built[build] = json.loads(done.stdout.splitlines()[-1])
        return built

    def start(self, name: str, built: dict[str, Any], task: ProgressBar) -> list[Variant]:
        """The variants of a case that could be loaded."""
        case, started = CASES[name], []
        inputs = self.work / f"{name}.npz"
        np.savez(inputs, *case.inputs())
        settings = {"inputs": str(inputs), "model": case.model, "weights": str(case.weights(self.work))}
        loading = [
            Variant(
                variant,
                {**settings, "how": own.how, "artifacts": str(self.work / f"{name}-{own.build}")},
                own.ranks,
                own.threads,
                self.work,
            )
            for variant, own in variants_of(case, self.threads).items()
            if not own.build or own.build in built
        ]
        for own in loading:
            task.say(f"{name}: loading {own.name}")
            try:
                own.ready()
                started.append(own)
            except VariantError as error:
                own.close()
                self.failed(f"{name}, loading", error)
        return started

    def check(self, name: str, started: list[Variant]) -> dict[str, float]:
        """The largest error of each variant's answers, of all ranks; those that are off are closed and left out."""
        errors, expected, tolerance = {}, None, CASES[name].tolerance
        for variant in list(started):
            try:
                answers = [np.load(file) for file in variant.answer(self.work)]
                if expected is None:
                    expected = answers[0]
                if any(answer.shape != expected.shape for answer in answers):
                    raise VariantError(f"{variant.name} gave {[answer.shape for answer in answers]}")
                worst = float(np.max([np.abs(answer - expected).max() for answer in answers]))
                errors[variant.name] = worst
                if not worst <= tolerance * float(np.abs(expected).max()):
                    raise VariantError(f"{variant.name} is off by {worst:.2e} of {np.abs(expected).max():.2e}")
            except VariantError as error:
                self.failed(f"{name}, answers", error)
                started.remove(variant)
                variant.close()
        return errors

    def measure(self, name: str) -> None:
        """Build, load, compare and time a case."""
        with self.phase(f"{name}: building"):
            built = self.build(name)
        with self.phase(f"{name}: loading") as task:
            started = self.start(name, built, task)
        try:
            with self.phase(f"{name}: comparing"):
                errors = self.check(name, started)
            with self.phase(f"{name}: timing"):

                def failed(variant: Variant, error: VariantError) -> None:
                    self.failed(f"{name}, timing {variant.name}", error)

                times = measure_in_turns(started, self.seconds, failed)
            profiles = {}
            with self.phase(f"{name}: profiling"):
                for variant in started:
                    if variant.name in PROFILED and variant.name in times:
                        try:
                            profiles[variant.name] = variant.profile(PROFILED_CALLS)
                        except VariantError as error:
                            failed(variant, error)
        finally:
            for variant in started:
                variant.close()
            for build in builds_of(CASES[name]):
                shutil.rmtree(self.work / f"{name}-{build}", ignore_errors=True)
        self.cases[name] = {
            "title": CASES[name].title,
            "torch_parallel_is": CASES[name].parallel,
            "max_abs_error": errors,
            "median_seconds": medians(times),
            "calls": {variant: len(own) for variant, own in times.items()},
            "built": built,
            "predicted_seconds": {
                variant: seconds for own in built.values() for variant, seconds in own["predicted_seconds"].items()
            },
            "launch_overhead": {variant: own["overhead"] for variant, own in profiles.items()},
            "profile": profiles,
        }

    def measure_all_reduce(self) -> None:
        """All-reduce through shared memory and through Gloo."""
        with self.phase("All-reduce"):
            command = [sys.executable, str(HERE.parent / "collectives.py"), "2"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.failed("all-reduce", last_line(done.stderr))
        else:
            self.all_reduce = json.loads(done.stdout.splitlines()[-1])["all_reduce"]


def report(console: Console, run: Benchmark, kernels: bool) -> dict[str, Any]:
    """Show what was measured; returns the ratios by model."""
    reduced = run.all_reduce[str(ALL_REDUCE_BYTES)]["ratio"] if run.all_reduce else None
    goals = {name: goals_of(own, CASES[name].most_of_eager) for name, own in run.cases.items()}
    whole = overall(run.cases, reduced)
    if run.cases:
        console.print(answers_table(run.cases))
        console.print(times_table(run.cases))
        for own in run.cases.values():
            console.print(f"torch_parallel of {own['title']}: {own['torch_parallel_is'] or 'no plan of DTensor fits'}")
        if any(prediction_errors(own) for own in run.cases.values()):
            console.print(prediction_table(run.cases))
    for own in run.cases.values() if kernels else ():
        for variant, profile in own["profile"].items():
            parts = own["built"][PREDICTED[variant][0]]["predicted_parts"].get(variant, {})
            console.print(kernels_table(f"{own['title']}, {variant}", parts, profile))
    if run.all_reduce:
        console.print(all_reduce_table(run.all_reduce))
    console.print(goals_table({**{run.cases[name]["title"]: own for name, own in goals.items()}, "all": whole}))
    for failure in run.failures:
        console.print(f"[bold red]failed[/]: {escape(failure)}")
    ratios = {
        name: {
            **{ratio: rounded(goal.value) for ratio, goal in own.items()},
            "prediction_errors": {
                variant: rounded(error) for variant, error in prediction_errors(run.cases[name]).items()
            },
        }
        for name, own in goals.items()
    }
    not_met = [f"{name}.{ratio}" for name, own in goals.items() for ratio, goal in own.items() if not goal.met]
    not_met += [ratio for ratio, goal in whole.items() if not goal.met]
    return {
        "ratios": ratios,
        **{ratio: rounded(goal.value) for ratio, goal in whole.items()},
        "not_met": not_met,
        "failed": [failure.splitlines()[0] for failure in run.failures],
    }


def main(
    models: Annotated[str, typer.Option(help=f"Some of {','.join(CASES)}.")] = ",".join(CASES),
    quick: Annotated[bool, typer.Option(help="Few calls: to see that all works.")] = False,
    kernels: Annotated[bool, typer.Option(help="Also predicted and measured times of single kernels.")] = False,
    machines: Annotated[
        Path | None, typer.Option(help="A folder with machine-1.json and machine-2.json, to measure none anew.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Where weights and artifacts lie meanwhile.")] = Path("out/serving"),
    out: Annotated[
        Path | None, typer.Option(help="The folder for the results; benchmarks/results for a whole run's.")
    ] = None,
) -> None:
    """Measure hidet_dist beside PyTorch on this machine."""
    names = models.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"no {unknown[0]!r}; there are {', '.join(CASES)}", param_hint="--models")
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    machine = describe()
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with Progress() as progress, tempfile.TemporaryDirectory(dir=work) as folder:
        run = Benchmark(Path(folder), QUICK_SECONDS if quick else TIMING_SECONDS, progress)
        run.calibrate(machines)
        for name in names:
            try:
                run.measure(name)
            except Exception as error:  # whatever it is, the other models are to be measured
                run.failed(name, f"{type(error).__name__}: {error}")
        run.measure_all_reduce()
    ratios = report(console, run, kernels)
    total = round(time.perf_counter() - begin, 1)
    console.print(f"took {total / 60:.1f} minutes: {', '.join(f'{name} {s:g} s' for name, s in run.phases.items())}")
    result = {
        "machine": machine,
        "calibrated": run.calibrated,
        "seconds": {"total": total, **run.phases},
        "cases": run.cases,
        "all_reduce": run.all_reduce,
        **ratios,
    }
    if out is None and not quick and names == list(CASES):
        out = HERE.parent / "results"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / f"serving-{run.threads}-cores.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(ratios))
    if run.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
