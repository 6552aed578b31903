"""The options of a search, and of the solvers that it calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hidet_dist.errors import ConfigError
from hidet_dist.options.option import check_options, one_of, taken_from
from hidet_dist.options.planning import PlanningOptions, SolverOptions
from hidet_dist.search.limits import Clock, Limits
from hidet_dist.search.steps import STEPS

OnIncumbent = Callable[[Sequence[int], float, float, float], None]
OnBetter = Callable[[float, float], None]


@dataclass(frozen=True)
class SolveOptions(SolverOptions):
    """Options of the solvers: those of :class:`hidet_dist.options.planning.SolverOptions`, and those of one call.

    Attributes
    ----------
    limits: the deadline and the memory limit, shared by the whole search.
    on_incumbent: called with the choices of the best plan so far, its seconds, the lower bound and the elapsed seconds,
        whenever one of the first three changes.
    prove: whether to go on until the gap is proven. Without it, the best plan so far is returned where a proof would
        take long.
    without: steps of the search within a budget that are left out.
    """

    limits: Limits = field(default_factory=Limits)
    on_incumbent: OnIncumbent | None = None
    prove: bool = True
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SearchOptions(PlanningOptions):
    """Options of a search: those of :class:`hidet_dist.options.planning.PlanningOptions`, and those of one call.

    Attributes
    ----------
    on_incumbent: callable, optional
        Called during the search with the predicted seconds of the best plan so far, and the lower bound: no plan takes
        less.
    clock: callable
        The clock of the time limit, in seconds.
    without: collection of str
        Steps of the search within a memory budget that are left out, to measure what they are worth: names of
        :data:`hidet_dist.search.steps.STEPS`.
    unequal_parts: bool
        Whether devices may have unequal parts of a dim besides the mesh's shares, where the target compiles them.
    searches_shares: bool
        Whether shares of the mesh's first axis are searched, in proportion to its devices' rates or memory, beside the
        even split.
    overlap: bool
        Whether to look for plans that hide more communication behind computation (:mod:`hidet_dist.search.overlap`),
        on a machine that overlaps them, and to report what is hidden.
    report: bool
        Whether to make the report that ``plan.explain()`` shows. There is none for several graphs.
    """

    on_incumbent: OnBetter | None = None
    clock: Clock = time.perf_counter
    without: Collection[str] = ()
    unequal_parts: bool = True
    searches_shares: bool = False
    overlap: bool = True
    report: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        optional = [name for name, step in STEPS.items() if not step.needed]
        for name in self.without:
            one_of(optional)("without", name)

    @classmethod
    def of(cls, given: SearchOptions | None, changes: Mapping[str, Any]) -> SearchOptions:
        """Apply changes by name to the given options, or to the defaults. Raises ConfigError for unknown names."""
        if given is not None and not isinstance(given, SearchOptions):
            raise ConfigError(f"The options of a search are a SearchOptions; got {given!r}.")
        known = [field.name for field in fields(cls)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"Unknown option {name!r} of a search; the options are {', '.join(known)}.")
        return replace(cls() if given is None else given, **changes)

    def limits(self) -> Limits:
        """The limits of a search that begins now."""
        return Limits(self.solver_time_limit_seconds, self.solver_memory_limit_bytes, self.clock)

    def solve_options(self, limits: Limits, on_incumbent: OnIncumbent | None = None) -> SolveOptions:
        """Select the options that solvers take."""
        return taken_from(SolveOptions, self, limits=limits, on_incumbent=on_incumbent, without=frozenset(self.without))
