"""Propagation: derive the whole plan from the pins, without a search.

Specs spread from the pins through the operators' rules, forward and backward, until nothing changes, as in GSPMD (Xu et
al., arXiv:2105.04663, section 3.5) and Shardy. The state of a tensor is its set of *placements*: pairs of a mesh axis
and the dim that it splits. Placements are only added:

1. Pins, and the specs given for graph inputs and outputs, are fixed from the start; of a pattern, its named axes.
2. Sweeps visit the operators in execution order and in reverse. Each operator takes the proven choice that agrees best
   with the placements of its inputs and outputs, and adds the choice's placements to them. An axis that already splits
   a dim of a tensor keeps that dim, and a fixed tensor gets no placements.
3. When a sweep adds no placement, every operator has its choice. A weight that is not pinned has the spec that its
   first reader requires. A graph input or output that is partly open has the spec nearest to its placements.

The best choice is the first of these criteria in which choices differ: it contradicts placements of the fewest bytes of
fixed tensors; then of the fewest bytes of other tensors (a small tensor is converted rather than a large one); it adds
the fewest placements, so that tensors without any stay replicated; it takes the least time; it is listed first. So a
pin takes precedence over derived placements, and the same pins give the same plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from hidet_dist.search.formulation.formulate import Formulation
from hidet_dist.search.limits import Limits
from hidet_dist.spec import TensorShardSpec
from hidet_dist.view import GraphView

Placements = tuple[tuple[int, int], ...]  # (mesh axis, dim), ascending


def placements(spec: TensorShardSpec) -> Placements:
    """List the pairs of a mesh axis and the dim that it splits."""
    per_dim = spec.mesh_axes_per_dim
    return tuple(sorted((axis, dim) for dim, axes in enumerate(per_dim) for axis in axes))


@dataclass
class _KnownPlacements:
    """The placements of a tensor so far; none may be added if ``fixed``, and only those of ``options``, if given."""

    placed: dict[int, int]
    nbytes: int
    fixed: bool = False
    options: Sequence[frozenset[tuple[int, int]]] | None = None

    def add(self, more: Placements) -> bool:
        """Add placements; return whether any was new."""
        if self.fixed:
            return False
        fresh = False
        for axis, dim in more:
            if axis not in self.placed:
                wider = {*self.placed.items(), (axis, dim)}
                if self.options is None or any(wider <= option for option in self.options):
                    self.placed[axis] = dim
                    fresh = True
        return fresh

    @property
    def key(self) -> tuple[Placements, bool]:
        return tuple(sorted(self.placed.items())), self.fixed


def propagate(view: GraphView, formulation: Formulation, limits: Limits) -> tuple[int, ...]:
    """Choose for every entity by propagation from the fixed specs of the formulation. Raises OutOfTimeError."""
    return _Propagation(view, formulation, limits).run()


class _Propagation:
    def __init__(self, view: GraphView, formulation: Formulation, limits: Limits):
        self.limits = limits
        self.view = view
        self.formulation = formulation
        self.known: dict[str, _KnownPlacements] = {}
        self.delivered: list[_KnownPlacements] = []  # placements of graph outputs as they are delivered
        for name in view.tensors:
            self.known[name] = _KnownPlacements({}, view.nbytes(name))
        stored = zip((*view.weights, *view.inputs), (*formulation.weight_specs, *formulation.inputs), strict=True)
        for name, specs in stored:
            self.known[name] = self._boundary(name, specs)
        for name, specs in zip(view.states, formulation.states, strict=True):
            self.known[name] = self._boundary(name, specs)
        for number, state in view.updates.items():  # one memory, one spec
            self.known[view.names[view.operators[number].outputs[0]]] = self.known[state]
        for name, specs in zip(view.outputs, formulation.outputs, strict=True):
            self.delivered.append(self._boundary(name, specs))
        self.placed: dict[int, list[tuple[Placements, ...]]] = {}
        self.best: dict[Hashable, int] = {}
        self.picks = [0] * len(view.operators)

    def _boundary(self, name: str, specs: Sequence[TensorShardSpec]) -> _KnownPlacements:
        """Collect the placements that all ``specs`` of a graph input, output or weight have in common."""
        options = [frozenset(placements(spec)) for spec in specs]
        common = options[0].intersection(*options)
        return _KnownPlacements(dict(sorted(common)), self.view.nbytes(name), len(specs) == 1, options)

    def run(self) -> tuple[int, ...]:
        count = len(self.view.operators)
        for known, name in zip(self.delivered, self.view.outputs, strict=True):
            self.known[name].add(known.key[0])
        # Pinned operators choose first.
        self._sweep(sorted(self.formulation.pins.operators))
        while self._sweep(range(count)) + self._sweep(range(count - 1, -1, -1)):
            pass
        weights = self._weights()
        ends = [
            self._nearest(specs, self.known[name])
            for name, specs in zip(self.view.inputs, self.formulation.inputs, strict=True)
        ]
        ends += [
            self._nearest(specs, known if known.fixed else self.known[name])
            for name, specs, known in zip(self.view.outputs, self.formulation.outputs, self.delivered, strict=True)
        ]
        return (*self.picks, *weights, *ends, *self._states())

    def _sweep(self, numbers: Iterable[int]) -> int:
        """Visit operators in order; return the number of tensors with new placements."""
        return sum(map(self._visit, numbers))

    def _visit(self, number: int) -> int:
        """Choose for an operator, and add placements to its tensors; return the number of tensors with new ones."""
        self.limits.check()
        names = self._names(number)
        choices = self.formulation.choices[number]
        if id(choices) not in self.placed:
            self.placed[id(choices)] = [
                tuple(map(placements, (*choice.spec.in_specs, *choice.spec.out_specs))) for choice in choices
            ]
        choice_placements = self.placed[id(choices)]
        known = [self.known[name] for name in names]
        key = (id(choices), tuple(k.key for k in known))
        if key not in self.best:
            self.best[key] = self._choose(number, choice_placements, known)
        pick = self.picks[number] = self.best[key]
        return sum(self.known[name].add(placed) for name, placed in zip(names, choice_placements[pick], strict=True))

    def _names(self, number: int) -> list[str]:
        op = self.view.operators[number]
        return [self.view.names[x] for x in (*op.inputs, *op.outputs)]

    def _choose(
        self, number: int, choice_placements: list[tuple[Placements, ...]], known: list[_KnownPlacements]
    ) -> int:
        costs = self.formulation.problem.cost[number]

        def rank(k: int) -> tuple[int, int, int, float, int]:
            fixed = other = extra = 0
            for placed, about in zip(choice_placements[k], known, strict=True):
                have = set(about.placed.items())
                if not have.issubset(placed):
                    if about.fixed:
                        fixed += about.nbytes
                    else:
                        other += about.nbytes
                extra += len(set(placed) - have)
            return fixed, other, extra, costs[k], k

        return min(range(len(choice_placements)), key=rank)

    def _weights(self) -> list[int]:
        required: dict[str, TensorShardSpec] = {}
        for name, use in self.view.uses():
            if use.operator is not None:
                choice = self.formulation.choices[use.operator][self.picks[use.operator]]
                required.setdefault(name, choice.spec.in_specs[use.position])
        picks = []
        for name, specs in zip(self.view.weights, self.formulation.weight_specs, strict=True):
            spec = required.get(name)
            picks.append(specs.index(spec) if spec in specs else self._nearest(specs, self.known[name]))
        return picks

    def _states(self) -> list[int]:
        """Choose the spec of each state: that of its updates, or else the nearest to its placements."""
        updated = {
            state: self.formulation.choices[number][self.picks[number]].spec.in_specs[0]
            for number, state in self.view.updates.items()
        }
        return [
            specs.index(updated[name]) if updated.get(name) in specs else self._nearest(specs, self.known[name])
            for name, specs in zip(self.view.states, self.formulation.states, strict=True)
        ]

    def _nearest(self, specs: Sequence[TensorShardSpec], known: _KnownPlacements) -> int:
        """Select the spec that drops the fewest of the placements, and then adds the fewest."""

        def rank(k: int) -> tuple[int, int, int]:
            placed, have = set(placements(specs[k])), set(known.placed.items())
            return len(have - placed), len(placed - have), k

        return min(range(len(specs)), key=rank)
