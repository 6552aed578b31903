"""Pipelines that run on this host, beside one rank; the last line is JSON.

    python -m benchmarks.stages.running [--rounds N] [--seconds S] [--machine M] [case ...]

This machine is calibrated first, unless another one is named. Each model is built for one rank of one thread, for two
stages of one rank each, and for two stages of two ranks each. One rank and the two stages stream batches in turn,
several rounds of each; of a figure the median counts. ``speedup`` is the two stages' throughput over one rank's, with
the pipeline full; ``predicted_over_measured`` is the predicted time from one batch to the next over the measured one;
``max_abs_err`` is the greatest difference between the outputs of a pipeline and those of one rank. Four ranks share two
cores here, so that they are checked and not timed.

One model also runs with the second rank slowed to half its speed: in two stages, with the even cut and with the cut
that is searched for such ranks; and in one stage of two ranks, with equal parts and with shares that are searched.
``slowed`` and ``shares`` have the gains of what is searched, predicted and measured.
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

from benchmarks.serving.cases import CASES
from benchmarks.serving.host import describe
from hidet_dist.calibration import calibrate

HERE = Path(__file__).parent
RUNS = ("minilm_8", "gpt2_1", "gpt2_8")
SHAPES = {"one rank": ["1"], "two stages": ["1,1"], "two stages of two": ["2,2"]}
SLOWED_RUN, SLOWED_FRACTION, SLOWED_PERIOD_SECONDS = "minilm_8", 0.5, 0.004
_QUOTA = [str(SLOWED_FRACTION), str(SLOWED_PERIOD_SECONDS)]
SLOWED_SHAPES = {"slowed, even": ["1,1", "even", *_QUOTA], "slowed, searched": ["1,1", "searched", *_QUOTA]}
SHARES_SHAPES = {"slowed, equal parts": ["2", "even", *_QUOTA], "slowed, shares": ["2", "shares", *_QUOTA]}
ALL_SLOWED = SLOWED_SHAPES | SHARES_SHAPES
TIMEOUT_SECONDS = 1800
WARM_UP = 2  # batches that do not count


class Case:
    """One model: its builds, and the rounds of each."""

    def __init__(self, name: str, folder: Path, machine: str):
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        self.shapes = SHAPES | (ALL_SLOWED if name == SLOWED_RUN else {})
        weights = CASES[name].weights(folder)
        self.built: dict[str, dict[str, Any]] = {}
        for title, (sizes, *cuts) in self.shapes.items():
            files = [weights, machine, self._artifacts(title), self._inputs]
            self.built[title] = _last_json(["-m", "benchmarks.stages.build", name, sizes, *files, *cuts])
        self.rounds: dict[str, list[list[dict[str, float]]]] = {title: [] for title in self.shapes}

    @property
    def _inputs(self) -> Path:
        return self.folder / "inputs.npz"

    def _artifacts(self, title: str) -> Path:
        return self.folder / title.replace(" ", "_")

    def _ranks(self, title: str) -> int:
        return sum(int(size) for size in self.shapes[title][0].split(","))

    def run(self, title: str, batches: int) -> None:
        """Run one round, and keep the figures of each rank."""
        ranks = self._ranks(title)
        out = self.folder / f"{title.replace(' ', '_')}.out"
        arguments = [HERE / "serve.py", self._artifacts(title), self._inputs, out, WARM_UP, batches]
        launcher = ["-m", "hidet_dist.launch", "-n", str(ranks)] if ranks > 1 else []
        slowed = (
            {"SLOWED_RANK": str(ranks - 1), "SLOWED_FRACTION": _QUOTA[0], "SLOWED_PERIOD": _QUOTA[1]}
            if title in ALL_SLOWED
            else {}
        )
        _checked([*launcher, *arguments], **slowed)
        self.rounds[title].append([json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)])

    def seconds(self, title: str) -> float:
        """Return the seconds from one batch to the next, where results come out."""
        return statistics.median(ranks[-1]["seconds_per_batch"] for ranks in self.rounds[title])

    def outputs(self, title: str) -> list[np.ndarray]:
        """Read the last rank's outputs."""
        last = self._ranks(title) - 1
        with np.load(f"{self.folder / title.replace(' ', '_')}.out.{last}.npz") as arrays:
            return [arrays[name] for name in arrays.files]

    def figures(self) -> dict[str, Any]:
        """Make the model's entry of the last line."""

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
            "max_abs_err": max(error(title) for title in self.shapes if title != "one rank"),
            "seconds_one_rank": one,
            "seconds_two_stages": two,
            "predicted_stage_seconds": self.built["two stages"]["stage_seconds"],
            "boundary_bytes": self.built["two stages"]["boundary_bytes"],
            "busy_share_in_a_call": busy,
            **(self._slowed() if self.name == SLOWED_RUN else {}),
        }

    def _slowed(self) -> dict[str, Any]:
        """Compare even and searched plans where the second rank is slowed: in two stages, and in one."""
        return {"slowed": self._gain(SLOWED_SHAPES), "shares": self._gain(SHARES_SHAPES)}

    def _gain(self, shapes: dict[str, list[str]]) -> dict[str, Any]:
        """Compare an even plan with a searched one where the second rank is slowed."""
        even, searched = shapes
        predicted = {title: self.built[title]["interval_seconds"] for title in shapes}
        measured = {title: self.seconds(title) for title in shapes}
        return {
            "share": SLOWED_FRACTION,
            "predicted_gain": predicted[even] / predicted[searched],
            "measured_gain": measured[even] / measured[searched],
            "predicted_seconds": list(predicted.values()),
            "measured_seconds": list(measured.values()),
            "operators": [self.built[title]["stage_operators"] for title in shapes],
            "meshes": [self.built[title]["meshes"] for title in shapes],
        }


def _checked(arguments: list[Any], **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
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
    console: Console, names: list[str], rounds: int = 3, seconds: float = 10.0, machine: str | None = None
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
            batches = max(6, int(seconds / case.seconds("one rank")))
            case.rounds["one rank"].clear()
            for _ in range(rounds):
                case.run("one rank", batches)
                case.run("two stages", batches)
                for title in ALL_SLOWED:
                    if title in case.shapes:
                        case.run(title, max(6, batches // 2))
            case.run("two stages of two", 4)
            results[name] = case.figures()
    for name in names:
        for key, what in (("slowed", "the searched cut"), ("shares", "the plan with shares")):
            if key in results[name]:
                slowed = results[name][key]
                gains = f"{slowed['measured_gain']:.2f} times (predicted: {slowed['predicted_gain']:.2f})"
                title = f"{CASES[name].title}, second rank at {slowed['share']:.0%}"
                console.print(f"{title}: {what} is {gains} as fast as the even one", highlight=False)
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
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a round of one rank takes, about")
    parser.add_argument("--machine", help="a built-in machine or a machine file, in place of a calibration")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        sys.exit(f"No case {unknown[0]!r}; there are {', '.join(CASES)}.")
    console = Console(width=160)
    print(json.dumps(show(console, options.cases, options.rounds, options.seconds, options.machine)))
