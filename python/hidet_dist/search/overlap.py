"""Plans for machines that communicate beside computing.

The search minimises a sum: one operator or collective after the other. How much of its communication a plan hides is
known once it is scheduled (:mod:`hidet_dist.overlap`), and that is no sum. So the problem is solved again with what is
hidden left out of the cost, and of all plans found the one of the least makespan is taken. Communicating what is made
of weights alone can be hidden anywhere, as nothing need be computed before it: at first it is taken to be free, as far
as the time of the computation goes if all weights were split; from then on it costs the share that the plan found last
did not hide, and what else that plan hid is free as well, until plans repeat. Large problems, of which solving is most
of the search's time, are solved anew once, at the prices of memory that were found before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hidet_dist.cost.model import CostModel
from hidet_dist.errors import InfeasibleError, SolverError
from hidet_dist.machine import Cluster
from hidet_dist.overlap.planned import Overlapped, PlannedTasks, overlapped
from hidet_dist.reshard import step_parts
from hidet_dist.reshard.cost import itemsize
from hidet_dist.search import tuning
from hidet_dist.search.eliminate import Tables, TooWide, eliminate
from hidet_dist.search.formulation import Formulation
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.optimum import optimize
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import ConvertedTensor, Problem, Solution, held_bytes, readers
from hidet_dist.search.solution import stage_of
from hidet_dist.spec import StagePlan
from hidet_dist.spec.partial import Layout
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
        """The makespan."""
        return min(self.overlap.schedule.seconds, self.stage.seconds)


class OverlapSearch:
    """The search for plans of less makespan, from one of the least sum."""

    def __init__(self, view: GraphView, cluster: Cluster, model: CostModel, formulation: Formulation):
        self.view = view
        self.cluster = cluster
        self.model = model
        self.formulation = formulation
        self.planned = PlannedTasks(view, cluster, formulation.fused)
        self.number = {name: n for n, name in enumerate(formulation.layouts)}
        self.of_weights = _of_weights(view)
        self._sent: dict[object, _Table] = {}
        # The elimination knows equal tables by their identity: equal ones are the same.
        self._tables: dict[object, _Table] = {}
        self._held: dict[int, ConvertedTensor] = {}

    def better(self, solution: Solution, options: SolveOptions) -> Candidate:
        """Find a plan that fits the budget and has a makespan less by more than the gap; else that of the solution."""
        best = last = self._candidate(solution.choices)
        problem, groups = self.formulation.problem, readers(self.formulation.problem)
        seen = {solution.choices}
        paid = self._first_share(best)
        size = sum(map(len, problem.cost))
        for _ in range(tuning.OVERLAP_ROUNDS if size <= tuning.OVERLAP_CHOICES else 1):
            if options.limits.expired():
                break
            discounted = self._discounted(last, paid)
            if size <= tuning.OVERLAP_CHOICES:
                try:
                    gap = max(options.gap, tuning.OVERLAP_GAP)
                    coarse = replace(options, gap=gap, on_incumbent=None, prove=False)
                    solution = optimize(discounted, coarse, solution)
                    choices = solution.choices
                except (InfeasibleError, SolverError):
                    break  # there is no room to communicate early, or no time
            else:
                prices = Prices(solution.second_per_byte or (0.0,) * problem.activations.points)
                kept = [list(range(len(costs))) for costs in problem.cost]
                try:
                    tables = Tables(options.limits)
                    choices = eliminate(discounted, kept, tables, prices, options.gap / 4).choices
                except (TooWide, OutOfTimeError):
                    break
            if choices in seen or max(held_bytes(problem, groups, choices)) > problem.budget:
                break
            seen.add(choices)
            last = self._candidate(choices)
            if last.seconds < best.seconds * (1 - options.gap):
                best = last
            paid = self._exposed_share(last)
        return best

    def _candidate(self, choices: tuple[int, ...]) -> Candidate:
        stage = stage_of(self.view, self.cluster, self.model, self.formulation, choices)
        return Candidate(choices, stage, overlapped(self.planned, stage, self.formulation.problem.budget))

    def _exposed_share(self, candidate: Candidate) -> float:
        """Compute the exposed share of the time in which weights, and tensors made of them alone, are communicated."""
        overlap = candidate.overlap
        sent = exposed = 0.0
        for task, seconds, communication in zip(
            overlap.tasks, overlap.schedule.exposed_seconds, overlap.communications, strict=True
        ):
            if communication is not None and communication.tensor in self.of_weights:
                sent += task.seconds
                exposed += seconds
        return _rounded_up(exposed / sent) if sent else 0.0

    def _first_share(self, candidate: Candidate) -> float:
        """Compute the share of the time of gathering all weights that the computation is too short to hide."""
        sent = sum(max(map(max, self._communicated(name))) for name in self.view.weights if name in self.number)
        computed = sum(task.seconds for task in candidate.overlap.tasks if not task.communicates)
        return _rounded_up(max(0.0, 1 - computed / sent)) if sent else 0.0

    def _discounted(self, last: Candidate, paid: float) -> Problem:
        """Discount the problem: the share ``paid`` of the weights' communication is left; what ``last`` hides is free.

        What is made of weights and converted takes twice the memory in it, for what is communicated meanwhile.
        """
        problem, formulation = self.formulation.problem, self.formulation
        cost = list(problem.cost)
        hidden: dict[int, dict[tuple[int, int], float]] = {}
        spec_of = {tensor.name: tensor.spec for tensor in (*last.stage.weights, *last.stage.inputs)}
        for op, plan in zip(self.view.operators, last.stage.operators, strict=True):
            spec_of.update(zip((self.view.names[y] for y in op.outputs), plan.spec.out_specs, strict=True))
        overlap = last.overlap
        for task, exposed, communication in zip(
            overlap.tasks, overlap.schedule.exposed_seconds, overlap.communications, strict=True
        ):
            if communication is None or communication.tensor in self.of_weights or not task.seconds:
                continue
            seconds = (
                math.floor((1 - exposed / task.seconds) * tuning.OVERLAP_SHARES + 1e-9)
                / tuning.OVERLAP_SHARES
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
                specs = formulation.layouts[communication.tensor]
                pairs = hidden.setdefault(self.number[communication.tensor], {})
                for s, source in enumerate(specs):
                    for d, target in enumerate(specs):
                        if source == spec_of[communication.tensor] and target == communication.target:
                            pairs[s, d] = pairs.get((s, d), 0.0) + seconds
        names = list(formulation.layouts)
        convert: dict[int, _Table] = {}
        edges = []
        for edge in problem.edges:
            name = names[edge.tensor]
            if edge.tensor not in convert:
                if name in self.of_weights:
                    convert[edge.tensor] = self._less(edge.convert, name, 1 - paid)
                else:
                    convert[edge.tensor] = self._without(edge.convert, hidden.get(edge.tensor, {}))
            own_table = convert[edge.tensor]
            edges.append(edge if own_table is edge.convert else replace(edge, convert=own_table))
        # While what was gathered is read, what is gathered next needs room as well.
        tensors = {
            number: self._twice(memory) if names[number] in self.of_weights else memory
            for number, memory in problem.activations.tensors.items()
        }
        return replace(problem, cost=cost, edges=edges, activations=replace(problem.activations, tensors=tensors))

    def _twice(self, memory: ConvertedTensor) -> ConvertedTensor:
        if id(memory) not in self._held:
            self._held[id(memory)] = replace(memory, nbytes=tuple(2 * n for n in memory.nbytes))
        return self._held[id(memory)]

    def _less(self, table: _Table, name: str, share: float) -> _Table:
        """Discount a table of conversions by a share of the seconds in which they communicate."""
        sent = self._communicated(name)
        key = id(table), id(sent), share
        if key not in self._tables:
            self._tables[key] = tuple(
                tuple(max(0.0, cost - share * communicated) for cost, communicated in zip(line, own_line, strict=True))
                for line, own_line in zip(table, sent, strict=True)
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
        """Seconds of the collectives of each conversion of a tensor, without the copies around them."""
        shape, element = self.view.pieces(name)
        specs = tuple(self.formulation.layouts[name])
        key = shape, itemsize(element), specs
        if key not in self._sent:
            table = []
            for source in specs:
                line = []
                for target in specs:
                    seconds = 0.0
                    spec_of: Layout = source
                    for step in self.model.conversion(shape, element, source, target).steps:
                        after = step.after(spec_of, shape, self.cluster.mesh)
                        parts = step_parts(step, spec_of, after, shape, itemsize(element), self.cluster)
                        seconds, spec_of = seconds + parts.communicate, after
                    line.append(seconds)
                table.append(tuple(line))
            self._sent[key] = tuple(table)
        return self._sent[key]


def _rounded_up(share: float) -> float:
    return math.ceil(share * tuning.OVERLAP_SHARES - 1e-9) / tuning.OVERLAP_SHARES


def _of_weights(view: GraphView) -> set[str]:
    """Collect the weights, and the tensors that are computed from nothing else."""
    names = set(view.weights)
    for op in view.operators:
        if all(view.names[x] in names for x in op.inputs):
            names.update(view.names[y] for y in op.outputs)
    return names
