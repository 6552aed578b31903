"""Lower bounds of stages' seconds: for any run of units on one kind of sub-mesh, by the spec of the entering tensor.

Each unit has a table: the least seconds of its operators for each spec of the entering and of the leaving tensor. The
tables come from elimination over the unit alone (:func:`hidet_dist.search.elimination.eliminate.boundary_table`), and
equal units share them. The table of a run of units is the min-plus product of theirs.

Without a budget, the bound of a run is exact, except that it leaves out two costs: those of the cut itself (operators
that can no longer share a kernel), and conversions of tensors that several units read. A budget enters by prices on the
bytes of weights (Lagrangian relaxation; Everett, Operations Research 11(3), 1963): at any price, the least seconds plus
paid bytes, less the price of the whole budget, are a bound.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hidet_dist.cost.fusion import Fused, Fusions, Member
from hidet_dist.cost.model import PredictedCost
from hidet_dist.machine import Cluster
from hidet_dist.pipeline.constraints import GraphOptions
from hidet_dist.pipeline.units import Unit
from hidet_dist.rewriting import Subgraph
from hidet_dist.rules.rule import OfferedParts, RuleTable
from hidet_dist.search.elimination.eliminate import boundary_table
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.formulation.devices import limiting_devices
from hidet_dist.search.formulation.formulate import Formulation, formulate
from hidet_dist.search.formulation.parts import offered_parts
from hidet_dist.search.formulation.pins import Pin, Pins
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.problem import Edge, Problem
from hidet_dist.search.problem.prices import Prices
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.symbolic.planning import part_view, rule_table
from hidet_dist.view import GraphView

Table = npt.NDArray[np.float64]


class UnitCost(PredictedCost):
    """The costs of a unit's operators in the whole graph, where they may share kernels with other operators."""

    def __init__(self, cluster: Cluster, fused: Fusions):
        super().__init__(cluster)
        self._fused = fused

    def fused(self, view: GraphView) -> Fusions:
        """The fusions of the unit's operators in the whole graph."""
        return self._fused


def _renamed(entry: Fused | Member, names: Mapping[str, str]) -> Fused | Member:
    """Rename the tensors of the whole graph."""
    if isinstance(entry, Fused):
        return Fused(names[entry.tensor], entry.prologue)
    if entry.otherwise is None:
        return entry
    return replace(entry, otherwise=Fused(names[entry.otherwise.tensor], entry.otherwise.prologue))


@dataclass(frozen=True)
class _Formulated:
    """The formulation of a unit, and the names of tensors in it.

    ``entering`` and ``leaving`` are the unit's names of the tensors from the previous and to the next unit, or empty.
    ``free`` are the tensors whose conversions are not counted here, ``uncounted`` the entities whose memory is not, and
    ``undelivered`` the entities of outputs that are not outputs of the whole graph.
    """

    view: GraphView
    formulation: Formulation
    entering: str
    leaving: str
    free: frozenset[str]
    uncounted: frozenset[int]
    undelivered: frozenset[int]

    def produced(self) -> list[TensorShardSpec]:
        """List the specs in which the leaving tensor is computed."""
        number, output = self.maker()
        return list(dict.fromkeys(choice.spec.out_specs[output] for choice in self.formulation.choices[number]))

    def maker(self) -> tuple[int, int]:
        """The number of the operator that computes the leaving tensor, and that of its output."""
        number, _, output = self.leaving[1:].partition(".")
        return int(number), int(output)

    def required(self) -> list[TensorShardSpec]:
        """List the specs in which operators read the entering tensor."""
        layouts, names = self.formulation.layouts[self.entering], list(self.formulation.layouts)
        return list(
            dict.fromkeys(
                layouts[n]
                for edge in self.formulation.edges
                if names[edge.tensor] == self.entering
                for n in edge.consumed
            )
        )


def part_names(whole: GraphView, part: Subgraph, view: GraphView, operators: Sequence[int]) -> dict[str, str]:
    """Map a graph's names of tensors to those in the view of a part of the graph."""
    names = {whole.names[x]: view.names[y] for x, y in zip(part.inputs, part.graph.inputs or [], strict=True)}
    for place, number in enumerate(operators):
        op = whole.operators[number]
        for x in op.inputs:
            if x in view.names:  # a weight, which both share
                names[whole.names[x]] = view.names[x]
        for o, y in enumerate(op.outputs):
            names[whole.names[y]] = f"t{place}.{o}"
    return names


