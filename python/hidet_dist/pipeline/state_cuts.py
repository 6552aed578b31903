"""Given stages for graphs that keep states: where to cut, so that each state is of one stage.

A layer of a language model has states of its own, its pools of keys and values. Between the states of two layers, the
graph is cut where the fewest bytes cross: what one layer hands to the next. Which of these cuts are taken is decided by
the bytes of weights that a rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import Tensor

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import NormalGraph
from hidet_dist.spec.symbols import SymbolPlan
from hidet_dist.view import GraphView
from hidet_dist.weights.states import is_state, updated_state
from hidet_dist.weights.storage import storage_of


def stages_between_states(
    graph: NormalGraph, symbols: Sequence[SymbolPlan], ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """Cut a graph into stages of consecutive operators, on so many ranks each.

    Of the places between two states, those where the fewest bytes cross are candidates. Of these, those are taken for
    which the rank with the most bytes of weights holds the fewest, if the weights of a stage are split evenly among its
    ranks. A weight that several stages read counts in each.

    Parameters
    ----------
    graph: NormalGraph
        The graph.
    symbols: sequence of SymbolPlan
        The sizes of its symbolic dims, for the bytes that cross.
    ranks: sequence of int
        The number of ranks of each stage.

    Returns
    -------
    The stages as ``optimization_config['stages']`` has them; see :class:`hidet_dist.pipeline.given.GivenStage`.

    Raises
    ------
    ConfigError
        When there are fewer places between states than the stages need.
    """
    view = GraphView(graph, symbols)
    crossing = _crossing_bytes(view)
    places: list[int] = []
    for run in _between_states(view):
        least = min(crossing[place] for place in run)
        places += [place for place in run if crossing[place] == least]
    if len(places) < len(ranks) - 1:
        raise ConfigError(
            f"The graph keeps {len(view.states)} states, and can be cut between them in {len(places)} places: "
            f"{len(ranks)} stages need {len(ranks) - 1}. Ask for fewer stages."
        )
    ends = [0, *places, len(view.operators)]
    chosen = [ends[number] for number in _balanced(_weight_bytes(view, ends), ranks)]
    return [
        {"operators": [begin, end], "mesh_shape": [count]}
        for (begin, end), count in zip(itertools.pairwise(chosen), ranks, strict=True)
    ]


def _between_states(view: GraphView) -> list[range]:
    """List runs of places at which no state has readers on both sides; place p is in front of operator p."""
    readers: dict[Tensor, list[int]] = {}
    for number, op in enumerate(view.operators):
        for x in op.inputs:
            state = x if is_state(x) else updated_state(x)
            if state is not None:
                readers.setdefault(state, []).append(number)
    crossed = {place for numbers in readers.values() for place in range(numbers[0] + 1, numbers[-1] + 1)}
    free = [place for place in range(1, len(view.operators)) if place not in crossed]
    runs: list[range] = []
    for place in free:
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return runs


def _crossing_bytes(view: GraphView) -> list[int]:
    """Count, for each place, the bytes that operators in front of it compute and others behind it read."""
    made = {y: number for number, op in enumerate(view.operators) for y in op.outputs}
    last = dict(made)
    for number, op in enumerate(view.operators):
        last.update((x, number) for x in op.inputs if x in made)
    changes = [0] * (len(view.operators) + 1)
    for y, number in made.items():
        if updated_state(y) is None:  # states do not cross
            nbytes = view.nbytes(view.names[y])
            changes[number + 1] += nbytes
            changes[last[y] + 1] -= nbytes
    return list(itertools.accumulate(changes))


def _weight_bytes(view: GraphView, ends: Sequence[int]) -> Mapping[tuple[int, int], int]:
    """Count the bytes of weights that parts of a graph read together, by the first part and the one behind the last."""

    def nbytes(name: str) -> int:
        storage = storage_of(view.tensors[name])
        return view.nbytes(name) if storage is None else storage.nbytes(view.shape(name))

    sizes = {view.tensors[name]: nbytes(name) for name in view.weights}
    read = [
        {x for op in view.operators[begin:end] for x in op.inputs if x in sizes}
        for begin, end in itertools.pairwise(ends)
    ]
    result = {}
    for first in range(len(read)):
        seen: set[Tensor] = set()
        total = 0
        for last in range(first, len(read)):
            total += sum(sizes[x] for x in read[last] - seen)
            seen |= read[last]
            result[first, last + 1] = total
    return result


def _balanced(nbytes: Mapping[tuple[int, int], int], ranks: Sequence[int]) -> list[int]:
    """Choose the parts with which stages begin, and the end of the last stage: the fullest rank holds the least."""
    count = max(end for _, end in nbytes)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # by the end of the stages so far
    for number, of_stage in enumerate(ranks, 1):
        left = len(ranks) - number
        ends = range(number, count - left + 1) if left else [count]
        best = {
            end: min(
                (max(most, nbytes[begin, end] / of_stage), [*begins, end])
                for begin, (most, begins) in best.items()
                if begin < end
            )
            for end in ends
        }
    return best[count][1]
