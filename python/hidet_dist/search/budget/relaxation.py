"""Prices on the bytes of program points: the greatest lower bound that they give, and plans on the way to it.

Any prices give a lower bound and a plan (Lagrangian relaxation; Everett, Operations Research 11(3), 1963). The best
prices are the duals of a small linear program, which mixes the plans so far so that no point's mean exceeds the budget
(Dantzig and Wolfe, Operations Research 8(1), 1960): a plan that is cheaper at these prices joins the mixture, until
there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.search import tuning
from hidet_dist.search.budget.least_memory import find_fitting
from hidet_dist.search.budget.master import solve_master
from hidet_dist.search.budget.state import ProbedPlan, State, is_wide
from hidet_dist.search.budget.unfit import fitting_choices
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.problem import each
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@step("elimination")
def probe_without_activations(state: State, tables: Tables) -> None:
    """Find the best plan for a negligible price, then for none: of plans of equal time, the one that holds less."""
    problem = state.problem
    trifle = (
        state.options.solver_gap
        * tuning.TIE_FRACTION
        * sum(each(min, problem.cost))
        / max(1, sum(each(max, problem.memory)))
    )
    count = problem.activations.points
    # Before the first operator a device holds little but what it holds during the whole run.
    for price in (trifle, 0.0):
        probe = state.probe(tables, Prices.at_point(0, price, count), reduced=False)
        state.known_plans.append(probe)
        state.raise_bound(probe.bound)
        if probe.peak > problem.budget or state.done():
            return


@dataclass(frozen=True)
class Mixture:
    """The best mixture of plans whose mean fits the budget.

    Attributes
    ----------
    seconds: the objective of the master program.
    parts: the plans with their fractions, greatest first.
    prices: seconds per byte at each program point.
    over: whether the mean exceeds the budget after all.
    """

    seconds: float
    parts: list[tuple[float, ProbedPlan]]
    prices: list[float]
    over: bool


@step("multipliers")
def relax_budget(state: State, tables: Tables) -> tuple[list[ProbedPlan], Mixture]:
    """Find the prices of the greatest lower bound; return the plans on the way and the mixture with these prices.

    Raises
    ------
    InfeasibleError
        When no plan fits.
    """
    search = _PriceSearch(state, tables)
    coarse, is_part = True, state.outer is not None
    tested: set[int] = set()
    for _ in range(tuning.PROBES):
        if state.bound >= state.cutoff() or state.bound > state.enough or math.isinf(state.bound):
            break
        # In a part of the plans, the choices that fit nowhere are gone.
        over = None if is_part else _untested_peak(state, search.plans[-1], tested)
        if over is not None and _drop_unfit(state, over):
            search.drop_plans(coarse)
        if not state.best and state.limits.spent(tuning.PLAN_BY_FRACTION):
            search.plans.append(find_fitting(state))
            search.mix()
        mixture = search.mixture
        near = _near(state, mixture)
        exact = not coarse or is_part or search.best.slack <= near * state.seconds
        if exact and not mixture.over and search.best.bound >= mixture.seconds * (1 - near):
            return search.plans, replace(mixture, prices=search.best.prices)
        known = {probe.choices for probe in search.plans}
        probe = search.probe(coarse)
        prices, near = state.prices(search.probed), _near(state, mixture)
        repeated = probe.choices in known and search.probed is mixture.prices
        if repeated or probe.bound >= mixture.seconds * (1 - near):
            if not mixture.over:
                if not coarse or is_part or _slack(state, probe, prices) <= near * state.seconds:
                    break  # no elimination gives these prices a much greater bound
                if not state.quickly_exact(tables, prices):
                    break
                coarse = False
                continue
            search.raise_limit()
        search.mix()
        if not is_part and not is_wide(state, tables) and state.join_peaks(tables, search.mixture.prices, probe):
            search.mix()
    return search.plans, search.mixture


@dataclass(frozen=True)
class _Bound:
    """The bound that prices give, in seconds.

    ``slack`` are the seconds by which it could be greater if no tensor were relaxed, at most.
    """

    bound: float = -math.inf
    slack: float = math.inf
    prices: list[float] = field(default_factory=list)


class _PriceSearch:
    """The plans so far, and their best mixture.

    Attributes
    ----------
    plans: the plans, the latest last.
    limit: the price of a byte that the mixture holds above the budget, in seconds.
    mixture: the best mixture of the plans. It excludes the latest plans until the next call of :meth:`mix`.
    probed: the prices of the last probe.
    best: the greatest bound of a probe.
    """

    def __init__(self, state: State, tables: Tables):
        self._state, self._tables = state, tables
        self._raises = 0
        self.probed: list[float] = []
        self.best = _Bound()
        self.plans = list(state.known_plans)
        low, budget = self.plans[-1], state.problem.budget
        # The fewer bytes there are, the more each is worth. A price that is too high costs no more probes than one that
        # is too low. A part of the plans has been probed at prices of the whole.
        fraction, nbytes = tuning.FIRST_PRICE, budget
        if state.outer is not None:
            fraction, nbytes = tuning.PART_FIRST_PRICE, min(low.peak - budget, budget)
        self.limit = low.seconds / max(1, nbytes) * fraction or 1.0
        self.mix()

    def mix(self) -> None:
        """Mix the plans. If the bound can hardly rise at the limit, the mixture exceeds the budget: raise it."""
        while True:
            self.mixture = _mixture(self._state, self.plans, self.limit)
            if not self.mixture.over or not self._is_probed():
                return
            self.raise_limit()

    def _is_probed(self) -> bool:
        """Tell whether the mixture's prices were probed, or can hardly raise the bound."""
        near = self._state.bound >= self.mixture.seconds * (1 - tuning.ROUGH_GAP)
        return near or self.mixture.prices == self.probed

    def probe(self, coarse: bool) -> ProbedPlan:
        """Find the best plan for the mixture's prices.

        If no plan of the mixture exceeds the budget, they are 0. Half of the last prices are nearer to the best ones if
        these gave the greatest bound so far.
        """
        state, last = self._state, self.probed
        self.probed = self.mixture.prices
        if last is self.best.prices and self.best.bound >= state.bound and not any(self.probed):
            self.probed = [price / 2 for price in last]
        prices = state.prices(self.probed)
        probe = state.probe(self._tables, prices, coarse=coarse)
        state.raise_bound(probe.bound)
        if probe.bound > self.best.bound:
            self.best = _Bound(probe.bound, _slack(state, probe, prices), self.probed)
        self.plans.append(probe)
        return probe

    def drop_plans(self, coarse: bool) -> None:
        """Drop the plans with choices that are no longer kept."""
        self.plans = [one for one in self.plans if self._state.keeps(one.choices)]
        self.probed = []
        if not self.plans:
            self.probe(coarse)
        self.mix()

    def raise_limit(self) -> None:
        """Raise the limit; find a plan that fits after a few raises."""
        self._raises += 1
        if not self._state.best and self._raises > tuning.PRICE_RAISES:
            self.plans.append(find_fitting(self._state))
        self.limit *= tuning.PRICE_RAISE