def offered_to_stages(
    views: Sequence[GraphView],
    mesh: DeviceMesh,
    unequal_parts: bool,
    rules: RuleTable | None,
    pins: Iterable[Pin] = (),
) -> OfferedParts:
    """Select the parts of all stages on a sub-mesh: with ``unequal_parts``, near-even ones of the graphs' heads.

    A stage is offered those of the heads of the whole graph, wherever it is cut, and the parts of all ``pins`` that are
    for as many coordinates as an axis of the sub-mesh has. Raises ConfigError for these without ``unequal_parts``.
    """
    given = {pair for pin in pins for pattern in pin.patterns for pair in pattern.parts}
    fitting = [
        (axis, parts)
        for axis, parts in sorted(given)
        if axis < mesh.ndim and len(parts) == mesh.shape[axis] and parts != mesh.shares_of(axis)
    ]
    return offered_parts([Pins(view, mesh, ()) for view in views], rules, unequal_parts, True, tuple(fitting))


def stage_rules(
    view: GraphView,
    mesh: DeviceMesh,
    unequal_parts: bool,
    rules: RuleTable | None = None,
    pins: Iterable[Pin] = (),
) -> RuleTable:
    """Make the table of rules of all stages on a sub-mesh, in the parts of :func:`offered_to_stages`.

    Rules and proofs are shared with the table ``rules``, for any mesh.
    """
    return rule_table(view, mesh, rules, offered_to_stages([view], mesh, unequal_parts, rules, pins))


