"""All checks that need a GPU, one after the other, each in processes of its own and with a time-out.

It prints each result at once and a summary at the end, and goes on after a failure. Exits with 0 when all went well, 1
when a check failed, 2 when there is no GPU to check on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime.cuda import driver

BUILD, RANK = (Path(__file__).with_name(name) for name in ("build.py", "rank.py"))
MODELS = ("minilm", "gpt2", "llama", "resnet18")
PRECISIONS = ("float32", "float16")
NO_GPU = 2
_TAIL_LINES = 15  # of what a failed check printed


@dataclass(frozen=True)
class Step:
    """One command, which is to end with 0 in time."""

    name: str
    command: tuple[str, ...]
    seconds: float


def steps(folder: Path, arch: str, ranks: tuple[int, ...]) -> Iterator[Step]:
    """The checks, the cheap ones first."""
    python = sys.executable

    def launched(count: int, *arguments: str) -> tuple[str, ...]:
        return (python, "-m", "hidet_dist.launch", "-n", str(count), str(RANK), *arguments)

    for count in ranks:
        if count > 1:
            yield Step(f"collectives, {count} ranks", launched(count, "collectives"), 180)
    for model, precision in itertools.product(MODELS, PRECISIONS):
        for count, variant in [*((count, "plain") for count in ranks), (ranks[-1], "graph"), (1, "candidates")]:
            name = f"{model}, {precision}, {count} ranks, {variant}"
            out = folder / f"{model}-{precision}-{count}-{variant}"
            what = (model, precision, str(count), variant, arch, str(out))
            yield Step(f"build {name}", (python, str(BUILD), *what), 600)
            yield Step(f"serve {name}", launched(count, "serve", str(out)), 180)


def run(step: Step) -> bool:
    """Run a step, and say how it went."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            step.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=step.seconds, check=False
        )
        output, good = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        output, good = f"{output}\nnot over after {step.seconds:g} s", False
    seconds = time.perf_counter() - begin
    print(f"{'ok  ' if good else 'FAIL'} {step.name} ({seconds:.1f} s)", flush=True)
    lines = output.strip().splitlines()
    for line in lines[-1:] if good else lines[-_TAIL_LINES:]:
        print(f"     {line}", flush=True)
    return good


def main() -> int:
    """Run the steps, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", default="", help="run the steps whose names have this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no step after so long")
    parser.add_argument("--list", action="store_true", help="print the steps, for sm_90, and run none")
    options = parser.parse_args()
    ranks = tuple(sorted(options.ranks))
    if options.list:
        for step in steps(Path("out"), "sm_90", ranks):
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
    print(f"{len(names)} GPU(s): {', '.join(names)}; {arch}; {os.cpu_count()} CPUs", flush=True)
    begin = time.perf_counter()
    good: list[str] = []
    bad: list[str] = []
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hidet_dist-gpu-") as folder:
        for step in steps(Path(folder), arch, ranks):
            builds = step.name.replace("serve ", "build ", 1)
            if options.only not in step.name.split(" ", 1)[-1] and options.only not in step.name:
                continue
            if time.perf_counter() - begin > options.seconds or builds in bad or builds in left:
                left.append(step.name)
                continue
            (good if run(step) else bad).append(step.name)
    print(f"{len(good)} ok, {len(bad)} failed, {len(left)} not run, {time.perf_counter() - begin:.0f} s")
    for heading, names in (("failed", bad), ("not run", left)):
        for name in names:
            print(f"{heading}: {name}")
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
