from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from hidet_dist.soundness.work import CheckResult
from hidet_dist.soundness.workers import results


def right(what: str | int, count: int, seed: int) -> CheckResult:
    return CheckResult(f"{what} is right", Counter(plans=count + seed))


def killed(what: str | int, count: int, seed: int) -> CheckResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def raising(what: str | int, count: int, seed: int) -> CheckResult:
    raise ValueError("a bad graph")


def whereabouts(what: str | int, count: int, seed: int) -> CheckResult:
    return CheckResult(str(os.getpid()))


@pytest.mark.slow
def test_a_run_goes_on_behind_a_unit_whose_process_ends() -> None:
    work = [(right, "first", 1), (killed, "second", 1), (raising, 3, 1), (right, "last", 1)]
    first, second, third, last = results(work, seed=5, jobs=2)
    assert (first.line, first.counts["plans"], first.failures) == ("first is right", 6, [])
    assert second.failures == ["killed('second'): the process ended by SIGKILL"]
    (failure,) = third.failures
    assert failure.startswith("raising(3): the check failed.") and "ValueError: a bad graph" in failure
    assert last.line == "last is right"


def test_one_job_is_this_process() -> None:
    here, third = results([(whereabouts, 1, 1), (raising, 3, 1)], seed=5, jobs=1)
    assert here.line == str(os.getpid())
    (failure,) = third.failures
    assert failure.startswith("raising(3): the check failed.") and "ValueError: a bad graph" in failure
