"""The room that a plan leaves in the budget, used: parts of the plan are planned again, all else as it is.

Equal layers that are joined from two plans (:mod:`hidet_dist.search.budget.joining`) change their plan one whole layer
at a time, and the points that have a price need not reach the budget at once. What is left is less than a layer's
bytes. The frontier of a window of operators has the budget as a constraint, so that it uses that room as well as the
window can; prices alone do not see it. All windows together have far fewer choices than the graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from hidet_dist.search import tuning
from hidet_dist.search.budget.combination import try_plans_below
from hidet_dist.search.budget.joining import positions
from hidet_dist.search.budget.state import Probe, State
from hidet_dist.search.elimination.network import Tables
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
    centres = _centres(cuts, _priced(state.problem, second_per_byte, position))
    if not state.best or not centres:
        return
    filling = _Filling(state, second_per_byte, position)
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

    def __init__(self, state: State, second_per_byte: Sequence[float], position: Sequence[int]):
        self._state, self._second_per_byte = state, second_per_byte
        self._windows = Windows(state.problem)
        self._by_position: list[list[int]] = [[] for _ in range(max(position) + 1)]
        for entity, own in enumerate(position):
            self._by_position[own].append(entity)
        self.points: list[int] = []
        self._seen: set[Hashable] = set()

    def unlike(self, centres: Sequence[int]) -> Iterator[int]:
        """Yield the first few centres of which none has the choices of an earlier one around it.

        Equal layers have equal windows, in which the same plans are found.
        """
        kinds, count = self._state.problem.equal_parts.kinds, 0
        for centre in centres:
            entities = self._around(centre, tuning.FILLED_WIDTHS[0])
            key = tuple((kinds[entity], self._state.best[entity]) for entity in entities)
            if key not in self._seen:
                self._seen.add(key)
                yield centre
                count += 1
            if count == tuning.FILLED_WINDOWS:
                return

    def plan_around(self, centre: int) -> None:
        """Find the best plan that fits among those that differ from the best one in the operators around one.

        A window has too many partial plans to list all. Where none of those listed is better, a narrower one follows,
        of which more of them are.
        """
        before = self._state.seconds
        for width in tuning.FILLED_WIDTHS:
            self._state.limits.check()
            self._plan(self._around(centre, width))
            if self._state.seconds < before:
                return

    def _around(self, centre: int, width: int) -> list[int]:
        """List the entities of the operators around one."""
        near = self._by_position[max(0, centre - width) : centre + width + 1]
        return sorted(entity for own in near for entity in own)

    def _plan(self, entities: Sequence[int]) -> None:
        """Find the best plan that fits among those that differ from the best one in some entities."""
        whole = self._state
        window = self._windows.of([entity for entity in entities if len(whole.kept[entity]) > 1], whole.best)
        state = _WindowState.of(whole, window)
        state.frontier_points = window.points(self.points)
        prices = state.prices(window.prices(self._second_per_byte))
        try_plans_below(state, Tables(state.limits), prices, state.kept, state.seconds)
        known = set(self.points)
        self.points += [point for n in state.frontier_points if (point := int(window.dearest[n])) not in known]


@dataclass
class _WindowState(State):
    """The state of a window of another one's best plan: seconds are those of the window's part of plans."""

    whole: State | None = None
    window: Window | None = None

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
            whole=whole,
            window=window,
        )

    def record(self, choices: tuple[int, ...]) -> Probe:
        """Cost a plan; if it fits and takes less time, keep it, and record the whole plan."""
        assert self.whole is not None and self.window is not None
        totals, before = self.problem.totals, self.whole.seconds
        probe = Probe(choices, totals.seconds(choices), totals.nbytes(choices))
        if probe.peak <= self.problem.budget and probe.seconds < self.seconds:
            self.whole.record(self.window.planned(choices))
            if self.whole.seconds < before:
                self.best, self.seconds = choices, self.whole.seconds - self.window.seconds_beside
        return probe

    def cutoff(self) -> float:
        """Return the seconds below which a plan is better than the best one by more than the whole problem's gap."""
        assert self.whole is not None and self.window is not None
        return self.whole.cutoff() - self.window.seconds_beside

    def done(self) -> bool:
        """Tell whether the gap of the whole problem is small enough."""
        assert self.whole is not None
        return self.whole.done()


def _priced(problem: Problem, second_per_byte: Sequence[float], position: Sequence[int]) -> list[int]:
    """List the positions of the operators at points that have a price, the dearest point first."""
    reads = sorted((edge.begin, position[edge.consumer]) for edge in problem.edges)
    points = sorted((m for m, price in enumerate(second_per_byte) if price), key=lambda m: (-second_per_byte[m], m))
    return [reads[min(bisect_left(reads, (m, 0)), len(reads) - 1)][1] for m in points] if reads else []


def _centres(cuts: Sequence[int], priced: Sequence[int]) -> list[int]:
    """Choose the centres of windows, so that each position is well within one.

    Where each layer has points with a price, they bind alike: the room at the dearest ones counts most.
    """
    centres: list[int] = []
    for position in (*cuts, *priced):
        if all(abs(position - other) > tuning.FILLED_WIDTHS[0] // 2 for other in centres):
            centres.append(position)
    return centres
