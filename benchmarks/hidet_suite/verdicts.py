"""A plugin of pytest that runs hidet's tests with the ranks in hidet's place, and says how each went."""

from __future__ import annotations

import random
import re
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hidet.graph import FlowGraph
from hidet.ir.expr import SymbolVar
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.hidet_suite.examples import Example
from benchmarks.hidet_suite.hooks import Compute, Run, Session, hooked
from benchmarks.hidet_suite.stand_ins import small_models
from hidet_dist.errors import CompileError, HidetDistError, PartitionError, SolverError, VerificationError

RIGHT, REFUSED, WRONG, OUTSIDE = "right", "refused", "wrong", "outside"
TOLERANCE = 1e-4  # of the largest value of an output, or of 1, where a test has no reference of its own
SYMBOL_SIZE = 4  # of each symbolic dim of a graph that a test builds and does not run
_DEFECTS = (CompileError, PartitionError, SolverError, VerificationError)  # errors that are no refusals
_RUN_ALL_THE_SAME = ("test requires CUDA GPUs", "need --runslow option to run")
"""Reasons for which hidet's configuration leaves tests out that run here: the device is the CPU, and time is given."""
_TIMED_OUT = "from pytest-timeout"  # in the message of a test that took too long
_MOST_ERRORS = 1.5  # of PyTorch's root mean square error in half precision: the order of roundings may differ
_MOST_REASON = 160  # characters
# Addresses, and paths but for their last part.
_LOCAL = re.compile(r" at 0x[0-9a-f]+|(?<![:/\w])/(?:[\w.+-]+/)+([\w.+-]+)")
_MOST_TRACEBACK = 3000  # characters
_TOO_EXACT = {"test_matmul_fp16_fp32"}
"""Tests whose last check is that a sum in float16 is off, as it is on a GPU. Here no sum is kept in float16."""
_NOT_RAISED = "DID NOT RAISE"  # in the message of such a check
_REFUSED_INPUT = ": InputError: "  # in the message of an error of ranks that refuse an input
_NO_REFERENCE = {"test_empty_like": "it compares memory that is not initialized"}


@dataclass(frozen=True)
class Verdict:
    """How one case of a test went, and why; ``traceback`` is that of the error of a wrong one."""

    test: str
    case: str
    verdict: str
    reason: str
    cpu_seconds: float
    traceback: str = ""


class Suite:
    """The plugin: verdicts of all cases, in the order in which they ran."""

    def __init__(self, compute: Compute, report: Callable[[Verdict], None], most_cases: int | None = None):
        self.compute, self.report, self.most_cases = compute, report, most_cases
        self.verdicts: list[Verdict] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run what hidet's own configuration leaves out, and take some of the cases."""
        for item in items:
            item.own_markers = [
                mark
                for mark in item.own_markers
                if not (mark.name == "skip" and mark.kwargs.get("reason") in _RUN_ALL_THE_SAME)
            ]
        if self.most_cases is not None:
            items[:] = _spread(items, self.most_cases)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run a test with the hooks, and judge it."""
        name = item.nodeid.partition("[")[0].rpartition("::")[2]
        if name in _NO_REFERENCE:
            self.note(item.nodeid, OUTSIDE, _NO_REFERENCE[name], 0.0)
            pytest.skip(_NO_REFERENCE[name])
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        session, begin = Session(self.compute), time.process_time()
        error: BaseException | None = None
        try:
            with hooked(session), small_models():
                result = yield
        except BaseException as caught:
            error = caught
            if isinstance(caught, KeyboardInterrupt):
                raise
            result = None
        if name in _TOO_EXACT and _NOT_RAISED in str(error):
            error = None
        verdict, reason = judged(session, error, has_reference=not isinstance(item, Example))
        cause = (session.errors[0] if session.errors else error) if verdict == WRONG else None
        trace = "".join(traceback.format_exception(cause))[-_MOST_TRACEBACK:] if cause is not None else ""
        self.note(item.nodeid, verdict, reason, time.process_time() - begin, trace)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report verdicts, where output is not captured, and note what was skipped or could not be set up."""
        if report.when == "setup" and report.outcome != "passed":
            self.note(report.nodeid, OUTSIDE, _skip_reason(report), 0.0)
        elif report.when != "call":
            return
        elif not self.verdicts or self.verdicts[-1].test + self.verdicts[-1].case != report.nodeid.removeprefix(
            "tests/"
        ):
            self.note(report.nodeid, WRONG, "it took too long to judge", report.duration)
        self.report(self.verdicts[-1])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note files that cannot be imported, such as for a package that is not there."""
        if report.outcome == "failed":
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.note(report.nodeid, OUTSIDE, lines[-1][1:].strip() if lines else "it cannot be imported", 0.0)
            self.report(self.verdicts[-1])

    def note(self, nodeid: str, verdict: str, reason: str, seconds: float, trace: str = "") -> None:
        """Keep a verdict."""
        test, bracket, case = nodeid.removeprefix("tests/").partition("[")
        text = _LOCAL.sub(r"\1", " ".join(reason.split()))[:_MOST_REASON]
        self.verdicts.append(Verdict(test, bracket + case, verdict, text, seconds, trace))


def _spread(items: Sequence[pytest.Item], most: int) -> list[pytest.Item]:
    """At most so many cases of each test, at equal distances, the first and the last among them."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = []
    for own in tests.values():
        count = min(most, len(own))
        places = {round(n * (len(own) - 1) / max(1, count - 1)) for n in range(count)}
        chosen += [item for place, item in enumerate(own) if place in places]
    return chosen


