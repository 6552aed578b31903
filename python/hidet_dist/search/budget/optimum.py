"""The search for the best plan within the memory budget.

Without the budget, elimination solves the problem exactly. With it, these steps follow, each only as long as the gap
between the best plan and the bound is too large:

* prices on the bytes of program points give a bound, and plans (:mod:`hidet_dist.search.budget.relaxation`),
* the choices of known plans are combined, and all plans below a limit are listed
  (:mod:`hidet_dist.search.budget.combination`),
* plans are joined (:mod:`hidet_dist.search.budget.joining`), and the room that is left in the budget is used
  (:mod:`hidet_dist.search.budget.filling`),
* plans of wide graphs are divided into parts (:mod:`hidet_dist.search.budget.division`), of small ones right after the
  prices,
* the integer program decides among the choices that are left (:mod:`hidet_dist.search.budget.programs`).

On the way, choices that no better plan can contain are dropped (:mod:`hidet_dist.search.budget.state`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.search import tuning
from hidet_dist.search.budget.combination import combine_plans, search_below_limits
from hidet_dist.search.budget.division import divide_plans
from hidet_dist.search.budget.filling import fill_room
from hidet_dist.search.budget.joining import join_at_cut
from hidet_dist.search.budget.least_memory import find_fitting
from hidet_dist.search.budget.programs import decide_by_program, is_worth_a_program, not_found_error, recombine_plans
from hidet_dist.search.budget.relaxation import Mixture, probe_without_activations, relax_budget
from hidet_dist.search.budget.state import ProbedPlan, State, is_wide, narrow_choices
from hidet_dist.search.budget.ties import charge_collectives
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.ilp import StoppedError
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.pairwise import wide
from hidet_dist.search.problem import Problem, Solution, each, restricted
from hidet_dist.search.problem.descent import descend
from hidet_dist.search.steps import step


def optimize(problem: Problem, options: SolveOptions | None = None, like: Solution | None = None) -> Solution:
    """Solve the problem to a relative gap, or until the time limit.

    Of plans of equal cost, one with few collectives is taken (:mod:`hidet_dist.search.budget.ties`). ``like`` is the
    solution of a problem that differs only in its costs: the search starts from its plans.

    Raises
    ------
    InfeasibleError
        When no plan fits the budget.
    SolverError
        When the solver fails, or the time limit or the memory limit is reached before there is a plan.
    """
    options = SolveOptions() if options is None else options
    charged = charge_collectives(problem, options.solver_gap)
    return charged.solution(_optimize(charged.problem, charged.options(options), like))


def _optimize(problem: Problem, options: SolveOptions, like: Solution | None) -> Solution:
    limits = options.limits
    state = State(problem, options, [list(range(len(costs))) for costs in problem.cost])
    tables = Tables(limits)
    if like is not None:
        state.peaks = dict.fromkeys(like.points)
        state.relaxation.narrowed = like.narrowed
        state.known_plans = [state.record(choices) for choices in like.known]
    try:
        try:
            state.kept = state.presolve.reduce(state.kept, limits=limits).kept
            if sum(each(min, problem.memory)) > problem.budget:
                find_fitting(state, limits.part(tuning.REFUSAL_FRACTION))  # raises: no plan fits
            # The bound without activations holds with them; if this plan fits with them, it is the best.
            try:
                probe_without_activations(state, tables)
            finally:
                state.kept = [list(range(len(costs))) for costs in problem.cost]
            if not state.done():
                plans, mixture = relax_budget(state, tables)
                state.second_per_byte = tuple(mixture.prices)
                state.known_plans = plans
                over = {probe.nbytes.index(probe.peak) for probe in plans if probe.peak > problem.budget}
                state.peaks |= dict.fromkeys(sorted(over))
                if not state.done():
                    _Improvement(state, tables, plans, mixture).run()
        except TooWide:
            if state.open_choices() > tuning.FEW_CHOICES:
                _search_wide(state)
        del tables
        if not state.done() and is_worth_a_program(state):
            decide_by_program(state)
    except OutOfTimeError:
        state.record_simple_plans()
    if not state.best:
        raise state.refusal or not_found_error(state)
    _descend(state)
    gap = max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0
    known = (*(probe.choices for probe in state.known_plans[-tuning.KNOWN_PLANS :]), state.best)
    return Solution(
        state.best,
        state.seconds,
        gap,
        state.second_per_byte,
        tuple(state.peaks),
        tuple(dict.fromkeys(known)),
        state.relaxation.narrowed,
        tuple(state.log.taken),
    )


@step("descent")
def _descend(state: State) -> None:
    state.record(descend(state.problem, state.groups, state.best, state.limits))


@step("wide-graph")
def _search_wide(state: State) -> None:
    """Search a graph that is too wide for elimination, and has too many choices for the integer program alone."""
    try:
        solution = wide.solve(restricted(state.problem, state.kept), state.options)
    except StoppedError as error:
        state.raise_bound(error.bound)
        return
    state.raise_bound(solution.seconds * (1 - solution.gap))
    state.record(tuple(choices[k] for choices, k in zip(state.kept, solution.choices, strict=True)))


class _Improvement:
    """The search for better plans than those of the multipliers, until few choices are left for the integer program.

    Attributes
    ----------
    state, tables: the search, and its tables.
    plans: the plans of the search for multipliers.
    mixture: the convex combination of them with the best multipliers, ``prices``.
    """

    def __init__(self, state: State, tables: Tables, plans: Sequence[ProbedPlan], mixture: Mixture):
        self.state, self.tables, self.plans, self.mixture = state, tables, plans, mixture
        self.prices = state.prices(mixture.prices)
        self.known = [*(probe for _, probe in mixture.parts), *plans[-tuning.RECOMBINED_PLANS :]]
        self.combined = mixture.over

    def run(self) -> None:
        """Take the steps in order, until the gap is small enough or one of them ends the search."""
        steps = (
            self._divide_first,
            self._find_fitting,
            self._join,
            self._narrow,
            self._list_plans,
            self._divide_or_recombine,
        )
        for take in steps:
            if take() or self.state.done():
                return

    @property
    def _is_wide(self) -> bool:
        return is_wide(self.state, self.tables)

    def _is_far(self, gap: float) -> bool:
        """Whether the relative gap between plan and bound exceeds one."""
        return self.state.seconds - self.state.bound > gap * self.state.seconds

    def _combine(self) -> None:
        combine_plans(self.state, self.prices, self.known)

    def _divide_first(self) -> bool:
        """Divide the plans of a small wide graph: that finds good plans sooner than combining those known."""
        state = self.state
        far = not state.best or self._is_far(tuning.DIVIDED_GAP)
        if far and sum(map(len, state.problem.cost)) <= tuning.DIVIDED_FIRST and self._is_wide:
            divide_plans(state, self.mixture)
        return False

    def _find_fitting(self) -> bool:
        """Find a plan that fits if there is none, and recombine the plans known, which fit and which do not."""
        if not self.state.best:
            # All plans so far exceed the budget, however little. One that fits is the other end of the mixtures below.
            self.state.known_plans.append(find_fitting(self.state))
        if not self._is_wide:
            # Integer programs of wide graphs are slow; frontiers combine the plans of those.
            recombine_plans(self.state, self.plans, self.state.options.solver_gap, tuning.VERY_FEW_CHOICES)
        return False

    def _join(self) -> bool:
        """Join two plans of the mixture, and use the room left; without a proof, the search ends with that."""
        if self.mixture.over:
            return False
        cuts = join_at_cut(self.state, self.mixture)
        if not self.state.done() and not self._is_wide:
            fill_room(self.state, self.mixture.prices, cuts)
        if self.state.done():
            return True
        if self._is_far(tuning.ROUGH_GAP):
            # The plans below the best one are many. Those combined of known ones are few, and better.
            self._combine()
            self.combined = True
        return not self.state.options.prove

    def _narrow(self) -> bool:
        """Drop choices; where memory has no price, and nearly all are left, the search ends with that.

        What is open is due to relaxed tensors then, and the steps behind would eliminate the same choices again.
        """
        state, before = self.state, self.state.open_choices()
        narrow_choices(state, self.tables, self.prices)
        many = state.open_choices() > max(tuning.FEW_CHOICES, tuning.NARROWED_FRACTION * before)
        return many and not any(self.mixture.prices) and not self._is_wide

    def _list_plans(self) -> bool:
        """List the plans below limits; if that does not decide, combine plans, and list those below a better one."""
        state = self.state
        if not search_below_limits(state, self.tables, self.prices) and not self.combined:
            best = state.seconds
            self._combine()
            if state.seconds < best and not state.done():
                self._narrow()
                search_below_limits(state, self.tables, self.prices)
        return False

    def _divide_or_recombine(self) -> bool:
        """Divide the plans of a wide graph, or recombine the plans of another one; not where few choices are left."""
        state = self.state
        if state.open_choices() <= tuning.VERY_FEW_CHOICES:
            return True
        if self._is_wide and state.open_choices() > tuning.FEW_WIDE_CHOICES:
            if not state.divided:
                divide_plans(state, self.mixture)
            return True
        recombine_plans(state, self.plans, max(tuning.ROUGH_GAP, state.options.solver_gap))
        self._narrow()
        return False
