"""Units of a graph: the runs of operators between the points where it may be cut.

A graph in execution order may be cut at a point that one computed tensor crosses: between the layers of a deep model,
or anywhere in a chain. Tensors with a very long live interval (a mask that every layer reads, keys that are returned at
the end) are not counted, nor are graph inputs and weights, because every stage has those that it reads.

Units of equal structure have equal *keys*, so that results for one hold for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from hidet_dist.errors import SpecError
from hidet_dist.spec.formula import check_formula
from hidet_dist.view import GraphView

LONG_LIVED_FRACTION = 0.25  # of the operators: tensors alive for longer do not prevent a cut
LONG_LIVED_LEAST = 64  # operators that a tensor must be alive for, whatever the fraction


@dataclass(frozen=True)
class Unit:
    """A run of operators between two consecutive points where the graph may be cut.

    Attributes
    ----------
    operators: the operators' numbers in the graph.
    entering, leaving: the tensors from the previous unit and to the next one; empty at the ends of the graph.
    key: equal for units of equal structure.
    """

    operators: range
    entering: str
    leaving: str
    key: Hashable


@dataclass(frozen=True)
class Crossings:
    """The live intervals of computed tensors.

    Attributes
    ----------
    begin, end: the operator that computes each tensor, and the last operator that reads it.
    """

    begin: dict[str, int]
    end: dict[str, int]

    @classmethod
    def of(cls, view: GraphView) -> Crossings:
        """Find the live intervals of a view's computed tensors."""
        begin = {view.names[y]: number for number, op in enumerate(view.operators) for y in op.outputs}
        end: dict[str, int] = {}
        for name, use in view.uses():
            if name in begin and use.operator is not None:
                end[name] = max(use.operator, end.get(name, -1))
        return cls(begin, end)

    def at(self, place: int) -> list[str]:
        """List the tensors that are computed before operator ``place`` and read by it or a later operator."""
        return [name for name, last in self.end.items() if self.begin[name] < place <= last]


def find_units(view: GraphView) -> list[Unit]:
    """Divide a whole graph into units, in order."""
    crossings = Crossings.of(view)
    count = len(view.operators)
    long = max(LONG_LIVED_LEAST, LONG_LIVED_FRACTION * count)
    alive: list[list[str]] = [[] for _ in range(count + 1)]
    for name, last in crossings.end.items():
        for place in range(crossings.begin[name] + 1, last + 1):
            alive[place].append(name)
    cuts: list[tuple[int, str]] = []
    barred = _barred(view)
    for place in range(1, count):
        if place in barred:
            continue
        carrying = alive[place]
        if len(carrying) > 1:
            carrying = [name for name in carrying if crossings.end[name] - crossings.begin[name] <= long]
        # Between two cuts at the same tensor, there would be a unit whose results no later unit reads.
        if len(carrying) == 1 and (not cuts or cuts[-1][1] != carrying[0]):
            cuts.append((place, carrying[0]))
    places = [0, *(place for place, _ in cuts), count]
    carried = ["", *(name for _, name in cuts), ""]
    readers = _units_that_read(view, places)
    return [
        Unit(
            range(places[n], places[n + 1]),
            carried[n],
            carried[n + 1],
            _key(view, range(places[n], places[n + 1]), carried[n], carried[n + 1], readers),
        )
        for n in range(len(places) - 1)
    ]


def _barred(view: GraphView) -> frozenset[int]:
    """Find the places of cuts behind which a stage would not know the size of a symbolic dim, or before which.

    A stage knows sizes from the graph's inputs that it or an earlier stage reads, and computes from them the shapes of
    tensors that cross (:mod:`hidet_dist.spec.formula`).
    """
    if not view.symbols:
        return frozenset()
    barred: set[int] = set()
    read: dict[str, int] = {}  # the first operator that reads an input of the graph with the symbol
    found: dict[str, int] = {}  # the first operator with a tensor of the symbol
    inputs = set(view.inputs)
    crossings = Crossings.of(view)
    for number, op in enumerate(view.operators):
        for x in (*op.inputs, *op.outputs):
            name = view.names[x]
            for extent in view.written(name):
                if isinstance(extent, int):
                    continue
                try:
                    symbols = check_formula(extent)
                except SpecError:  # it cannot cross
                    symbols = frozenset()
                    if name in crossings.begin:
                        barred.update(range(crossings.begin[name] + 1, crossings.end.get(name, -1) + 1))
                for symbol in symbols:
                    found.setdefault(symbol, number)
                    if name in inputs:
                        read.setdefault(symbol, number)
    for symbol, number in found.items():
        barred.update(range(number + 1, read.get(symbol, len(view.operators)) + 1))
    return frozenset(barred)


def _units_that_read(view: GraphView, places: list[int]) -> dict[str, int]:
    """Count the units that read each tensor."""
    unit_of = [n for n, (begin, end) in enumerate(itertools.pairwise(places)) for _ in range(begin, end)]
    read: dict[str, set[int]] = {}
    for name, use in view.uses():
        if use.operator is not None:
            read.setdefault(name, set()).add(unit_of[use.operator])
    return {name: len(units) for name, units in read.items()}


def _key(view: GraphView, operators: range, entering: str, leaving: str, readers: dict[str, int]) -> Hashable:
    """Describe everything that a unit's costs depend on: its operators, their edges, and the tensors that it shares.

    Tensors that other units also read are named: two units that share one mask differ from two with a mask each.
    """
    inside: dict[str, str] = {}
    outputs = set(view.outputs)
    weights = set(view.weights)
    lines: list[Hashable] = []
    for number in operators:
        op = view.operators[number]
        read = []
        for x in op.inputs:
            name = view.names[x]
            if name not in inside:
                kind = "weight" if name in weights else "input" if name in view.inputs else "computed"
                label = name if name != entering and readers[name] > 1 else str(len(inside))
                inside[name] = f"{kind} {'entering' if name == entering else label}"
            read.append(inside[name])
        made = []
        for o, y in enumerate(op.outputs):
            name = view.names[y]
            inside[name] = f"{number - operators.start}.{o}"
            made.append((name in outputs, name == leaving))
        lines.append((view.signature(number), tuple(read), tuple(made)))
    return tuple(lines)
