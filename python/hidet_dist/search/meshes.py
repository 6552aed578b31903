"""Searches on several meshes of one machine, of which the best result is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.search.limits import Limits
from hidet_dist.search.result import SearchResult


def best_search(
    searches: Iterable[tuple[float, Callable[[Limits], SearchResult]]], limits: Limits, gap: float
) -> SearchResult:
    """Run searches on several meshes, and return the result of the least seconds; within the gap an earlier one wins.

    Parameters
    ----------
    searches: iterable of (float, callable)
        For each mesh, the fraction of the limits that are left to it, and the search under limits.
    limits: Limits
        The limits of all searches together.
    gap: float
        The relative gap.

    Raises
    ------
    InfeasibleError, SolverError
        When no mesh has a plan within the budget and the limits. A mesh without one is left out otherwise.
    """
    errors: list[InfeasibleError | SolverError] = []
    best: SearchResult | None = None
    for fraction, run in searches:
        part = limits.part(fraction)
        if best is not None and part.expired():
            break
        try:
            result = run(part)
        except InfeasibleError as error:
            errors.append(error)
        except SolverError as error:
            if not part.time_reached:
                raise
            errors.append(error)
        else:
            if best is None or result.seconds < best.seconds * (1 - gap):
                best = result
    if best is None:
        unfit = [error for error in errors if isinstance(error, InfeasibleError)]
        raise min(unfit, key=lambda one: one.least_budget) if unfit else errors[0]
    return best
