"""All checks that need a GPU, each in processes of its own and with a time-out, those that say most first.

Programs are built several at a time, on all cores, and served one at a time, each as soon as it is built. It prints
each result at once and a summary at the end, and goes on after a failure, a crash or a hang. Exits with 0 when all went
well, 1 when a check failed, 2 when there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime.cuda import driver
from hidet_dist.testing.processes import Programs, exit_on_sigterm

BUILD, RANK = (Path(__file__).with_name(name) for name in ("build.py", "rank.py"))
MODELS = ("minilm", "gpt2", "llama", "resnet18")
PRECISIONS = ("float32", "float16")
DECODERS = ("float32", "float16", "int8", "int4", "experts")  # of a language model over pools of rows
NO_GPU = 2
# A launcher ends its ranks itself, also those of which one has failed; it is given time to.
LAUNCH_SECONDS, GRACE_SECONDS, SERVE_SECONDS = 45.0, 5.0, 65.0
BUILD_SECONDS = 240.0
BUILD_NICENESS = 5  # of what is built while something else is served
AFTER_SECONDS = 30.0  # that what was begun in time may go on for
_TAIL_LINES = 15  # of what a failed check printed


@dataclass(frozen=True)
class Step:
    """One command, which is to end with 0 in time."""

    name: str
    command: tuple[str, ...]
    seconds: float


def steps(folder: Path, arch: str, ranks: tuple[int, ...], patience: float) -> Iterator[Step]:
    """The checks, those first that others rest on: one rank, two, as a CUDA graph, stages, more ranks, candidates.

    Each has ``patience`` times the seconds that it should need.
    """
    python, serve_seconds = sys.executable, patience * SERVE_SECONDS

    def launched(count: int, *arguments: str) -> tuple[str, ...]:
        limits = ("--timeout", f"{patience * LAUNCH_SECONDS:g}", "--grace", f"{GRACE_SECONDS:g}")
        return (python, "-m", "hidet_dist.launch", "-n", str(count), *limits, str(RANK), *arguments)

    for count in ranks:
        if count > 1:
            yield Step(f"collectives, {count} ranks", launched(count, "collectives"), serve_seconds)
    for number, precision in enumerate(DECODERS):
        variant = ("plain", "graph")[number % 2]
        name = f"decoder, {precision}, 1 ranks, {variant}"
        out = folder / f"decoder-{precision}"
        what = ("decoder", precision, "1", variant, arch, str(out))
        yield Step(f"build {name}", (python, str(BUILD), *what), patience * BUILD_SECONDS)
        yield Step(f"serve {name}", launched(1, "decoder", str(out)), serve_seconds)
    plain = [(count, "plain") for count in ranks]
    stages = [(count, "stages") for count in ranks if count > 1]
    for count, variant in [*plain[:2], (ranks[-1], "graph"), *stages, *plain[2:], (1, "candidates")]:
        for precision, model in itertools.product(PRECISIONS, MODELS):
            name = f"{model}, {precision}, {count} ranks, {variant}"
            out = folder / f"{model}-{precision}-{count}-{variant}"
            what = (model, precision, str(count), variant, arch, str(out))
            yield Step(f"build {name}", (python, str(BUILD), *what), patience * BUILD_SECONDS)
            yield Step(f"serve {name}", launched(count, "serve", str(out)), serve_seconds)


class Checks:
    """A run of steps: which were good, which were bad, and which are left.

    Parameters
    ----------
    seconds: float
        After so long no step is begun.
    log: Path | None
        A file that all that failed steps print is appended to.
    """

    def __init__(self, seconds: float, log: Path | None = None):
        self.good: list[str] = []
        self.bad: list[str] = []
        self.left: list[str] = []
        self._programs = Programs()
        self._begin = time.perf_counter()
        self._last = seconds
        self._log = log

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._begin

    def run(self, every: list[Step]) -> None:
        """Build in the background, and run what needs the device one after the other."""
        builds = {step.name: step for step in every if step.name.startswith("build ")}
        others = [step for step in every if step.name not in builds]
        # Each build is a process that plans, then compiles on all cores.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
            try:
                building = {name: pool.submit(self._one, step, BUILD_NICENESS) for name, step in builds.items()}
                while others:
                    step = self._next(others, building)
                    others.remove(step)
                    builder = building.get(_builder(step))
                    if builder is None or builder.result():
                        self._one(step)
                    else:
                        self.left.append(step.name)
            finally:  # before the pool waits for what it runs
                self._programs.end()

    def _next(self, others: list[Step], building: dict[str, Future[bool]]) -> Step:
        """The first step that can be run; waits for one."""
        while True:
            for step in others:
                if _builder(step) not in building or building[_builder(step)].done():
                    return step
            wait([building[_builder(step)] for step in others], return_when=FIRST_COMPLETED)

    def _one(self, step: Step, niceness: int = 0) -> bool:
        """Run a step, and say how it went."""
        if self.elapsed() > self._last:
            self.left.append(step.name)
            return False
        done = self._programs.run(
            step.command, min(step.seconds, self._last + AFTER_SECONDS - self.elapsed()), niceness
        )
        good = done.status == 0
        (self.good if good else self.bad).append(step.name)
        lines = f"{done.output}\n{done.errors}".strip().splitlines()
        if good:
            lines = done.output.strip().splitlines()[-1:]
        elif done.status is None:
            lines.append(f"not over after {done.seconds:.0f} s")
        else:
            lines.append(f"exit status {done.status}")
        if not good and self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                print(f"=== {step.name}", *lines, sep="\n", file=log)
        said = [f"{'ok  ' if good else 'FAIL'} {step.name} ({done.seconds:.1f} s)"]
        print("\n".join([*said, *(f"     {line}" for line in lines[-_TAIL_LINES:])]), flush=True)
        return good


def _builder(step: Step) -> str:
    """The name of the step that builds what a step serves."""
    return step.name.replace("serve ", "build ", 1)


def main() -> int:
    """Run the steps, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", default="", help="run the steps whose names have this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no step after so long")
    parser.add_argument("--patience", type=float, default=1.0, help="times the seconds that each step has")
    parser.add_argument("--log", type=Path, help="append all that failed steps print to this file")
    parser.add_argument("--list", action="store_true", help="print the steps, for sm_90, and run none")
    options = parser.parse_args()
    ranks = tuple(sorted(options.ranks))
    if options.list:
        for step in steps(Path("out"), "sm_90", ranks, options.patience):
            print(step.name)
        return 0
    try:
        driver.device_of_rank(0)
        system = driver.load()
        names = [system.device_name(device) for device in range(system.device_count())]
        major, minor = system.capability(0)
    except HidetDistError as error:
        print(f"no GPU, nothing was checked: {error}")
        return NO_GPU
    arch = f"sm_{major}{minor}"
    exit_on_sigterm()
    print(f"{len(names)} GPU(s): {', '.join(names)}; {arch}; {os.cpu_count()} CPUs", flush=True)
    checks = Checks(options.seconds, options.log)
    with tempfile.TemporaryDirectory(prefix="hidet_dist-gpu-") as folder:
        checks.run([step for step in steps(Path(folder), arch, ranks, options.patience) if options.only in step.name])
    good, bad, left = checks.good, checks.bad, checks.left
    print(f"{len(good)} ok, {len(bad)} failed, {len(left)} not run, {checks.elapsed():.0f} s")
    for heading, names in (("failed", bad), ("not run", left)):
        for name in names:
            print(f"{heading}: {name}")
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
