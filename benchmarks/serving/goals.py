"""The ratios that a run is judged by, and which of the goals they meet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPEEDUP = 1.7  # two ranks of one thread over one rank of one thread
OVER_FLOAT32 = 1.6  # weights of 8 bits, and activations that are rounded to 8, over float32
OVER_TORCH_PARALLEL = 1.3
OF_RUNTIMES = 0.95  # of the faster of ONNX Runtime and OpenVINO
ALL_REDUCE = 10.0
LAUNCH_OVERHEAD = 0.05
PREDICTION_ERROR = 0.2


@dataclass(frozen=True)
class Goal:
    """A ratio, and the most or the least that it should be."""

    value: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it is; a value that is none meets nothing."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def goals_of(case: Mapping[str, Any], most_of_eager: float) -> dict[str, Goal]:
    """The goals of a case that could be measured, by name."""
    seconds, found = case["median_seconds"], {}

    def ratio(name: str, top: str, bottom: str, bound: float, at_most: bool) -> None:
        if top in seconds and bottom in seconds:
            found[name] = Goal(seconds[top] / seconds[bottom], bound, at_most)

    two = "hidet_2_one_thread" if "hidet_2_one_thread" in seconds else "hidet_2"
    ratio("time_of_eager", "hidet_1", "torch_eager", most_of_eager, True)
    ratio("speedup_of_2_ranks", "hidet_1_one_thread", two, SPEEDUP, False)
    ratio("over_float32", "hidet_1_float32", "hidet_1", OVER_FLOAT32, False)
    ratio("over_torch_parallel", "torch_parallel", "hidet_2", OVER_TORCH_PARALLEL, False)
    for name, own, ending in (("", "hidet_1", ""), ("_one_thread", "hidet_1_one_thread", "_one_thread")):
        runtimes = [variant for variant in (f"onnxruntime{ending}", f"openvino{ending}") if variant in seconds]
        if runtimes:
            ratio(f"time_of_best_runtime{name}", own, min(runtimes, key=seconds.__getitem__), OF_RUNTIMES, True)
    for variant, own in case["launch_overhead"].items():
        found[f"launch_overhead_{variant}"] = Goal(own, LAUNCH_OVERHEAD, True)
    return found


def prediction_errors(case: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over measured seconds, less 1, of each variant that was predicted and measured."""
    measured = case["median_seconds"]
    return {
        variant: seconds / measured[variant] - 1
        for variant, seconds in case["predicted_seconds"].items()
        if variant in measured
    }


def overall(cases: Mapping[str, Mapping[str, Any]], all_reduce: float | None) -> dict[str, Goal]:
    """The goals of the run as a whole that could be measured, by name."""
    found = {}
    if all_reduce is not None:
        found["all_reduce_over_gloo"] = Goal(all_reduce, ALL_REDUCE, False)
    errors = [abs(error) for own in cases.values() for error in prediction_errors(own).values()]
    if errors:
        found["median_prediction_error"] = Goal(statistics.median(errors), PREDICTION_ERROR, True)
    return found


def rounded(value: float) -> float | None:
    """Three digits; None where JSON has no number for it."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
