"""The state of a search within a memory budget: the best plan, the bound, and the choices that are left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.errors import HidetDistError
from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import eliminate, marginals
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Table, Tables, TooWide
from hidet_dist.search.elimination.presolve import Presolve, RemainingChoices
from hidet_dist.search.elimination.problem_network import network_of
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Problem, readers
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import Log, step


@dataclass(frozen=True)
class ProbedPlan:
    """A plan with its seconds, without the price of memory, and the bytes that a device holds at each program point.

    ``bound`` is the lower bound, in seconds, from the prices for which the plan is the best.
    """

    choices: tuple[int, ...]
    seconds: float
    nbytes: list[int]
    bound: float = -math.inf

    @property
    def peak(self) -> int:
        """The most bytes held at any program point."""
        return max(self.nbytes)


@dataclass
class State:
    """The best plan so far, the greatest lower bound, and the choices that a better plan can contain."""

    problem: Problem
    options: SolveOptions
    kept: list[list[int]]
    best: tuple[int, ...] = ()
    seconds: float = math.inf
    bound: float = 0.0
    known_plans: list[ProbedPlan] = field(default_factory=list)
    second_per_byte: tuple[float, ...] = ()
    peaks: dict[int, None] = field(default_factory=dict)  # program points at which plans exceeded the budget
    frontier_points: list[int] = field(default_factory=list)  # those at which plans of frontiers did
    refusal: HidetDistError | None = None  # the error to raise if no plan turns up
    narrowed: bool = False  # whether choices were dropped because plans with them reach the cutoff
    divided: bool = False  # whether the plans were divided into parts (divide_plans), as far as that is useful
    joint: tuple[tuple[int, ...], ...] = ()  # points of joint peaks, which share a price
    outer: State | None = None  # that of the whole problem, if this is the state of a part of its plans
    enough: float = math.inf  # the bound at which the search for prices pauses: other parts have smaller ones
    bounds: tuple[Prices, list[Table]] | None = None  # of each choice, for the last prices
    similar: State | None = (
        None  # the state of a similar problem, whose presolve and relaxation are shared, as ``outer``'s are
    )
    relaxation: TensorRelaxation = field(default_factory=TensorRelaxation)

    def __post_init__(self) -> None:
        self.groups = readers(self.problem)
        self.log = Log()
        self.limits = self.options.limits
        like = self.outer if self.similar is None else self.similar
        self.presolve: Presolve = Presolve(self.problem, None if like is None else like.presolve)
        if like is not None:
            self.relaxation = like.relaxation

    def instance(self, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices) -> EliminationInstance:
        """Make an elimination of this search, for prices and choices that are left."""
        return EliminationInstance(self.problem, kept, tables, prices, self.relaxation)

    @property
    def without(self) -> frozenset[str]:
        """The steps that are left out."""
        return self.options.without

    @property
    def now(self) -> float:
        """The seconds since the search began."""
        return self.limits.elapsed_seconds()

    def prices(self, second_per_byte: Sequence[float]) -> Prices:
        """Make prices of program points, of which those of joint peaks share theirs."""
        return Prices(second_per_byte, self.joint)

    def peaks_joined(self, nbytes: Sequence[int]) -> Sequence[int]:
        """Give all points of a joint peak the most bytes at any of them."""
        if not self.joint:
            return nbytes
        result = list(nbytes)
        for points in self.joint:
            most = max(nbytes[m] for m in points)
            for m in points:
                result[m] = most
        return result

    @step("joint-peaks", otherwise=False)
    def join_peaks(self, tables: Tables, second_per_byte: Sequence[float], plan: ProbedPlan) -> bool:
        """Join the peaks of priced points that are near each other; tell whether there are any more.

        They include near points at which ``plan`` exceeds the budget: these would have a price soon.
        """
        points = {m for m, price in enumerate(second_per_byte) if price}.union(*self.joint)
        near: list[tuple[int, ...]] = []
        for m in sorted(points):
            if near and m - near[-1][0] < tuning.JOINT_POINTS:
                near[-1] = *near[-1], m
            else:
                near.append((m,))
        joint: list[tuple[int, ...]] = []
        for peak in near:
            if len(peak) == 1 or peak in self.joint:
                joint += [peak] if peak in self.joint else []
                continue
            around = range(peak[-1] - tuning.JOINT_POINTS + 1, peak[0] + tuning.JOINT_POINTS)
            over = {m for m in around if 0 <= m < len(plan.nbytes) and plan.nbytes[m] > self.problem.budget}
            more = tuple(sorted(over.union(peak).difference(*(other for other in near if other != peak))))
            for joined in dict.fromkeys((more, peak)):
                if self._can_join(tables, joined):
                    joint.append(joined)
                    break
            else:
                joint += [points for points in self.joint if set(points) <= set(peak)]
        changed = tuple(joint) != self.joint
        self.joint = tuple(joint)
        return changed

    def _can_join(self, tables: Tables, points: tuple[int, ...]) -> bool:
        """Tell whether the table of a joint peak is small, and hardly makes elimination slower."""
        second_per_byte = [float(m in points) for m in range(self.problem.activations.points)]
        prices = Prices(second_per_byte, (points,))
        work = self._most_work(tables, self.kept, prices, tuning.READERS_LIMITS[0])
        return work <= max(tuning.WIDE_WORK, tuning.JOINT_WORK * tables.widest)

    def quickly_exact(self, tables: Tables, prices: Prices) -> bool:
        """Tell whether elimination is quick where tensors of more readers are treated exactly."""
        kept = self.reduction(prices).kept
        return self._most_work(tables, kept, prices, max(tuning.READERS_LIMITS)) <= tuning.EXACT_WORK

    def _most_work(self, tables: Tables, kept: Sequence[Sequence[int]], prices: Prices, readers_limit: int) -> float:
        """Compute the additions of the largest step of an elimination; infinite if the graph is too wide for one."""
        paired = self.relaxation.paired or 0
        try:
            network, _ = network_of(self.instance(kept, tables, prices), (), readers_limit, paired)
        except TooWide:
            return math.inf
        return network.most_work()

    def reduction(self, prices: Prices) -> RemainingChoices:
        """Reduce the choices to those of at least one of the best plans for these prices."""
        return self.presolve.reduce(self.kept, prices, self.limits)

    def probe(self, tables: Tables, prices: Prices, reduced: bool = True, coarse: bool = False) -> ProbedPlan:
        """Find the best plan for these prices, among the choices ``reduced`` for them.

        With ``coarse``, tensors of many readers stay relaxed.
        """
        self.limits.check()
        kept = self.reduction(prices).kept if reduced else self.kept
        # On wide graphs a second elimination takes long, and mixtures of plans are no worse without it.
        gap = math.inf if coarse and (self.outer is not None or is_wide(self, tables)) else self.options.solver_gap / 4
        solved = eliminate(self.instance(kept, tables, prices), gap, coarse)
        return replace(self.record(solved.choices), bound=solved.bound - prices.total * self.problem.budget)

    def record(self, choices: tuple[int, ...]) -> ProbedPlan:
        """Cost a plan, and keep it as the best one if it fits and takes less time."""
        totals = self.problem.totals
        probe = ProbedPlan(choices, totals.seconds(choices), totals.nbytes(choices))
        if self.outer is not None:
            self.outer.record(choices)
            self.best, self.seconds = self.outer.best, self.outer.seconds
        elif probe.peak <= self.problem.budget and probe.seconds < self.seconds:
            self.best, self.seconds = choices, probe.seconds
            self.tell()
        return probe

    def record_simple_plans(self) -> None:
        """Cost three plans that need no solver: every entity with its first, its cheapest or its smallest choice."""
        cost, memory = self.problem.cost, self.problem.memory
        self.record((0,) * len(cost))
        self.record(tuple(min(range(len(values)), key=values.__getitem__) for values in cost))
        self.record(tuple(min(range(len(values)), key=values.__getitem__) for values in memory))

    def raise_bound(self, bound: float) -> None:
        """Raise the lower bound of all plans to that of the choices that are kept."""
        if self.narrowed:
            bound = min(bound, self.cutoff())  # plans with dropped choices cost no less than that
        if bound > self.bound:
            self.bound = bound
            self.tell()

    def tell(self) -> None:
        """Report the best plan so far, and the bound."""
        if self.options.on_incumbent is not None and self.best:
            bound = min(self.bound, self.seconds)
            self.options.on_incumbent(self.best, self.seconds, bound, self.limits.elapsed_seconds())

    def keeps(self, choices: Sequence[int]) -> bool:
        """Tell whether none of a plan's choices was dropped."""
        return all(k in kept for k, kept in zip(choices, self.kept, strict=True))

    def open_choices(self) -> int:
        """Count the remaining choices of entities that have more than one."""
        return count_open(self.kept)

    def cutoff(self) -> float:
        """Return the seconds below which a plan is better than the best one by more than the gap."""
        return self.seconds * (1 - self.options.solver_gap)

    def done(self) -> bool:
        """Tell whether the gap between the best plan and the bound is small enough."""
        return (
            math.isfinite(self.seconds) and self.seconds - self.bound <= self.options.solver_gap * self.seconds + 1e-15
        )