class StageBounds:
    """Lower bounds of stages on one kind of sub-mesh.

    Parameters
    ----------
    view: the graph's view.
    units: its units.
    shared: the tensors that several units read.
    cluster: the sub-mesh as a machine.
    options: the user's pins and specs, by graph.
    mem_budget: bytes that a device may hold; None for the memory of each.
    unequal_parts: whether stages may split heads in near-even parts.
    rules: the sharding rules on any mesh; those on the sub-mesh share their proofs.

    Attributes
    ----------
    arrivals: for each unit, the specs in which the entering tensor may arrive at the sub-mesh; none for the first unit.
    rules: the sharding rules on the sub-mesh.
    seconds: ``[i, j, s]``, a bound of the stage of units i to j (excluded) whose entering tensor arrives in spec s.
    """

    def __init__(
        self,
        view: GraphView,
        units: Sequence[Unit],
        shared: frozenset[str],
        cluster: Cluster,
        options: GraphOptions,
        mem_budget: int | None,
        unequal_parts: bool,
        limits: Limits,
        rules: RuleTable | None = None,
    ):
        self.view, self.units, self.shared, self.cluster = view, units, shared, cluster
        self.options, self.mem_budget, self.limits = options, mem_budget, limits
        self.model = PredictedCost(cluster)
        self.rules = stage_rules(view, cluster.mesh, unequal_parts, rules, options.pins)
        # Bytes are those of the first of the devices that limit plans: what exceeds its budget fits nowhere.
        self.budget = limiting_devices(cluster, mem_budget, self.rules.offered.parts)[0].nbytes
        self._whole = self.model.fused(view)
        self._formulated: dict[Hashable, _Formulated] = {}
        self._known: dict[Hashable, Table] = {}
        self._problems: list[Problem] = []  # tables are known by the identity of their parts, which must stay alive
        self.arrivals = [self._states(n) for n in range(len(units))]
        self.weights = self._least_weights()
        width = max(len(states) or 1 for states in self.arrivals)
        count = len(units)
        self.seconds = np.full((count, count + 1, width), np.inf)
        for i in range(count):
            for j in range(i + 1, count + 1):
                if self.weights[j] - self.weights[i] <= self.budget:
                    self.seconds[i, j, : len(self.arrivals[i]) or 1] = 0.0
        self._prices: set[float] = set()
        self.price(0.0)

    def price(self, second_per_byte: float) -> bool:
        """Raise the bounds to those at a price of memory. Returns whether the price is a new one.

        Prices are rounded to three significant binary digits, so that similar prices are not tried again.
        """
        mantissa, exponent = math.frexp(second_per_byte)
        rounded = math.ldexp(round(mantissa * 8) / 8, exponent)
        if rounded in self._prices:
            return False
        self._prices.add(rounded)
        count = len(self.units)
        tables = [self._table(n, rounded) for n in range(count)]
        numbers: dict[int, int] = {}
        number_of = [numbers.setdefault(id(table), len(numbers)) for table in tables]
        lines: list[Table] = [np.zeros(1)]
        known: dict[tuple[int, int], int] = {}
        paid = rounded * self.budget
        for j in range(1, count + 1):
            self.limits.check()
            line = 0
            for i in range(j - 1, -1, -1):
                if not np.isfinite(self.seconds[i, j, 0]) and not np.isfinite(self.seconds[i, j]).any():
                    break  # a longer run has more weights
                # The last unit's leaving tensor may have any spec.
                key = (number_of[i], line) if i < j - 1 else (number_of[i], -1)
                if key not in known:
                    table = tables[i]
                    least = table.min(axis=1) if i == j - 1 else (table + lines[line][None, :]).min(axis=1)
                    known[key] = len(lines)
                    lines.append(least)
                line = known[key]
                bounds = self.seconds[i, j, : len(lines[line])]
                np.maximum(bounds, lines[line] - paid, out=bounds)
        return True

    def raise_to(self, runs: Sequence[tuple[int, int]], arrival: int, seconds: float) -> None:
        """Raise the bound of equal runs of units for one arriving spec to a bound that was proven of one of them."""
        for i, j in runs:
            self.seconds[i, j, arrival] = max(self.seconds[i, j, arrival], seconds)

    def _formulate(self, n: int) -> _Formulated:
        unit = self.units[n]
        if unit.key not in self._formulated:
            part, view = part_view(self.view, unit.operators, self.cluster.mesh)
            part_tensors = part_names(self.view, part, view, unit.operators)
            begin = unit.operators.start
            fused = {
                number - begin: _renamed(one, part_tensors)
                for number, one in self._whole.items()
                if number in unit.operators
            }
            given = self.options.of_part(self.view, part_tensors, view, unit.operators, self.cluster.mesh)
            options = SearchOptions(
                mem_budget=self.mem_budget, input_specs=given.input_specs, output_specs=given.output_specs
            )
            formulation = formulate(
                view,
                self.cluster,
                UnitCost(self.cluster, fused),
                options,
                given.pins,
                None,
                self.limits,
                self.rules,
                offered=self.rules.offered,
            )
            whole_inputs = set(self.view.inputs)
            free = {part_tensors[name] for name in part_tensors if name in self.shared and name != unit.entering}
            free |= {
                part_tensors[self.view.names[x]]
                for x in part.inputs
                if self.view.names[x] not in whole_inputs and self.view.names[x] != unit.entering
            }
            operators, weights = len(view.operators), len(view.weights)
            uncounted = {operators + w for w, name in enumerate(view.weights) if name in free}
            uncounted |= set(range(operators + weights, len(formulation.problem.cost)))
            outputs = operators + weights + len(view.inputs)
            delivered = set(self.view.outputs)
            undelivered = {outputs + y for y, x in enumerate(part.outputs) if self.view.names[x] not in delivered}
            self._formulated[unit.key] = _Formulated(
                view,
                formulation,
                part_tensors.get(unit.entering, ""),
                part_tensors.get(unit.leaving, ""),
                frozenset(free),
                frozenset(uncounted),
                frozenset(undelivered),
            )
        return self._formulated[unit.key]

    def _states(self, n: int) -> list[TensorShardSpec]:
        """List the specs of a unit's entering tensor: those in which it is computed or read, and replicated."""
        if not self.units[n].entering:
            return []
        made, read = self._formulate(n - 1).produced(), self._formulate(n).required()
        ndim = len(self.view.shape(self.units[n].entering))
        return list(dict.fromkeys((TensorShardSpec.replicated(ndim), *made, *read)))

    def _least_weights(self) -> list[int]:
        """Compute, for each unit, the least bytes of weights of all units before it on a device."""
        sums = [0]
        for n in range(len(self.units)):
            one = self._formulate(n)
            memory = one.formulation.of_first_device.memory
            least = sum(min(memory[e]) for e in one.formulation.weights if e not in one.uncounted)
            sums.append(sums[-1] + least)
        return sums

    def _table(self, n: int, second_per_byte: float) -> Table:
        """Compute a unit's table: seconds plus paid bytes, by the specs of the entering and the leaving tensor."""
        behind = self.arrivals[n + 1] if n + 1 < len(self.units) else []
        key = self.units[n].key, tuple(self.arrivals[n]), tuple(behind), second_per_byte
        if key not in self._known:
            problem, ends, impossible = self._problem(self._formulate(n), self.arrivals[n], behind, second_per_byte)
            self._problems.append(problem)
            prices = Prices([second_per_byte])
            every = [list(range(len(costs))) for costs in problem.cost]
            kept = Presolve(problem).reduce(every, prices, self.limits, fixed=ends).kept
            table = boundary_table(EliminationInstance(problem, kept, Tables(self.limits), prices), ends)
            table = np.where(table < impossible, table, np.inf)
            if not self.arrivals[n]:
                table = table[None]
            if not behind:
                table = table[..., None]
            self._known[key] = table
        return self._known[key]

    def _problem(
        self, one: _Formulated, arrivals: Sequence[TensorShardSpec], behind: Sequence[TensorShardSpec], price: float
    ) -> tuple[Problem, list[int], float]:
        """Make the problem of a unit, with an additional entity for the entering and for the leaving tensor.

        Returns also the numbers of these entities, and a cost that only impossible assignments reach.
        """
        problem, names = one.formulation.of_first_device, list(one.formulation.layouts)
        cost = [list(values) for values in problem.cost]
        memory = [[0] * len(values) if e in one.uncounted else list(values) for e, values in enumerate(problem.memory)]
        tensor = len(names)
        ends: list[int] = []
        edges: list[Edge] = []
        zeros: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {}
        entering = len(cost)
        convert: tuple[tuple[float, ...], ...] = ()
        place: dict[TensorShardSpec, int] = {}
        if arrivals:
            ends.append(entering)
            cost.append([0.0] * len(arrivals))
            memory.append([0] * len(arrivals))
            place = {spec: s for s, spec in enumerate(arrivals)}
            shape, dtype = one.view.pieces(one.entering)
            convert = self.model.conversions(shape, dtype, arrivals)
        for edge in problem.edges:
            name = names[edge.tensor]
            if edge.consumer in one.undelivered:
                continue
            if arrivals and name == one.entering:
                layouts = one.formulation.layouts[name]
                consumed = tuple(place[layouts[d]] for d in edge.consumed)
                numbers = tuple(range(len(arrivals)))
                edges.append(Edge(tensor, entering, edge.consumer, numbers, consumed, convert))
            elif name in one.free:
                size = len(edge.convert), len(edge.convert[0])
                nothing = zeros.setdefault(size, ((0.0,) * size[1],) * size[0])
                edges.append(Edge(edge.tensor, edge.producer, edge.consumer, edge.produced, edge.consumed, nothing))
            else:
                edges.append(edge)
        impossible = math.inf
        if behind:
            number, output = one.maker()
            leaving = len(cost)
            ends.append(leaving)
            cost.append([0.0] * len(behind))
            memory.append([0] * len(behind))
            most = sum(map(max, cost)) + sum(max(map(max, edge.convert)) for edge in edges)
            most += price * sum(map(max, memory))
            impossible = 2 * most + 1e-6
            specs = {spec: s for s, spec in enumerate(behind)}
            produced = tuple(specs[choice.spec.out_specs[output]] for choice in one.formulation.choices[number])
            barred = tuple(tuple(0.0 if s == d else impossible for d in range(len(behind))) for s in range(len(behind)))
            edges.append(Edge(tensor + 1, number, leaving, produced, tuple(range(len(behind))), barred))
        return Problem(cost, memory, problem.budget, edges), ends, impossible
