"""The master linear program of a column generation: fractions of the plans so far (Dantzig and Wolfe, Operations
Research 8(1), 1960).

A mixture of plans holds the mean of their bytes at each program point. The program minimises the mean of their seconds
plus the price of a *slack*: the bytes by which the worst point exceeds its limit. The duals of the points are the
prices for which the next plan is searched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from hidet_dist.highs import new_model
from hidet_dist.search.limits import Limits


@dataclass(frozen=True)
class Master:
    """The optimum of the master program.

    Attributes
    ----------
    objective: its value, in units of ``seconds``.
    fractions: the fraction of each plan.
    slack: the excess at the worst program point, in units of ``byte`` bytes.
    duals: the dual of each program point, 0 or more.
    """

    objective: float
    fractions: list[float]
    slack: float
    duals: list[float]


def solve_master(
    plans: Sequence[Sequence[int]],
    seconds: Sequence[float],
    slack_seconds: float,
    room: int,
    byte: float,
    limits: Limits,
) -> Master:
    """Find the fractions of the cheapest mixture whose mean holds at most ``room`` bytes at each point, plus the slack.

    Plan p holds ``plans[p][m]`` bytes at point m and takes ``seconds[p]``. Each unit of slack, ``byte`` bytes, costs
    ``slack_seconds``. Points at which every plan holds the same bytes, as in equal layers, share their dual.

    Raises
    ------
    OutOfTimeError
        When the time limit is reached.
    """
    count = len(plans[0])
    points: dict[tuple[int, ...], list[int]] = {}
    held = np.array(plans, dtype=np.int64)
    for point in np.flatnonzero(held.max(axis=0) > room).tolist():
        points.setdefault(tuple(held[:, point].tolist()), []).append(point)
    rows = _undominated(points, limits)
    model = new_model(threads=1)
    left = limits.seconds_left()
    if left is not None and limits.has_own_clock:
        model.cbSimplexInterrupt += lambda event: event.interrupt(limits.expired())
    elif left is not None:
        model.setOptionValue("time_limit", left)
    # The slack first, then the plans in the order of their numbers as text. The order of the columns decides which of
    # several optima is found, and so the plan: it stays as it is.
    order = sorted(range(len(plans)), key=str)
    column = {plan: 1 + n for n, plan in enumerate(order)}
    model.addCol(slack_seconds, 0.0, highspy.kHighsInf, 0, [], [])
    for plan in order:
        model.addCol(seconds[plan], 0.0, highspy.kHighsInf, 0, [], [])
    every = [column[plan] for plan in range(len(plans))]
    model.addRow(1.0, 1.0, len(every), every, [1.0] * len(every))
    for row in rows:
        terms = [(column[plan], (nbytes - room) / byte) for plan, nbytes in enumerate(row) if nbytes != room]
        indices, values = zip(*terms, (0, -1.0), strict=True)
        model.addRow(-highspy.kHighsInf, 0.0, len(indices), indices, values)
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        limits.check()
    solution = model.getSolution()
    duals = [0.0] * count
    for row, dual in zip(rows, list(solution.row_dual)[1:], strict=True):
        for point in points[row]:
            duals[point] = max(0.0, -dual) / len(points[row])
    values_ = list(solution.col_value)
    return Master(
        model.getObjectiveValue(), [values_[1 + order.index(p)] for p in range(len(plans))], values_[0], duals
    )


def _undominated(rows: Collection[tuple[int, ...]], limits: Limits) -> list[tuple[int, ...]]:
    """Select the rows that no other row reaches or exceeds for every plan; the others constrain nothing more."""
    needed: list[tuple[int, ...]] = []
    if not rows:
        return needed
    matrix = np.empty((len(rows), len(next(iter(rows)))), dtype=np.int64)
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        limits.check()
        if not (matrix[: len(needed)] >= row).all(axis=1).any():
            matrix[len(needed)] = row
            needed.append(row)
    return needed
