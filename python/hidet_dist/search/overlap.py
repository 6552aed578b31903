"""Plans for machines that overlap communication with computation.

The search minimises a sum: one operator or collective after the other. A plan's hidden communication is known only once
the plan is scheduled (:mod:`hidet_dist.overlap`), and the makespan is no sum. So the problem is solved again with
hidden communication left out of the cost. The best plan of each solution is scheduled, and so are those next to it that
the search saw. The plan of least makespan wins.

Weights, and tensors computed from weights alone, can be communicated at any time. In the first round their
communication is free as far as the computation could hide it if all weights were split. In later rounds it costs the
fraction that the last plan did not hide, and other communication that the last plan hid is free, until plans repeat.
Large problems are solved once more only, for the prices of memory of the first solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.planned import Overlapped, PlannedTasks, overlapped
from hidet_dist.reshard import conversion_communication
from hidet_dist.reshard.cost import itemsize
from hidet_dist.search import tuning
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.elimination.eliminate import eliminate
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.formulation.formulate import Formulation
from hidet_dist.search.formulation.solution import StageCosts, stage_of
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import ConvertedTensor, Problem, Solution, held_bytes, readers
from hidet_dist.search.problem.prices import Prices
from hidet_dist.spec import StagePlan
from hidet_dist.view import GraphView

_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Candidate:
    """A plan and its schedule."""

    choices: tuple[int, ...]
    stage: StagePlan
    overlap: Overlapped

    @property
    def seconds(self) -> float:
        """The makespan, in seconds."""
        return min(self.overlap.schedule.seconds, self.stage.seconds)


class OverlapSearch:
    """The search for a plan of less makespan than the plan of the least sum."""

    def __init__(self, costs: StageCosts, cluster: Cluster, formulation: Formulation):
        self.costs = costs
        self.view = view = costs.view
        self.cluster = cluster
        self.formulation = formulation
        self.planned = PlannedTasks(view, cluster, formulation.fused)
        self.number = {name: n for n, name in enumerate(formulation.layouts)}
        self.of_weights = _of_weights(view)
        self._sent: dict[object, _Table] = {}
        # The elimination recognises equal tables by identity, so equal tables must be one object.
        self._tables: dict[object, _Table] = {}
        self._held: dict[int, ConvertedTensor] = {}
        self._candidates: dict[tuple[int, ...], Candidate] = {}

    def better(self, solution: Solution, options: SolveOptions) -> Candidate:
        """Find a plan that fits the budget and improves the makespan by more than the gap; else keep the solution's."""
        last = self._candidate(solution.choices)
        best = self._best(last, self.formulation.problem, solution, options)
        problem, groups = self.formulation.problem, readers(self.formulation.problem)
        seen = {solution.choices}
        paid = self._first_fraction(last)
        size = sum(map(len, problem.cost))
        for _ in range(tuning.OVERLAP_ROUNDS if size <= tuning.OVERLAP_CHOICES else 1):
            if options.limits.expired():
                break
            discounted = self._discounted(last, paid)
            if len(seen) > 1 and _cheapest(discounted, solution.known) in seen:
                break  # plans that are known compare as they did, so the search would end with the same one
            if size <= tuning.OVERLAP_CHOICES:
                try:
                    gap = max(options.solver_gap, tuning.OVERLAP_GAP)
                    coarse = replace(options, solver_gap=gap, on_incumbent=None, prove=False)
                    solution = optimize(discounted, coarse, solution)
                    choices = solution.choices
                except (InfeasibleError, SolverError):
                    break  # no memory to communicate early, or no time
            else:
                prices = Prices(solution.second_per_byte or (0.0,) * problem.activations.points)
                kept = [list(range(len(costs))) for costs in problem.cost]
                try:
                    kept = Presolve(discounted).reduce(kept, prices, options.limits).kept
                    relaxation = TensorRelaxation(solution.narrowed)
                    instance = EliminationInstance(discounted, kept, Tables(options.limits), prices, relaxation)
                    choices = eliminate(instance, options.solver_gap / 4).choices
                except (TooWide, OutOfTimeError):
                    break
            if choices in seen or max(held_bytes(problem, groups, choices)) > problem.budget:
                break
            seen.add(choices)
            last = self._candidate(choices)
            if last.seconds < best.seconds * (1 - options.solver_gap):
                best = last
            if size <= tuning.OVERLAP_CHOICES:
                best = self._best(best, discounted, solution, options)
            paid = self._exposed_fraction(last)
        return best

    def _best(self, best: Candidate, costs: Problem, solution: Solution, options: SolveOptions) -> Candidate:
        """Return the plan of least makespan among ``best`` and the plans that are next to ``solution`` at some costs.

        Costs do not tell what a schedule hides, so that a plan of greater cost may have the lesser makespan.
        """
        totals = self.formulation.problem.totals
        others = [
            choices
            for choices in solution.known
            if choices not in self._candidates and max(totals.nbytes(choices)) <= self.formulation.problem.budget
        ]
        for choices in sorted(others, key=costs.totals.seconds)[: tuning.OVERLAP_PLANS]:
            if options.limits.expired():
                break
            better = best.seconds * (1 - options.solver_gap)
            candidate = self._candidate(choices, better)
            if candidate is not None and candidate.seconds < better:
                best = candidate
        return best

    @overload
    def _candidate(self, choices: tuple[int, ...]) -> Candidate: ...

    @overload
    def _candidate(self, choices: tuple[int, ...], below: float) -> Candidate | None: ...

    def _candidate(self, choices: tuple[int, ...], below: float = math.inf) -> Candidate | None:
        """Schedule a plan; None if its computation alone takes ``below`` seconds, so that its makespan is no less."""
        if choices not in self._candidates:
            stage = stage_of(self.costs, self.formulation, choices)
            if math.fsum(operator.compute_seconds for operator in stage.operators) >= below:
                return None
            beside = overlapped(self.planned, stage, min(device.budget for device in self.formulation.devices))
            self._candidates[choices] = Candidate(choices, stage, beside)
        return self._candidates[choices]

    def _exposed_fraction(self, candidate: Candidate) -> float:
        """Compute the exposed fraction of the communication of weights and of tensors computed from weights alone."""
        overlap = candidate.overlap
        sent = exposed = 0.0
        for task, seconds, communication in zip(
            overlap.tasks, overlap.schedule.exposed_seconds, overlap.communications, strict=True
        ):
            if communication is not None and communication.tensor in self.of_weights:
                sent += task.seconds
                exposed += seconds
        return _rounded_up(exposed / sent) if sent else 0.0

    def _first_fraction(self, candidate: Candidate) -> float:
        """Compute the fraction of gathering all weights that the computation is too short to hide."""
        sent = sum(max(map(max, self._communicated(name))) for name in self.view.weights if name in self.number)
        computed = sum(task.seconds for task in candidate.overlap.tasks if not task.communicates)
        return _rounded_up(max(0.0, 1 - computed / sent)) if sent else 0.0

    def _discounted(self, last: Candidate, paid: float) -> Problem:
        """Discount the problem's costs: ``paid`` of the weights' communication, and none that plan ``last`` hides.

        Converted tensors that are computed from weights alone count twice in memory: the next one is communicated while
        one is read.
        """
        problem = self.formulation.problem
        cost, hidden = self._hidden_costs(last)
        names = list(self.formulation.layouts)
        convert: dict[int, _Table] = {}
        edges = []
        for edge in problem.edges:
            name = names[edge.tensor % len(names)]  # copies for further devices are numbered behind all tensors
            if edge.tensor not in convert:
                if name in self.of_weights:
                    convert[edge.tensor] = self._less(edge.convert, name, 1 - paid)
                else:
                    convert[edge.tensor] = self._without(edge.convert, hidden.get(edge.tensor, {}))
            table = convert[edge.tensor]
            edges.append(edge if table is edge.convert else replace(edge, convert=table))
        # While one gathered tensor is read, the next one is gathered.
        tensors = {
            number: self._twice(memory) if names[number % len(names)] in self.of_weights else memory
            for number, memory in problem.activations.tensors.items()
        }
        return replace(problem, cost=cost, edges=edges, activations=replace(problem.activations, tensors=tensors))

    def _hidden_costs(self, last: Candidate) -> tuple[list[Sequence[float]], dict[int, dict[tuple[int, int], float]]]:
        """Discount what plan ``last`` hides: the costs of reductions, by operator, and those of conversions.

        Returns the costs of the operators' choices, and for each tensor the seconds that are hidden between specs.
        """
        cost: list[Sequence[float]] = list(self.formulation.problem.cost)
        hidden: dict[int, dict[tuple[int, int], float]] = {}
        spec_of = {tensor.name: tensor.spec for tensor in last.stage.stored}
        for op, plan in zip(self.view.operators, last.stage.operators, strict=True):
            spec_of.update(zip((self.view.names[y] for y in op.outputs), plan.spec.out_specs, strict=True))
        overlap = last.overlap
        for task, exposed, communication in zip(
            overlap.tasks, overlap.schedule.exposed_seconds, overlap.communications, strict=True
        ):
            if communication is None or communication.tensor in self.of_weights or not task.seconds:
                continue
            seconds = (
                math.floor((1 - exposed / task.seconds) * tuning.OVERLAP_STEPS + 1e-9)
                / tuning.OVERLAP_STEPS
                * task.seconds
            )
            if not seconds:
                continue
            if communication.target is None:
                assert communication.operator is not None
                pick = last.choices[communication.operator]
                costs = list(cost[communication.operator])
                costs[pick] = max(0.0, costs[pick] - seconds)
                cost[communication.operator] = costs
            else:
                specs = self.formulation.layouts[communication.tensor]
                pairs = hidden.setdefault(self.number[communication.tensor], {})
                for s, source in enumerate(specs):
                    for d, target in enumerate(specs):
                        if source == spec_of[communication.tensor] and target == communication.target:
                            pairs[s, d] = pairs.get((s, d), 0.0) + seconds
        return cost, hidden

    def _twice(self, memory: ConvertedTensor) -> ConvertedTensor:
        if id(memory) not in self._held:
            self._held[id(memory)] = replace(memory, nbytes=tuple(2 * n for n in memory.nbytes))
        return self._held[id(memory)]

    def _less(self, table: _Table, name: str, fraction: float) -> _Table:
        """Discount a table of conversions by a fraction of the time in which they communicate."""
        sent = self._communicated(name)
        key = id(table), id(sent), fraction
        if key not in self._tables:
            self._tables[key] = tuple(
                tuple(max(0.0, cost - fraction * own) for cost, own in zip(line, sent_line, strict=True))
                for line, sent_line in zip(table, sent, strict=True)
            )
        return self._tables[key]

    def _without(self, table: _Table, hidden: dict[tuple[int, int], float]) -> _Table:
        if not hidden:
            return table
        key = id(table), tuple(sorted(hidden.items()))
        if key not in self._tables:
            self._tables[key] = tuple(
                tuple(max(0.0, cost - hidden.get((s, d), 0.0)) for d, cost in enumerate(line))
                for s, line in enumerate(table)
            )
        return self._tables[key]

    def _communicated(self, name: str) -> _Table:
        """Predict the seconds of each conversion's collectives, without the copies before and after them."""
        (shape, element), layouts = self.view.pieces(name), self.formulation.layouts[name]
        same = shape, itemsize(element), id(layouts)  # equal tensors mostly share their list of specs
        if same not in self._sent:
            key = shape, itemsize(element), tuple(layouts)
            if key not in self._sent:
                self._sent[key] = conversion_communication(shape, element, layouts, layouts, self.cluster)
            self._sent[same] = self._sent[key]
        return self._sent[same]


def _cheapest(problem: Problem, plans: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Select the cheapest of some plans that fits the budget; the last of them, which a search returned, does."""
    totals = problem.totals
    fitting = [one for one in plans if max(totals.nbytes(one)) <= problem.budget]
    return min(fitting, key=totals.seconds, default=plans[-1])


def _rounded_up(fraction: float) -> float:
    return math.ceil(fraction * tuning.OVERLAP_STEPS - 1e-9) / tuning.OVERLAP_STEPS


def _of_weights(view: GraphView) -> set[str]:
    """Collect the weights, and the tensors that are computed from weights alone."""
    names = set(view.weights)
    for op in view.operators:
        if all(view.names[x] in names for x in op.inputs):
            names.update(view.names[y] for y in op.outputs)
    return names
