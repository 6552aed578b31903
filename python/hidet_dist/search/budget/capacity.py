"""Choices and conversions that no plan within a budget can contain, found by adding up the least bytes around each.

At a program point, every plan holds at least the least bytes of each entity there. What the budget leaves beyond that
sum is the *room* of the point. A choice that holds more above the least than the room is in no plan that fits; neither
is a conversion that does so together with the least that its producer, its reader and the reader's other inputs hold
beside it. Each removal raises the least of an entity, so removals are repeated until nothing changes (constraint
propagation; Mackworth, Artificial Intelligence 8, 1977).

Bytes held during the whole run, those of weights above all, are *resident*; all others are transient. If the resident
bytes of a plan are known to be at least a number, the transient ones fit what that leaves of the budget, at every
point. A range of resident bytes thus restricts plans at all points at once, which prices on points cannot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hidet_dist.native.search.capacity import CapacityInterval, Input, Lists, Mask, NativeCapacity, NativeFitting
from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fitting:
    """What is left of a problem: the choices of each entity, and the problem without the forbidden conversions.

    Attributes
    ----------
    kept: the choices of each entity, at least one.
    problem: the problem, in which forbidden conversions cost more than a given limit.
    resident: the least and the most resident bytes of plans that fit.
    """

    kept: list[list[int]]
    problem: Problem
    resident: tuple[int, int]


class Capacity:
    """The bytes of one problem's choices and conversions, by program point."""

    def __init__(self, problem: Problem):
        self.problem = problem
        activations, nbytes, specs = problem.activations, Lists(), Lists()
        intervals: list[list[CapacityInterval]] = [[] for _ in problem.cost]
        for live in activations.intervals:
            intervals[live.entity].append(CapacityInterval(live.begin, live.end, nbytes.begin(live.nbytes)))
        inputs: list[list[tuple[Edge, Input]]] = [[] for _ in problem.cost]
        known: dict[Hashable, tuple[list[int], list[int] | None]] = {}
        for tensor, group in problem.groups.items():
            memory = activations.tensors.get(tensor)
            first = min(edge.begin for edge in group)
            alone = sum(edge.begin == first for edge in group) == 1
            for edge in group:
                held = working = None
                if memory is not None:
                    # Otherwise another reader may pay for the conversion's intermediate values.
                    pays = alone and edge.begin == first
                    key = id(memory), id(edge.convert), id(edge.produced), id(edge.consumed), pays
                    if key not in known:
                        known[key] = _conversion_bytes(memory, edge, pays)
                    held, working = known[key]
                one = Input(
                    *(edge.producer, edge.begin, edge.end, specs.begin(edge.produced), specs.begin(edge.consumed)),
                    *(len(edge.convert), len(edge.convert[0]), nbytes.begin(held), nbytes.begin(working)),
                )
                inputs[edge.consumer].append((edge, one))
        numbered = [edge for own in inputs for edge, _ in own]
        self._number = {id(edge): number for number, edge in enumerate(numbered)}
        self._native = NativeCapacity(
            activations.points,
            [len(costs) for costs in problem.cost],
            [nbytes.begin(resident) for resident in problem.memory],
            intervals,
            [[one for _, one in own] for own in inputs],
            nbytes,
            specs,
        )

    def fitting(
        self,
        kept: Sequence[Sequence[int]],
        budget: int,
        forbidden_cost: float,
        resident: tuple[int, int] | None = None,
        limits: Limits | None = None,
    ) -> Fitting | None:
        """Remove what no plan within the budget contains, of plans whose resident bytes are within a range.

        Forbidden conversions get the cost ``forbidden_cost``. None when no plan fits.

        Raises
        ------
        OutOfTimeError
            When the time limit is reached.
        """
        check = (Limits() if limits is None else limits).check
        left = self._native.fitting(kept, budget, resident, tuning.CAPACITY_ROUNDS, check)
        if left is None:
            return None
        return Fitting(left.kept, self._restricted(left, budget, forbidden_cost), left.resident)

    def _restricted(self, left: NativeFitting, budget: int, forbidden_cost: float) -> Problem:
        """Make the problem in which conversions that no reader of a tensor allows cost ``forbidden_cost``."""
        problem = self.problem
        tables: dict[Hashable, tuple[tuple[float, ...], ...]] = {}
        changed: dict[int, tuple[tuple[float, ...], ...]] = {}
        for tensor, group in problem.groups.items():
            masks: list[Mask | None] = [left.allowed(self._number[id(edge)]) for edge in group]
            if all(mask is None for mask in masks):
                continue
            convert = group[0].convert
            allowed = np.zeros((len(convert), len(convert[0])), dtype=bool)
            possible = allowed.copy()
            for edge, mask in zip(group, masks, strict=True):
                made = sorted({edge.produced[k] for k in left.kept[edge.producer]})
                required = sorted({edge.consumed[k] for k in left.kept[edge.consumer]})
                at = np.ix_(made, required)
                possible[at] = True
                allowed[at] |= True if mask is None else mask[at]
            forbidden = possible & ~allowed
            if not forbidden.any():
                continue
            key = id(convert), forbidden.tobytes()
            if key not in tables:
                costs = np.where(forbidden, forbidden_cost, np.array(convert))
                tables[key] = tuple(map(tuple, costs.tolist()))
            changed[tensor] = tables[key]
        edges = [
            replace(edge, convert=changed[edge.tensor]) if edge.tensor in changed else edge for edge in problem.edges
        ]
        return replace(problem, budget=budget, edges=edges)


def _conversion_bytes(memory: ConvertedTensor, edge: Edge, pays: bool) -> tuple[list[int], list[int] | None]:
    """List the bytes that an edge's conversions hold, by the two specs, and those while made if it ``pays``."""
    at = np.unique(edge.produced)[:, None], np.unique(edge.consumed)

    def listed(nbytes: npt.NDArray[np.float64]) -> list[int]:
        table: _Bytes = np.zeros((len(edge.convert), len(edge.convert[0])), dtype=np.int64)
        table[at] = nbytes
        values: list[int] = table.ravel().tolist()
        return values

    return listed(memory.held[at]), listed(memory.worked[at]) if pays else None