def _skip_reason(report: pytest.TestReport) -> str:
    found = report.longrepr
    if isinstance(found, tuple):
        return str(found[2]).removeprefix("Skipped: ")
    lines = [line for line in str(found).splitlines() if line.startswith("E ")]
    return lines[-1][1:].strip() if lines else "it cannot be set up"


def judged(session: Session, error: BaseException | None, has_reference: bool) -> tuple[str, str]:
    """Whether what a test computed is right, refused or wrong, or the test is none of this project's, and why.

    Without a reference of the test's own, the first and the last result of each graph are compared with hidet's.
    """
    if session.errors:
        return _of_error(session)
    if isinstance(error, pytest.fail.Exception) and _TIMED_OUT in str(error):
        return WRONG, f"{error}"
    if isinstance(error, pytest.skip.Exception):
        return OUTSIDE, f"skipped: {error}"
    if session.runs:
        if error is None and has_reference:
            return RIGHT, f"{len(session.runs)} graphs"
        if error is None:
            same = _as_whole(_first_and_last(session.runs))
            return (RIGHT, f"{len(session.runs)} runs") if same else (WRONG, "hidet itself computes other values")
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError) and _as_exact_as_pytorch(session.runs):
            return RIGHT, f"{len(session.runs)} graphs, as exact as PyTorch's operators one by one"
        if not _as_whole(session.runs):
            return WRONG, text
        # A model may have no such inputs as the test asks for, such as an empty cache.
        return _of_built(session) if session.built else (OUTSIDE, f"hidet fails as well: {text}")
    if session.built:
        return _of_built(session)
    return OUTSIDE, "it computes nothing" if error is None else f"fails before: {type(error).__name__}: {error}"


def _of_error(session: Session) -> tuple[str, str]:
    error = session.errors[0]
    text = f"{type(error).__name__}: {error}"
    if (isinstance(error, HidetDistError) and not isinstance(error, _DEFECTS)) or _REFUSED_INPUT in text:
        return REFUSED, text
    last = session.runs[-1] if session.runs else None
    if last is not None and last.is_hidets and last.outputs is None and _fails(last):
        return OUTSIDE, f"hidet cannot compute it on CPUs: {text}"
    return WRONG, text


def _fails(run: Run) -> bool:
    """Whether hidet itself cannot compute a graph."""
    try:
        run.whole()
    except Exception:
        return True
    return False


def _first_and_last(runs: Sequence[Run]) -> list[Run]:
    graphs: dict[int, list[Run]] = {}
    for run in runs:
        graphs.setdefault(id(run.graph), []).append(run)
    return [run for own in graphs.values() for run in dict.fromkeys((own[0], own[-1]))]


def _as_whole(runs: Sequence[Run]) -> bool:
    """Whether hidet itself computes the same."""
    try:
        return all(run.is_hidets and differs(run.outputs or [], run.whole()) <= TOLERANCE for run in runs)
    except Exception:
        return False


def _as_exact_as_pytorch(runs: Sequence[Run]) -> bool:
    """Whether results in half precision are as near to those in float64 as PyTorch's operators come one by one.

    PyTorch's attention keeps its scores in float32. Tests that allow for less than the rounding of scores, which grows
    with their size, are judged so.
    """
    return all(run.function is not None and _is_as_exact(run) for run in runs)


def _is_as_exact(run: Run) -> bool:
    halves = (torch.float16, torch.bfloat16)
    assert run.function is not None
    if run.outputs is None or len(run.outputs) != 1 or run.outputs[0].dtype not in halves:
        return False
    wide = [x.double() if x.dtype in halves else x for x in run.inputs]
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            exact, stepwise = run.function(*wide), run.function(*run.inputs)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    own, theirs = (float((y.double() - exact).square().mean().sqrt()) for y in (run.outputs[0], stepwise))
    return own <= _MOST_ERRORS * theirs


def differs(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest difference of two results, relative to the largest value of each tensor, or to 1."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if b.numel():
            x, y = a.to(torch.complex128), b.to(torch.complex128)
            same = (x == y) | (torch.isnan(x.abs()) & torch.isnan(y.abs()))
            scale = max(1.0, float(torch.nan_to_num(y.abs(), posinf=0.0).max()))
            worst = max(worst, float(torch.where(same, torch.zeros_like(x), x - y).abs().max()) / scale)
    return worst


def _of_built(session: Session) -> tuple[str, str]:
    """The verdict of graphs that a test built and could not run, by random inputs beside hidet's own computation."""
    for graph in session.built:
        inputs = random_inputs(graph)
        try:
            got = session.run(graph, inputs)
        except Exception:
            return _of_error(session)
        off = differs(got, session.runs[-1].whole())
        if not off <= TOLERANCE:
            return WRONG, f"off by {off:.1e} of hidet's own on random inputs"
    return RIGHT, f"{len(session.built)} graphs, on random inputs"


def random_inputs(graph: FlowGraph) -> list[torch.Tensor]:
    """Random inputs of a graph: small numbers for integers, which are mostly places in tables."""
    made = []
    for x in graph.inputs or ():
        shape = [SYMBOL_SIZE if isinstance(size, SymbolVar) else int(size) for size in x.shape]
        dtype = getattr(torch, x.dtype.name)
        made.append(torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, shape).to(dtype))
    return made
