"""Coordinate descent: make a known plan better by one entity's choice at a time.

Solvers stop at a gap, and relax tensors that very many operators read. So a single choice may still be worth changing:
such as that of a table of cosines that is stored in shards and gathered for all layers, though the budget has room for
it in whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem.problem import Edge, LiveInterval, Problem, add_converted


def descend(
    problem: Problem, groups: Mapping[int, Sequence[Edge]], choices: Sequence[int], limits: Limits
) -> tuple[int, ...]:
    """Change the choices of single entities as long as the plan costs less and fits the budget.

    Only entities next to a conversion are looked at, and those next to what was changed. ``groups`` are the readers of
    each tensor. The descent ends when the time limit is reached.
    """
    return _Descent(problem, groups, choices).run(limits)


# A tensor that an entity makes: its conversions, the spec of each choice, and the specs that its readers require.
_Made = tuple[Sequence[Sequence[float]], Sequence[int], list[int]]
# A tensor that it reads: its conversions from the spec that is made, the specs of the entity's choices for each of its
# edges, and those that other readers require.
_Read = tuple[Sequence[float], list[tuple[int, ...]], list[int]]


class Neighbourhood:
    """A plan, and the costs of the plans that differ from it in one entity's choice.

    Attributes
    ----------
    choices: the plan's choices.
    made, read: the tensors that each entity makes, and those that it reads.
    """

    def __init__(self, problem: Problem, groups: Mapping[int, Sequence[Edge]], choices: Sequence[int]):
        self.problem, self.groups, self.choices = problem, groups, list(choices)
        self._known: dict[Hashable, list[float]] = {}
        self.made: list[list[int]] = [[] for _ in choices]
        self.read: list[list[int]] = [[] for _ in choices]
        self._edges: dict[tuple[int, int], list[Edge]] = {}  # by reader and tensor
        for tensor, group in groups.items():
            self.made[group[0].producer].append(tensor)
            for edge in group:
                self._edges.setdefault((edge.consumer, tensor), []).append(edge)
            for consumer in dict.fromkeys(edge.consumer for edge in group):
                self.read[consumer].append(tensor)
        # How many readers require each spec: a table of cosines has two in each layer.
        self._required = {
            tensor: Counter(edge.consumed[choices[edge.consumer]] for edge in group) for tensor, group in groups.items()
        }

    def take(self, entity: int, choice: int) -> None:
        """Change the choice of an entity."""
        before, self.choices[entity] = self.choices[entity], choice
        for tensor in self.read[entity]:
            required = self._required[tensor]
            for edge in self._edges[entity, tensor]:
                required[edge.consumed[choice]] += 1
                required[edge.consumed[before]] -= 1
                if not required[edge.consumed[before]]:
                    del required[edge.consumed[before]]

    def seconds(self, entity: int) -> Sequence[float]:
        """The part of the cost that depends on an entity, in seconds, by its choice."""
        choices, groups, costs = self.choices, self.groups, self.problem.cost[entity]
        made: list[_Made] = []
        for tensor in self.made[entity]:
            group = groups[tensor]
            made.append((group[0].convert, group[0].produced, sorted(self._required[tensor])))
        read: list[_Read] = []
        for tensor in self.read[entity]:
            edges, first = self._edges[entity, tensor], groups[tensor][0]
            own = Counter(edge.consumed[choices[entity]] for edge in edges)
            others = sorted(spec for spec, count in self._required[tensor].items() if count > own[spec])
            line = first.convert[first.produced[choices[first.producer]]]
            read.append((line, [edge.consumed for edge in edges], others))
        # Equal entities of equal layers share their tables, and so their costs.
        key = (
            id(costs),
            tuple((id(convert), id(produced), *required) for convert, produced, required in made),
            tuple((id(line), *map(id, specs), -1, *others) for line, specs, others in read),
        )
        if key not in self._known:
            self._known[key] = _summed(costs, made, read)
        return self._known[key]


def _summed(costs: Sequence[float], made: Sequence[_Made], read: Sequence[_Read]) -> list[float]:
    """Add the conversions of what an entity makes and reads to its costs, by its choice."""
    seconds = list(costs)
    for convert, produced, required in made:
        paid = [sum(line[d] for d in required) for line in convert]
        for k, source in enumerate(produced):
            seconds[k] += paid[source]
    for line, specs, others in read:
        if len(specs) == 1:
            paid = [*line]
            for d in others:
                paid[d] = 0.0
            for k, d in enumerate(specs[0]):
                seconds[k] += paid[d]
        else:
            for k in range(len(seconds)):
                seconds[k] += sum(line[d] for d in {consumed[k] for consumed in specs}.difference(others))
    return seconds


class _Descent(Neighbourhood):
    def __init__(self, problem: Problem, groups: Mapping[int, Sequence[Edge]], choices: Sequence[int]):
        super().__init__(problem, groups, choices)
        self.intervals: list[list[LiveInterval]] = [[] for _ in choices]
        for interval in problem.activations.intervals:
            self.intervals[interval.entity].append(interval)
        self.held = np.array(problem.totals.nbytes(choices), dtype=np.int64)

    def run(self, limits: Limits) -> tuple[int, ...]:
        first = dict.fromkeys(e for tensor in self.groups if self._paid(tensor) for e in self._around(tensor))
        waiting, known = deque(first), set(first)
        for _ in range(tuning.DESCENT_STEPS):
            if not waiting or limits.expired():
                break
            entity = waiting.popleft()
            known.discard(entity)
            if not self._improve(entity):
                continue
            touched = dict.fromkeys(e for t in (*self.made[entity], *self.read[entity]) for e in self._around(t))
            more = [e for e in touched if e != entity and e not in known]
            waiting.extend(more)
            known.update(more)
        return tuple(self.choices)

    def _around(self, tensor: int) -> list[int]:
        """The producer of a tensor and its readers."""
        group = self.groups[tensor]
        return [group[0].producer, *dict.fromkeys(edge.consumer for edge in group)]

    def _paid(self, tensor: int) -> bool:
        """Tell whether a tensor is converted at a cost."""
        return any(
            edge.convert[edge.produced[self.choices[edge.producer]]][edge.consumed[self.choices[edge.consumer]]]
            for edge in self.groups[tensor]
        )

    def _improve(self, entity: int) -> bool:
        """Give an entity the cheapest choice with which the plan fits; whether that is another one than before."""
        before = self.choices[entity]
        count = len(self.problem.cost[entity])
        if count == 1:
            return False
        seconds = self.seconds(entity)
        better = [k for k in range(count) if seconds[k] < seconds[before] * (1 - tuning.ROUNDING)]
        if not better:
            return False
        others = self.held - self._bytes(entity)
        for k in sorted(better, key=lambda k: (seconds[k], k)):
            self.take(entity, k)
            held = others + self._bytes(entity)
            if held.max() <= self.problem.budget:
                self.held = held
                return True
        self.take(entity, before)
        return False

    def _bytes(self, entity: int) -> npt.NDArray[np.int64]:
        """The bytes that depend on an entity's choice, at each program point."""
        activations, pick = self.problem.activations, self.choices[entity]
        change = np.zeros(activations.points + 1, dtype=np.int64)
        change[0] = self.problem.memory[entity][pick]
        for interval in self.intervals[entity]:
            change[interval.begin] += interval.nbytes[pick]
            change[interval.end + 1] -= interval.nbytes[pick]
        for tensor in dict.fromkeys((*self.made[entity], *self.read[entity])):
            memory = activations.tensors.get(tensor)
            if memory is not None:
                add_converted(change, memory, self.groups[tensor], self.choices)
        return np.cumsum(change)[:-1]
