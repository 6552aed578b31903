"""The memory that changes in the course of a run, as intervals of *moments* that choices and conversions fill.

What is held at a moment is a sum of terms of one choice each (:class:`Hold`) and of terms of one tensor each, which
depend on the spec it is made in and on those its readers want (:class:`Converted`): the same structure that the cost
has, so that a price on the bytes of a moment can be added to the tables of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hidet_dist.search.ilp import Edge, Problem


@dataclass(frozen=True)
class Hold:
    """``nbytes[k]`` bytes from moment ``begin`` to moment ``end`` (included) if the entity takes its choice k."""

    entity: int
    begin: int
    end: int
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Converted:
    """What converting one tensor takes, by the numbers of its specs.

    ``layout[s]`` is equal for numbers that stand for the same spec, between which nothing is converted. A tensor wanted
    as d holds ``nbytes[d]`` from the first reader that wants it so to the last; making it from s takes another
    ``working(s, d)`` bytes at the first reader.
    """

    layout: tuple[int, ...]
    nbytes: tuple[int, ...]
    working: Callable[[int, int], int]


@dataclass(frozen=True)
class Activations:
    """What is held at each of ``moments`` moments beside the memory that is held throughout."""

    moments: int
    holds: tuple[Hold, ...]
    tensors: Mapping[int, Converted]


NONE = Activations(1, (), {})


def held(problem: Problem, readers: Mapping[int, Iterable[Edge]], choices: Sequence[int]) -> list[int]:
    """Bytes held at each moment under given choices; ``readers`` are the edges of each tensor."""
    activations = problem.activations
    change = [0] * (activations.moments + 1)
    change[0] = sum(own[k] for own, k in zip(problem.memory, choices, strict=True))
    for hold in activations.holds:
        nbytes = hold.nbytes[choices[hold.entity]]
        change[hold.begin] += nbytes
        change[hold.end + 1] -= nbytes
    for tensor, group in readers.items():
        memory = activations.tensors.get(tensor)
        if memory is None:
            continue
        layout = memory.layout
        spans: dict[int, tuple[int, int]] = {}
        source = -1
        for edge in group:
            source, wish = edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]
            if layout[source] != layout[wish]:
                begin, end = spans.get(wish, (edge.begin, edge.end))
                spans[wish] = min(begin, edge.begin), max(end, edge.end)
        for wish, (begin, end) in spans.items():
            change[begin] += memory.nbytes[wish]
            change[end + 1] -= memory.nbytes[wish]
            working = memory.working(source, wish)
            change[begin] += working
            change[begin + 1] -= working
    return list(accumulate(change))[:-1]