def _near(state: State, mixture: Mixture) -> float:
    """Return the relative gap between a bound and the mixture below which no better prices are looked for."""
    # Without a proof, prices serve only to find plans: exact ones help where the plans so far are good already.
    far = not state.options.prove and state.seconds * (1 - tuning.FAR_GAP) > mixture.seconds
    return tuning.ROUGH_GAP if mixture.over or far else state.options.solver_gap * tuning.BOUND_FRACTION


def _slack(state: State, probe: ProbedPlan, prices: Prices) -> float:
    """Compute the seconds by which the bound at these prices could be greater if no tensor were relaxed, at most."""
    return probe.seconds + prices.of(probe.nbytes) - prices.total * state.problem.budget - probe.bound


def _untested_peak(state: State, plan: ProbedPlan, tested: set[int]) -> int | None:
    """Return the peak of a plan that exceeds the budget, if plans with each choice are still to be tested there."""
    point = plan.nbytes.index(plan.peak)
    if plan.peak <= state.problem.budget or point in tested or len(tested) == tuning.UNFIT_POINTS:
        return None
    tested.add(point)
    return point


@step("unfit-choices", otherwise=False)
def _drop_unfit(state: State, point: int) -> bool:
    """Drop the choices with which every plan exceeds the budget at a program point; tell whether there are any."""
    fitting = fitting_choices(state.problem, state.kept, point, state.limits)
    if fitting is None or not all(fitting) or fitting == state.kept:
        return False  # if no plan fits at all, the search for the plan of least memory says so
    state.kept = fitting
    return True


def _mixture(state: State, plans: Sequence[ProbedPlan], limit: float) -> Mixture:
    """Mix plans by the master program; a byte above the budget costs ``limit`` seconds."""
    budget = state.problem.budget
    unit = max(probe.seconds for probe in plans) or 1.0
    byte = float(max(1, budget))
    master = solve_master(
        [state.peaks_joined(probe.nbytes) for probe in plans],
        [probe.seconds / unit for probe in plans],
        limit * byte / unit,
        budget,
        byte,
        state.limits,
    )
    parts = sorted(enumerate(master.fractions), key=lambda part: (-part[1], part[0]))
    return Mixture(
        master.objective * unit,
        [(fraction, plans[i]) for i, fraction in parts if fraction > 1e-9],
        [dual * unit / byte for dual in master.duals],
        master.slack > 1e-9,
    )