def is_wide(state: State, tables: Tables) -> bool:
    """Tell whether the graph is so wide that frontiers have too many labels, and not too large to be divided."""
    return tables.widest > tuning.WIDE_WORK and sum(map(len, state.problem.cost)) <= tuning.DIVIDED_CHOICES


def count_open(kept: Sequence[Sequence[int]]) -> int:
    """Count the choices of entities that have more than one."""
    return sum(len(choices) for choices in kept if len(choices) > 1)


@step("narrowing")
def narrow_choices(state: State, tables: Tables, prices: Prices) -> None:
    """Keep only the choices that a plan better than the best one so far could contain."""
    if state.done() or not state.best:
        return
    # Bounds for earlier prices leave fewer choices to bound anew, if a better plan was found since.
    _drop_above_cutoff(state)
    if bound_choices(state, tables, prices) is not None:
        _drop_above_cutoff(state)


def _drop_above_cutoff(state: State) -> None:
    """Drop the choices whose last bounds reach the cutoff."""
    if state.bounds is not None:
        prices, bounds = state.bounds
        state.kept = choices_below(state, bounds, state.cutoff() + prices.total * state.problem.budget)
        state.narrowed = True


def bound_choices(state: State, tables: Tables, prices: Prices) -> list[Table] | None:
    """Bound the priced cost of plans with each choice of each entity from below; None if that would take long."""
    state.limits.check()
    reduction = state.reduction(prices)
    left = marginals(state.instance(reduction.kept, tables, prices))
    if left is None:
        return None
    bounds = reduction.extend(state.problem, left)
    state.bounds = prices, bounds
    return bounds


def choices_below(state: State, bounds: Sequence[Table], limit: float) -> list[list[int]]:
    """Select the choices with bounds below a limit; an entity without any keeps one, that of the best plan if any."""
    best = state.best or [min(own, key=line.__getitem__) for own, line in zip(state.kept, bounds, strict=True)]
    return [
        [k for k in choices if line[k] < limit] or [one]
        for choices, line, one in zip(state.kept, bounds, best, strict=True)
    ]
