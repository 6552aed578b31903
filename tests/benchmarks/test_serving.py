"""The serving benchmark's tables of measurements. The models are measured by `make bench`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving.goals import goals_of, overall, prediction_errors
from benchmarks.serving.variants import LEAST_ROUNDS, VariantError, measure_in_turns, medians


class Timed:
    """A variant whose calls take as long as is said, until it fails."""

    def __init__(self, name: str, seconds: float, order: list[str], bursts: int = 10**6):
        self.name, self.seconds, self.order, self.bursts = name, seconds, order, bursts

    def burst(self, calls: int, warm_up: int) -> list[float]:
        self.bursts -= 1
        if self.bursts < 0:
            raise VariantError(f"{self.name} has ended")
        self.order.append(self.name)
        return [self.seconds] * calls


def test_variants_take_turns_and_one_that_fails_is_left_out() -> None:
    order: list[str] = []
    failures: list[str] = []
    variants: Any = [Timed("a", 0.2, order), Timed("b", 0.4, order), Timed("c", 0.1, order, bursts=3)]
    times = measure_in_turns(variants, 0.0, lambda variant, _: failures.append(variant.name))
    assert failures == ["c"]
    assert order[:9] == ["a", "b", "c", "a", "b", "c", "b", "c", "a"]
    assert sorted(order[9:]) == sorted(["a", "b"] * (LEAST_ROUNDS - 2))
    assert medians(times) == {"a": 0.2, "b": 0.4, "c": 0.1}
    assert len(times["a"]) == 2 * LEAST_ROUNDS


def test_goals_are_ratios_of_medians() -> None:
    seconds = {"torch_eager": 1.0, "torch_parallel": 1.5, "hidet_1": 1.1, "hidet_1_one_thread": 2.0, "hidet_2": 1.0}
    case = {
        "median_seconds": seconds,
        "predicted_seconds": {"hidet_1": 1.21, "hidet_2": 0.7, "hidet_3": 9.0},
        "launch_overhead": {"hidet_1": 0.06},
    }
    found = {name: (goal.value, goal.met) for name, goal in goals_of(case, 1.2).items()}
    assert found == {
        "time_of_eager": (pytest.approx(1.1), True),
        "speedup_of_2_ranks": (2.0, True),
        "over_torch_parallel": (1.5, True),
        "launch_overhead_hidet_1": (0.06, False),
    }
    assert prediction_errors(case) == {"hidet_1": pytest.approx(0.1), "hidet_2": pytest.approx(-0.3)}
    whole = overall({"case": case}, 9.0)
    assert whole["median_prediction_error"].value == pytest.approx(0.2)
    assert not whole["all_reduce_over_gloo"].met
    # What could not be measured is no goal that was met.
    del seconds["torch_parallel"]
    assert "over_torch_parallel" not in goals_of(case, 1.2)
