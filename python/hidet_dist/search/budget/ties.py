"""Ties between plans: of plans that cost the same, the one with fewer collectives is the better one.

On rings an all-reduce costs what a reduce-scatter and an all-gather do, so that such plans are common. Each collective
is therefore charged a trifle, far below the gap to which plans are told apart. The trifles of all collectives that a
plan could have come to a small part of its least cost; that much is taken off the bound again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hidet_dist.search import tuning
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Edge, Problem, Solution, each, evaluate, readers

_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Charged:
    """A problem in which collectives are charged.

    Attributes
    ----------
    problem: the problem to solve.
    most_seconds: what the charges of a plan come to at most.
    """

    original: Problem
    problem: Problem
    most_seconds: float

    def options(self, given: SolveOptions) -> SolveOptions:
        """The options for solving the problem, so that the original is solved as asked for."""
        if self.problem is self.original:
            return given
        report = given.on_incumbent

        def on_incumbent(choices: Sequence[int], seconds: float, bound: float, elapsed: float) -> None:
            assert report is not None
            seconds = evaluate(self.original, choices)
            report(choices, seconds, min(seconds, max(0.0, bound - self.most_seconds)), elapsed)

        gap = given.solver_gap * (1 - 2 * tuning.TIE_FRACTION)
        return replace(given, solver_gap=gap, on_incumbent=None if report is None else on_incumbent)

    def solution(self, solution: Solution) -> Solution:
        """A solution of the problem as one of the original."""
        if self.problem is self.original:
            return solution
        seconds = evaluate(self.original, solution.choices)
        bound = max(0.0, solution.seconds * (1 - solution.gap) - self.most_seconds)
        return replace(solution, seconds=seconds, gap=max(0.0, 1 - bound / seconds) if seconds else 0.0)


def charge_collectives(problem: Problem, gap: float) -> Charged:
    """Charge each collective of a problem that is to be solved to a relative gap; nothing where the gap is 0."""
    groups = readers(problem)
    tables_of = {id(edge.collectives): edge.collectives for edge in problem.edges if edge.collectives}
    most_of = {key: max(map(max, table)) for key, table in tables_of.items()}
    count = sum(each(max, problem.collectives)) + sum(
        len(group) * most_of[id(group[0].collectives)] for group in groups.values() if group[0].collectives
    )
    most = gap * tuning.TIE_FRACTION * sum(each(min, problem.cost))
    if not count or not most:
        return Charged(problem, problem, 0.0)
    trifle = most / count
    tables: dict[tuple[int, int], _Table] = {}

    def charged(edge: Edge) -> Edge:
        key = id(edge.convert), id(edge.collectives)
        if key not in tables:
            tables[key] = tuple(
                tuple(seconds + trifle * number for seconds, number in zip(line, counts, strict=True))
                for line, counts in zip(edge.convert, edge.collectives, strict=True)
            )
        ends = edge.tensor, edge.producer, edge.consumer, edge.produced, edge.consumed
        return Edge(*ends, tables[key], edge.begin, edge.end)

    cost = problem.cost
    if problem.collectives:
        # Equal entities share their list of costs, and go on sharing it.
        lists: dict[tuple[int, int], list[float]] = {}
        cost = []
        for costs, counts in zip(problem.cost, problem.collectives, strict=True):
            key = id(costs), id(counts)
            if key not in lists:
                lists[key] = [seconds + trifle * n for seconds, n in zip(costs, counts, strict=True)]
            cost.append(lists[key])
    edges = [charged(edge) if edge.collectives else edge for edge in problem.edges]
    return Charged(problem, replace(problem, cost=cost, edges=edges, collectives=()), most)
