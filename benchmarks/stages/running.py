"""Pipelines that run on this host, beside one rank; the last line is JSON.

    python benchmarks/stages/running.py [--rounds N] [--seconds S] [--machine M] [case ...]

This machine is calibrated first, unless another one is named. Each model is built for one rank of one thread, for two
stages of one rank each, and for two stages of two ranks each. One rank and the two stages stream batches in turn,
several rounds of each; of a figure the median counts. ``speedup`` is the two stages' throughput over one rank's, with
the pipeline full; ``predicted_over_measured`` is the predicted time from one batch to the next over the measured one;
``max_abs_err`` is the greatest difference between the outputs of a pipeline and those of one rank. Four ranks share two
cores here, so that they are checked and not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from cases import CASES
from host import describe

from hidet_dist.calibration import calibrate

HERE = Path(__file__).parent
RUNS = ("minilm_8", "gpt2_1", "gpt2_8")
SHAPES = {"one rank": "1", "two stages": "1,1", "two stages of two": "2,2"}
TIMEOUT_SECONDS = 1800
WARM_UP = 4  # batches that do not count


class Case:
    """One model: its builds, and the rounds of each."""

    def __init__(self, name: str, folder: Path, machine: str):
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        weights = CASES[name].weights(folder)
        self.built = {
            title: _last_json([HERE / "build.py", name, sizes, weights, machine, self._artifacts(title), self._inputs])
            for title, sizes in SHAPES.items()
        }
        self.rounds: dict[str, list[list[dict[str, float]]]] = {title: [] for title in SHAPES}

    @property
    def _inputs(self) -> Path:
        return self.folder / "inputs.npz"

    def _artifacts(self, title: str) -> Path:
        return self.folder / title.replace(" ", "_")

    def run(self, title: str, batches: int) -> None:
        """One round: the figures of each rank."""
        ranks = sum(int(size) for size in SHAPES[title].split(","))
        out = self.folder / f"{title.replace(' ', '_')}.out"
        arguments = [HERE / "serve.py", self._artifacts(title), self._inputs, out, WARM_UP, batches]
        launcher = ["-m", "hidet_dist.launch", "-n", str(ranks)] if ranks > 1 else []
        _checked([*launcher, *arguments])
        self.rounds[title].append([json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)])

    def seconds(self, title: str) -> float:
        """From one batch to the next, where results come out."""
        return statistics.median(ranks[-1]["seconds_per_batch"] for ranks in self.rounds[title])

    def outputs(self, title: str) -> list[np.ndarray]:
        """What the last rank gave."""
        last = sum(int(size) for size in SHAPES[title].split(",")) - 1
        with np.load(f"{self.folder / title.replace(' ', '_')}.out.{last}.npz") as arrays:
            return [arrays[name] for name in arrays.files]

    def figures(self) -> dict[str, Any]:
        """The last line's entry of the model."""

        def error(title: str) -> float:
            pairs = zip(self.outputs(title), self.outputs("one rank"), strict=True)
            return max(float(np.abs(a - b).max()) for a, b in pairs)

        one, two = self.seconds("one rank"), self.seconds("two stages")
        busy = [
            statistics.median(ranks[rank]["busy_share"] for ranks in self.rounds["two stages"]) for rank in range(2)
        ]
        return {
            "speedup": one / two,
            "predicted_over_measured": self.built["two stages"]["interval_seconds"] / two,
            "max_abs_err": max(error("two stages"), error("two stages of two")),
            "seconds_one_rank": one,
            "seconds_two_stages": two,
            "predicted_stage_seconds": self.built["two stages"]["stage_seconds"],
            "boundary_bytes": self.built["two stages"]["boundary_bytes"],
            "busy_share_in_a_call": busy,
        }


def _checked(arguments: list[Any]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _last_json(arguments: list[Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_checked(arguments).splitlines()[-1])
    return result


def show(
    console: Console, names: list[str], rounds: int = 3, seconds: float = 15.0, machine: str | None = None
) -> dict[str, Any]:
    """Measure the cases and print a table; the figures by case."""
    results: dict[str, Any] = {"host": describe()}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as place:
        folder = Path(place)
        if machine is None:
            machine = str(folder / "machine.json")
            calibrate([2], machine, dtypes=["float32"])
        for name in names:
            case = Case(name, folder, machine)
            console.print(f"{CASES[name].title}: built", highlight=False)
            case.run("one rank", 4)
            batches = max(8, int(seconds / case.seconds("one rank")))
            case.rounds["one rank"].clear()
            for _ in range(rounds):
                case.run("one rank", batches)
                case.run("two stages", batches)
            case.run("two stages of two", 4)
            results[name] = case.figures()
    table = Table("model", "one rank [ms]", "two stages [ms]", "speedup", "predicted / measured", "max abs err")
    for name in names:
        own = results[name]
        table.add_row(
            CASES[name].title,
            f"{1e3 * own['seconds_one_rank']:.1f}",
            f"{1e3 * own['seconds_two_stages']:.1f}",
            f"{own['speedup']:.2f}",
            f"{own['predicted_over_measured']:.2f}",
            f"{own['max_abs_err']:.1e}",
        )
    console.print(table)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long a round of one rank takes, about")
    parser.add_argument("--machine", help="a built-in machine or a machine file, in place of a calibration")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        sys.exit(f"No case {unknown[0]!r}; there are {', '.join(CASES)}.")
    console = Console(width=160)
    print(json.dumps(show(console, options.cases, options.rounds, options.seconds, options.machine)))
