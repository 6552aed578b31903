"""The room that a plan leaves in the budget, used: parts of the plan are planned again, all else as it is.

Equal layers that are joined from two plans (:mod:`hidet_dist.search.budget.joining`) change their plan one whole layer
at a time, and the points that have a price need not reach the budget at once. What is left is less than a layer's
bytes. The frontier of a window of operators has the budget as a constraint, so that it uses that room as well as the
window can; prices alone do not see it. All windows together have far fewer choices than the graph.

Where a better plan of a window only exceeds the budget somewhere else, the window gets a second place: the operators
around that point, where a few bytes may cost little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from hidet_dist.search import tuning
from hidet_dist.search.budget.combination import try_plans_below
from hidet_dist.search.budget.joining import positions
from hidet_dist.search.budget.state import ProbedPlan, State
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.descent import descend
from hidet_dist.search.problem.window import Window, Windows
from hidet_dist.search.steps import step


@step("filling")
def fill_room(state: State, second_per_byte: Sequence[float], cuts: Sequence[int]) -> None:
    """Plan windows of operators again, around the ``cuts`` in execution order and the points that have a price.

    Ends with a pass that hardly reduces the gap.
    """
    position = positions(state.problem)
    operators = _Operators(state.problem, position)
    centres = _centres(cuts, operators.priced(second_per_byte))
    if not state.best or not centres:
        return
    filling = _Filling(state, second_per_byte, position, operators)
    while not state.done():
        gap = state.seconds - state.bound
        for centre in filling.unlike(centres):
            filling.plan_around(centre)
            if state.done():
                return
        state.record(descend(state.problem, state.groups, state.best, state.limits))
        if state.seconds - state.bound > tuning.FILLING_PROGRESS * gap:
            return


class _Filling:
    """The planning of windows.

    ``points`` are the program points at which plans exceeded the budget. They are those of windows alone: frontiers of
    all operators would have too many labels with them.
    """

    def __init__(
        self,
        state: State,
        second_per_byte: Sequence[float],
        position: Sequence[int],
        operators: _Operators,
    ):
        self._state, self._second_per_byte, self._operators = state, second_per_byte, operators
        self._windows = Windows(state.problem)
        self._by_position: list[list[int]] = [[] for _ in range(max(position) + 1)]
        for entity, own in enumerate(position):
            self._by_position[own].append(entity)
        self.points: list[int] = []
        self._seen: set[Hashable] = set()

    def unlike(self, centres: Sequence[int]) -> Iterator[int]:
        """Yield the first few centres of which none has the choices of an earlier one in the operators around it.

        Equal layers have equal windows, in which the same plans are found.
        """
        kinds, count = self._state.problem.equal_parts.kinds, 0
        for centre in centres:
            key = tuple((kinds[entity], self._state.best[entity]) for entity in self._around(centre))
            if key not in self._seen:
                self._seen.add(key)
                yield centre
                count += 1
            if count == tuning.FILLED_WINDOWS:
                return

    def plan_around(self, centre: int) -> None:
        """Find the best plan that fits among those that differ from the best one in the operators around one.

        Where points elsewhere keep better plans from fitting, the operators around these are planned too.
        """
        places: list[int] = []
        place: int | None = centre
        while place is not None and len(places) < tuning.FILLED_PLACES and not self._state.done():
            places.append(place)
            place = self._plan(places)

    def _around(self, centre: int) -> list[int]:
        """List the entities of the operators around one."""
        near = self._by_position[max(0, centre - tuning.FILLED_WIDTH) : centre + tuning.FILLED_WIDTH + 1]
        return sorted(entity for own in near for entity in own)

    def _plan(self, places: Sequence[int]) -> int | None:
        """Find the best plan that fits among those that differ from the best one in the operators around some.

        Returns the operator at whose point alone a still better one exceeds the budget, if it is none of these.
        """
        whole = self._state
        whole.limits.check()
        entities = sorted({entity for place in places for entity in self._around(place)})
        window = self._windows.of([entity for entity in entities if len(whole.kept[entity]) > 1], whole.best)
        state = _WindowState.of(whole, window)
        state.frontier_points = window.points(self.points)
        prices = state.prices(window.prices(self._second_per_byte))
        try_plans_below(state, Tables(state.limits), prices, state.kept, state.seconds)
        known = set(self.points)
        self.points += [point for n in state.frontier_points if (point := int(window.dearest[n])) not in known]
        for seconds, exceeded in sorted(state.exceeding):
            if seconds >= state.seconds:
                break
            operators = [self._operators.at(int(window.dearest[n])) for n in exceeded]
            if all(abs(operator - place) > tuning.FILLED_WIDTH for operator in operators for place in places):
                return operators[0]
        return None


@dataclass
class _WindowState(State):
    """The state of a window of another one's best plan: seconds are those of the window's part of plans.

    ``exceeding`` are the seconds of plans that were better but for the points, the fullest first, at which they exceed
    the budget.
    """

    whole: State | None = None
    window: Window | None = None
    exceeding: list[tuple[float, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, whole: State, window: Window) -> _WindowState:
        """Begin with the best plan."""
        joint = [tuple(window.points(points)) for points in whole.joint]
        several = [points for points in joint if len(points) > 1]
        is_apart = len({point for points in several for point in points}) == sum(map(len, several))
        return cls(
            window.problem,
            whole.options,
            [list(choices) for choices in window.kept(whole.kept)],
            best=window.choices,
            seconds=whole.seconds - window.seconds_beside,
            bound=max(0.0, whole.bound - window.seconds_beside),
            joint=tuple(several) if is_apart else (),
            relaxation=TensorRelaxation(paired=whole.relaxation.paired),
            whole=whole,
            window=window,
        )

    def record(self, choices: tuple[int, ...]) -> ProbedPlan:
        """Cost a plan; if it fits and takes less time, keep it, and record the whole plan."""
        assert self.whole is not None and self.window is not None
        totals, before = self.problem.totals, self.whole.seconds
        probe = ProbedPlan(choices, totals.seconds(choices), totals.nbytes(choices))
        if probe.peak <= self.problem.budget and probe.seconds < self.seconds:
            self.whole.record(self.window.planned(choices))
            if self.whole.seconds < before:
                self.best, self.seconds = choices, self.whole.seconds - self.window.seconds_beside
        elif probe.seconds < self.seconds:
            points = [n for n, nbytes in enumerate(probe.nbytes) if nbytes > self.problem.budget]
            self.exceeding.append((probe.seconds, sorted(points, key=lambda n: -probe.nbytes[n])))
        return probe

    def cutoff(self) -> float:
        """Return the seconds below which a plan is better than the best one by more than the whole problem's gap."""
        assert self.whole is not None and self.window is not None
        return self.whole.cutoff() - self.window.seconds_beside

    def done(self) -> bool:
        """Tell whether the gap of the whole problem is small enough."""
        assert self.whole is not None
        return self.whole.done()


class _Operators:
    """The operators of program points, as positions in execution order."""

    def __init__(self, problem: Problem, position: Sequence[int]):
        self._reads = sorted((edge.begin, position[edge.consumer]) for edge in problem.edges)

    def at(self, point: int) -> int:
        """Find the operator of a point: the first one that reads a tensor from there on, or else the last."""
        return self._reads[min(bisect_left(self._reads, (point, 0)), len(self._reads) - 1)][1]

    def priced(self, second_per_byte: Sequence[float]) -> list[int]:
        """List the operators of the points that have a price, the dearest point first."""
        points = sorted((m for m, price in enumerate(second_per_byte) if price), key=lambda m: (-second_per_byte[m], m))
        return [self.at(m) for m in points] if self._reads else []


def _centres(cuts: Sequence[int], priced: Sequence[int]) -> list[int]:
    """Choose the centres of windows, so that each position is well within one.

    Where each layer has points with a price, they bind alike: the room at the dearest ones counts most.
    """
    centres: list[int] = []
    for position in (*cuts, *priced):
        if all(abs(position - other) > tuning.FILLED_WIDTH for other in centres):
            centres.append(position)
    return centres
