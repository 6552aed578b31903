"""The options of a search, and of the solvers that it calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hidet_dist.checks import is_finite, is_whole, shown
from hidet_dist.errors import ConfigError
from hidet_dist.limits import MOST_BYTES, MOST_SECONDS, MOST_SOLVER_THREADS
from hidet_dist.search.limits import MEMORY_LIMIT_BYTES, TIME_LIMIT_SECONDS, Clock, Limits
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize

MODES = ("search", "propagate")
SOLVERS = ("highs", "cbc")

OnIncumbent = Callable[[Sequence[int], float, float, float], None]
OnBetter = Callable[[float, float], None]


@dataclass(frozen=True)
class SolveOptions:
    """Options of the solvers.

    Attributes
    ----------
    solver: ``highs`` or ``cbc``, for integer programs.
    gap: the relative gap between the plan and the lower bound at which to stop.
    threads: the solver's threads for integer programs.
    limits: the deadline and the memory limit, shared by the whole search.
    on_incumbent: called with the choices of the best plan so far, its seconds, the lower bound and the elapsed seconds,
        whenever one of the first three changes.
    prove: whether to go on until the gap is proven. Without it, the best plan so far is returned where a proof would
        take long.
    """

    solver: str = "highs"
    gap: float = 1e-3
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    on_incumbent: OnIncumbent | None = None
    prove: bool = True


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search for a plan.

    Attributes
    ----------
    mem_budget: int, optional
        Bytes that each device may hold at any time: weights, graph inputs and outputs, and live activations;
        the device's memory when not given.
    input_specs, output_specs: sequence of TensorShardSpec or None, optional
        The specs in which graph inputs arrive and outputs are delivered; None stands for replicated.
    pins: mapping, optional
        Specs that weights, inputs, outputs, activations and operators must have, by name: specs or patterns of them, or
        their text. See :class:`hidet_dist.search.formulation.pins.Pin` for the names.
    names: Module or mapping of names to tensors, optional
        The user's names of tensors of the graph, in pins and in the plan.
    symbols: mapping, optional
        The declared sizes of the graph's symbolic dims, by name.
    mode: str
        ``search``, or ``propagate`` to derive the whole plan from pins and given specs (see
        :mod:`hidet_dist.search.propagate`): fast, and only as good as the pins.
    refine_mesh: bool
        Whether to plan for a finer mesh as well, where the graph has fewer heads than a mesh axis has devices
        (:mod:`hidet_dist.search.refine`), and take the better plan: two heads of keys and values are then split over
        four devices, each held by a group of two. The plan's mesh may then have more axes than the given one, with the
        same ranks. Pins, which name the axes of the given mesh, and symbolic dims turn this off.
    solver: str
        The solver of integer programs, ``highs`` or ``cbc``.
    gap: float
        The relative gap between the plan and the bound at which the search may stop.
    time_limit_seconds: float, optional
        Seconds after which the search as a whole ends with the best plan known, and a warning; None for no limit.
    memory_limit_bytes: int
        Bytes that the tables of eliminations, or an integer program, may take while planning. A graph that needs more
        is planned by coarser means, or refused with SolverError.
    threads: int
        Threads of the solver. With one, and unless the time limit is reached, the same graph gets the same plan.
    on_incumbent: callable, optional
        Called during the search with the predicted seconds of the best plan so far, and the lower bound: no plan takes
        less.
    clock: callable
        The clock of the time limit, in seconds.
    """

    mem_budget: int | None = None
    input_specs: Sequence[TensorShardSpec | None] | None = None
    output_specs: Sequence[TensorShardSpec | None] | None = None
    pins: Mapping[str, Any] | None = None
    names: Any = None
    symbols: Mapping[str, SymbolSize] | None = None
    mode: str = "search"
    refine_mesh: bool = True
    solver: str = "highs"
    gap: float = 1e-3
    time_limit_seconds: float | None = TIME_LIMIT_SECONDS
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    threads: int = 1
    on_incumbent: OnBetter | None = None
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        for name in REQUIREMENTS:
            check_option(name, getattr(self, name))

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
        return Limits(self.time_limit_seconds, self.memory_limit_bytes, self.clock)

    def solve_options(self, limits: Limits, on_incumbent: OnIncumbent | None = None) -> SolveOptions:
        """Select the options that solvers take."""
        return SolveOptions(self.solver, self.gap, self.threads, limits, on_incumbent)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


# The requirement on each option: a predicate, its text in the error, and the largest number accepted.
REQUIREMENTS: Mapping[str, tuple[Callable[[Any], bool], str, float | None]] = {
    "mem_budget": (lambda value: value is None or is_whole(value, 1, MOST_BYTES), "whole bytes above 0", MOST_BYTES),
    "mode": (lambda value: isinstance(value, str) and value in MODES, f"one of {', '.join(MODES)}", None),
    "refine_mesh": (_is_bool, "True or False", None),
    "solver": (lambda value: isinstance(value, str) and value in SOLVERS, f"one of {', '.join(SOLVERS)}", None),
    "gap": (lambda value: is_finite(value) and 0 <= value < 1, "in [0, 1)", None),
    "time_limit_seconds": (
        lambda value: value is None or (is_finite(value) and 0 < value <= MOST_SECONDS),
        "above 0",
        MOST_SECONDS,
    ),
    "memory_limit_bytes": (lambda value: is_whole(value, 1, MOST_BYTES), "whole bytes above 0", MOST_BYTES),
    "threads": (
        lambda value: is_whole(value, 1, MOST_SOLVER_THREADS),
        f"an int from 1 to {MOST_SOLVER_THREADS}",
        None,
    ),
}


def check_option(name: str, value: Any, label: str | None = None) -> None:
    """Check a value of a field of SearchOptions; ``label`` is its name in errors. Raises ConfigError."""
    fits, requirement, most = REQUIREMENTS[name]
    if not fits(value):
        beyond = most is not None and isinstance(value, int | float) and value > most
        more = f", more than the largest, {most}" if beyond else ""
        raise ConfigError(f"{label or name} must be {requirement}; got {shown(value)}{more}.")
