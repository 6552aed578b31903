"""The steps of the search within a memory budget: their names, what each does and when, and a record of those taken.

A search can be made without a step, to measure what it is worth: ``SearchOptions(without=["frontiers"])``, and
``make bench-budget ABLATE=frontiers``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hidet_dist.spec.report import StepTaken

P = ParamSpec("P")
S = TypeVar("S", bound="Searching")
T = TypeVar("T")


@dataclass(frozen=True)
class SearchStep:
    """A step: what it does, and when it is taken. A ``needed`` one is part of every search."""

    does: str
    when: str
    needed: bool = False


STEPS: dict[str, SearchStep] = {
    "elimination": SearchStep("the best plan without activations, and its bound", "always", needed=True),
    "multipliers": SearchStep(
        "multipliers of the points' bytes: the best bound, and plans on the way",
        "the plan so far exceeds the budget",
        needed=True,
    ),
    "unfit-choices": SearchStep(
        "drop choices with which every plan exceeds the budget at a point", "within multipliers"
    ),
    "joint-peaks": SearchStep("one multiplier for near points", "within multipliers, on graphs that are not wide"),
    "combination": SearchStep("combine the choices of known plans", "a gap of more than 1 %, or after frontiers"),
    "frontiers": SearchStep("list all partial plans below a limit, which is raised", "after combination"),
    "least-memory": SearchStep("the plan of least memory, or a refusal", "no plan fits so far", needed=True),
    "recombination": SearchStep(
        "an integer program over the choices of known plans", "graphs that are not wide, and the end"
    ),
    "joining": SearchStep(
        "join a plan that fits and one that does not, at a cut", "the mean of the multipliers' plans fits"
    ),
    "filling": SearchStep("plan windows of operators again within the budget", "after joining; not on wide graphs"),
    "narrowing": SearchStep(
        "drop choices whose bounds exceed the best plan", "before frontiers, and before the integer program"
    ),
    "parts": SearchStep("branch and bound: divide plans by resident bytes and choices", "wide graphs"),
    "integer-program": SearchStep("decide among the choices that are left", "they are few, or the gap is large"),
    "wide-graph": SearchStep(
        "the pairwise solver, in place of the rest", "graphs too wide for elimination", needed=True
    ),
    "descent": SearchStep("improve the best plan by one choice at a time", "the end"),
}
"""The steps, in the order in which they begin."""


class Searching(Protocol):
    """What a step works on: a search with the best plan so far, in seconds, and the bound of all plans."""

    seconds: float
    bound: float
    log: Log

    @property
    def without(self) -> frozenset[str]:
        """The steps that are left out."""

    @property
    def now(self) -> float:
        """The seconds since the search began."""


@dataclass
class Log:
    """The steps that a search took, in order. What a step takes within another one counts for the outer one."""

    taken: list[StepTaken] = field(default_factory=list)
    open: bool = False

    @contextmanager
    def taking(self, name: str, search: Searching) -> Iterator[None]:
        """Record a step while the block runs, even if it ends with an error."""
        if self.open:
            yield
            return
        begin, before = search.now, _gap(search)
        self.open = True
        try:
            yield
        finally:
            self.open = False
            self.taken.append(StepTaken(name, before, _gap(search), search.now - begin))


def step(
    name: str, otherwise: Any = None
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Make a function a step of the search that is its first argument; left out, it returns ``otherwise``."""
    assert name in STEPS, name

    def decorate(technique: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(technique)
        def run(search: S, *args: P.args, **named: P.kwargs) -> T:
            if name in search.without:
                left_out: T = otherwise
                return left_out
            with search.log.taking(name, search):
                return technique(search, *args, **named)

        return run

    return decorate


def _gap(search: Searching) -> float | None:
    """The relative gap between the best plan and the bound; None where no plan fits so far."""
    if search.seconds == float("inf"):
        return None
    return max(0.0, 1 - search.bound / search.seconds) if search.seconds else 0.0
