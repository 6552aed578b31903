"""The integer linear program of the search. It knows nothing of graphs: lists of numbers in, choices out.

Every *entity* (an operator, a weight, a graph input or output) takes exactly one of its choices. An *edge* carries a
tensor from its producer to a consumer; where the produced and the consumed spec differ, the conversion costs something,
once for each (tensor, produced spec, consumed spec), however many consumers ask for it.

What is held at a moment is linear in the choices and in the flows, but that a converted tensor is held once for all its
readers: y[t,d] >= the conversions to d that a reader before the moment and one after it share. Only moments that a plan
exceeded get a row.

With x[e,k] in {0,1} the choices, the product x[p,k] x[c,l] of an edge is linearised in flow form: f[s,d] >= 0 with row
sums equal to the producer's spec indicator and column sums equal to the consumer's, which keeps the relaxation tight;
Alpa (Zheng et al., OSDI 2022, section 4.2) linearises it with a one-hot edge vector. z[t,s,d] >= f[s,d]
for all edges of tensor t is what is paid.

    minimise    sum_e,k cost[e][k] x[e,k] + sum_t,s,d convert[t][s][d] z[t,s,d]
    subject to  sum_k x[e,k] = 1,  sum_e,k memory[e][k] x[e,k] + activations[m] <= budget  for each moment m
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import pulp

from hidet_dist.errors import ConfigError, SolverError
from hidet_dist.search.activations import NONE, Activations, Converted, held

NODES = 5000  # of a solver's search tree; a good plan is known by then, and proving more takes hours
_ROWS = 30  # moments that get a row at a time
_TOLERANCE = 1e-6  # relative, of the solvers' rows


class StoppedError(SolverError):
    """The solver's limits were reached before it had a solution."""


class NothingFitsError(SolverError):
    """The solver says that no plan fits the budget."""


@dataclass(frozen=True)
class Edge:
    """A tensor from ``producer`` to ``consumer`` (entity numbers).

    ``produced[k]`` is the number of the spec that the producer's choice k gives, ``consumed[k]`` the one that the
    consumer's choice k wants; ``convert[s][d]`` the seconds of converting from s to d. Edges of one ``tensor`` share
    the producer and the numbering of specs. A converted tensor is held for this consumer from moment ``begin`` to
    moment ``end``.
    """

    tensor: int
    producer: int
    consumer: int
    produced: tuple[int, ...]
    consumed: tuple[int, ...]
    convert: tuple[tuple[float, ...], ...]
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Problem:
    """``cost[e][k]`` in seconds, ``memory[e][k]`` and ``budget`` in bytes, for entity e and its choice k.

    ``memory`` is held throughout; ``activations`` say what is held beside it, and when.
    """

    cost: Sequence[Sequence[float]]
    memory: Sequence[Sequence[int]]
    budget: int
    edges: Sequence[Edge]
    activations: Activations = NONE


@dataclass(frozen=True)
class Solution:
    """The choice of every entity; ``seconds`` is the objective, at most ``gap`` (relative) above the optimum.

    ``second_per_byte`` are the prices of the bytes of moments that it was found at; none if the budget does not bind.
    ``moments`` are those that plans considered on the way held too much at, and ``known`` are such plans, and others:
    both help with another problem that differs from this one in its costs.
    """

    choices: tuple[int, ...]
    seconds: float
    gap: float
    second_per_byte: tuple[float, ...] = ()
    moments: tuple[int, ...] = ()
    known: tuple[tuple[int, ...], ...] = ()


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """The cost in seconds of given choices, summed up term by term without the solver."""
    seconds = sum(costs[k] for costs, k in zip(problem.cost, choices, strict=True))
    paid: set[tuple[int, int, int]] = set()
    for edge in problem.edges:
        s, d = edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]
        if (edge.tensor, s, d) not in paid:
            paid.add((edge.tensor, s, d))
            seconds += edge.convert[s][d]
    return seconds


def restricted(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem with only the choices ``kept`` of each entity."""
    edges = [
        replace(
            edge,
            produced=tuple(edge.produced[k] for k in kept[edge.producer]),
            consumed=tuple(edge.consumed[k] for k in kept[edge.consumer]),
        )
        for edge in problem.edges
    ]
    holds = tuple(
        replace(hold, nbytes=tuple(hold.nbytes[k] for k in kept[hold.entity])) for hold in problem.activations.holds
    )
    return replace(
        problem,
        cost=[[costs[k] for k in own] for costs, own in zip(problem.cost, kept, strict=True)],
        memory=[[memory[k] for k in own] for memory, own in zip(problem.memory, kept, strict=True)],
        edges=edges,
        activations=replace(problem.activations, holds=holds),
    )


class _HiGHS(pulp.HiGHS):
    """HiGHS, of which PuLP 3.3.2 does not know that it can stop at its limit of nodes: it raises KeyError then."""

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        if lp.solverModel.getModelStatus() != highspy.HighsModelStatus.kSolutionLimit:
            found: tuple[int, int] = super().findSolutionValues(lp)
            return found
        if lp.solverModel.getInfo().primal_solution_status != highspy.kSolutionStatusFeasible:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        values = lp.solverModel.getSolution().col_value
        for variable in lp.variables():
            variable.varValue = values[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def solver(name: str, time_limit_seconds: float | None, gap: float, threads: int, nodes: int) -> pulp.LpSolver:
    """A PuLP solver, ``highs`` or ``cbc``, that stops after so many nodes of its search tree.

    With one thread and without a time limit the same problem gives the same solution.
    """
    options = {"msg": False, "threads": threads, "gapRel": gap, "timeLimit": time_limit_seconds}
    if name == "highs":
        return _HiGHS(mip_max_nodes=nodes, **options)
    if name == "cbc":
        return pulp.PULP_CBC_CMD(maxNodes=nodes, **options)
    raise ConfigError(f"Unknown solver {name!r}; choose 'highs' or 'cbc'.")


def solve(
    problem: Problem,
    solver_name: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-3,
    threads: int = 1,
    nodes: int = NODES,
    moments: Sequence[int] = (),
) -> Solution:
    """Solve the problem to a relative gap, or as far as so many nodes of the solver's search tree lead.

    ``moments`` are some that the budget is expected to bind at: a plan that exceeds others costs another run.

    Raises
    ------
    NothingFitsError
        When no plan fits the budget.
    SolverError
        When the solver fails, or ends without a solution within its limits.
    """
    return _Program(problem, peak=False).solve(solver_name, time_limit_seconds, gap, threads, nodes, moments)


def solve_peak(
    problem: Problem, solver_name: str = "highs", time_limit_seconds: float | None = None, threads: int = 1
) -> tuple[tuple[int, ...], int]:
    """The choices that hold least at their worst moment, and a number of bytes that no plan can do with less than.

    The problem's budget does not matter.

    Raises
    ------
    SolverError
        When the solver fails or is out of time.
    """
    found = _Program(problem, peak=True).solve(solver_name, time_limit_seconds, 0.0, threads, NODES)
    return found.choices, math.ceil(found.seconds * (1 - found.gap))


class _Program:
    """The integer program, built once; rows for the memory of moments are added as plans exceed them.

    With ``peak`` the bytes of the worst moment are the cost, else the problem's own within its budget.
    """

    def __init__(self, problem: Problem, peak: bool):
        self.problem = problem
        self.model = pulp.LpProblem("plan", pulp.LpMinimize)
        # Solvers compare with absolute tolerances near 1e-6: costs in seconds and bytes are both brought near 1.
        self.unit = max((max(costs) for costs in problem.cost if costs), default=0.0) or 1.0
        most = sum(map(max, problem.memory)) + sum(max(hold.nbytes) for hold in problem.activations.holds)
        self.scale = float(max(1, most if peak else min(most, problem.budget)))
        self.x = [
            [pulp.LpVariable(f"x_{e}_{k}", cat=pulp.LpBinary) if len(costs) > 1 else None for k in range(len(costs))]
            for e, costs in enumerate(problem.cost)
        ]
        self.objective: list[tuple[pulp.LpVariable, float]] = []
        self.constant = 0.0
        self.priced: set[int] = set()
        self.peak = pulp.LpVariable("peak", lowBound=0) if peak else None
        # Edges with the same consumer and the same wish (x * x, say) are one.
        self.groups: dict[int, list[Edge]] = {}
        for edge in {(edge.tensor, edge.consumer, edge.consumed): edge for edge in problem.edges}.values():
            self.groups.setdefault(edge.tensor, []).append(edge)
        self.flows: dict[int, list[dict[tuple[int, int], pulp.LpVariable]]] = {}
        self._choices()
        self._tensors()

    def _choices(self) -> None:
        for e, costs in enumerate(self.problem.cost):
            if len(costs) == 1:
                self.constant += costs[0]
                continue
            self.model += pulp.lpSum(self.x[e]) == 1
            self.objective += [(self.x[e][k], cost / self.unit) for k, cost in enumerate(costs) if cost]

    def _indicator(self, entity: int, specs: tuple[int, ...], spec: int) -> pulp.LpAffineExpression:
        chosen = [k for k, own in enumerate(specs) if own == spec]
        if len(specs) == 1:
            return pulp.LpAffineExpression(constant=float(bool(chosen)))
        return pulp.lpSum(self.x[entity][k] for k in chosen)

    def _tensors(self) -> None:
        for tensor, group in self.groups.items():
            paid: dict[tuple[int, int], list[pulp.LpVariable]] = {}
            flows = []
            for number, edge in enumerate(group):
                rows, columns = sorted(set(edge.produced)), sorted(set(edge.consumed))
                f = {(s, d): pulp.LpVariable(f"f_{tensor}_{number}_{s}_{d}", lowBound=0) for s in rows for d in columns}
                for s in rows:
                    self.model += pulp.lpSum(f[s, d] for d in columns) == self._indicator(
                        edge.producer, edge.produced, s
                    )
                for d in columns:
                    self.model += pulp.lpSum(f[s, d] for s in rows) == self._indicator(edge.consumer, edge.consumed, d)
                for (s, d), flow in f.items():
                    if edge.convert[s][d]:
                        paid.setdefault((s, d), []).append(flow)
                flows.append(f)
            self.flows[tensor] = flows
            for (s, d), own in paid.items():
                once = own[0]
                if len(own) > 1:
                    once = pulp.LpVariable(f"z_{tensor}_{s}_{d}", lowBound=0)
                    for flow in own:
                        self.model += once >= flow
                self.objective.append((once, group[0].convert[s][d] / self.unit))

    def _add_row(self, moment: int) -> None:
        """Hold the bytes of a moment to the budget, or to the peak where that is minimised."""
        self.priced.add(moment)
        problem = self.problem
        terms: list[tuple[pulp.LpVariable, float]] = []
        fixed = 0

        def choose(entity: int, nbytes: Sequence[int]) -> None:
            nonlocal fixed
            if len(nbytes) == 1:
                fixed += nbytes[0]
                return
            terms.extend((self.x[entity][k], n / self.scale) for k, n in enumerate(nbytes) if n)

        for entity, own in enumerate(problem.memory):
            choose(entity, own)
        for hold in problem.activations.holds:
            if hold.begin <= moment <= hold.end:
                choose(hold.entity, hold.nbytes)
        for tensor, memory in problem.activations.tensors.items():
            if tensor in self.groups:
                terms += self._converted(tensor, memory, moment)
        coefficients: dict[pulp.LpVariable, float] = {}
        for variable, value in terms:
            coefficients[variable] = coefficients.get(variable, 0.0) + value
        used = pulp.LpAffineExpression(coefficients)
        if self.peak is not None:
            self.model += used + fixed / self.scale <= self.peak
        else:
            self.model += used <= (problem.budget - fixed) / self.scale

    def _converted(self, tensor: int, memory: Converted, moment: int) -> list[tuple[pulp.LpVariable, float]]:
        group, flows = self.groups[tensor], self.flows[tensor]
        if not min(e.begin for e in group) <= moment <= max(e.end for e in group):
            return []
        terms = []
        for d in sorted({d for f in flows for _, d in f}):

            def wants(number: int, d: int = d) -> pulp.LpAffineExpression:
                """Whether a reader has the tensor converted to d."""
                return pulp.lpSum(
                    flow
                    for (s, own), flow in flows[number].items()
                    if own == d and memory.layout[s] != memory.layout[d]
                )

            own = [i for i, f in enumerate(flows) if any(to == d for _, to in f)]
            if memory.nbytes[d]:
                y = pulp.LpVariable(f"y_{tensor}_{d}_{moment}", lowBound=0)
                before = [i for i in own if group[i].begin <= moment]
                after = [i for i in own if group[i].end >= moment]
                for i in set(before) & set(after):
                    self.model += y >= wants(i)
                for i in before:
                    for j in after:
                        if group[i].end < moment < group[j].begin:
                            self.model += y >= wants(i) + wants(j) - 1
                terms.append((y, memory.nbytes[d] / self.scale))
            at = [i for i in own if group[i].begin == moment]
            if not at:
                continue
            most = {
                s: memory.working(s, d)
                for f in flows
                for s, to in f
                if to == d and memory.layout[s] != memory.layout[d]
            }
            if not any(most.values()):
                continue
            working = pulp.LpVariable(f"w_{tensor}_{d}_{moment}", lowBound=0)
            earlier = [i for i in own if group[i].begin < moment]
            for i in at:
                self.model += working >= pulp.lpSum(
                    nbytes / self.scale * (flows[i][s, d] - pulp.lpSum(flows[j][s, d] for j in earlier))
                    for s, nbytes in most.items()
                    if nbytes
                )
            terms.append((working, 1.0))
        return terms

    def solve(
        self,
        solver_name: str,
        time_limit_seconds: float | None,
        gap: float,
        threads: int,
        nodes: int,
        moments: Sequence[int] = (),
    ) -> Solution:
        """Solve and add rows until no moment is exceeded."""
        problem, begin = self.problem, time.perf_counter()
        self.model.setObjective(pulp.LpAffineExpression(self.objective) if self.peak is None else self.peak + 0)
        for moment in {0: None, **dict.fromkeys(moments[:_ROWS])}:
            self._add_row(moment)
        refused = f"No plan fits the memory budget of {problem.budget} bytes, says the solver {solver_name}."
        free = any(v is not None for row in self.x for v in row)
        while True:
            left = None if time_limit_seconds is None else max(0.1, time_limit_seconds - (time.perf_counter() - begin))
            if free:
                status = self._run(solver_name, left, gap, threads, nodes)
                if status == pulp.LpStatusInfeasible and self.peak is None:
                    raise NothingFitsError(refused)
                if self.model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
                    limit = "" if time_limit_seconds is None else f" within {time_limit_seconds} s"
                    raise StoppedError(f"The solver {solver_name} found no plan{limit}: {pulp.LpStatus[status]}.")
            choices = tuple(
                max(range(len(row)), key=[v.value() if v is not None else 0.0 for v in row].__getitem__)
                for row in self.x
            )
            nbytes = held(problem, self.groups, choices)
            limit_bytes = problem.budget
            if self.peak is not None:
                limit_bytes = max(nbytes[moment] for moment in self.priced)
            over = [moment for moment, n in enumerate(nbytes) if n > limit_bytes]
            unpriced = [moment for moment in over if moment not in self.priced]
            new = summits(nbytes, unpriced)[:_ROWS] or unpriced[:_ROWS]
            if new:
                for moment in new:
                    self._add_row(moment)
            elif not over:
                break
            elif not free:
                raise NothingFitsError(refused)
            else:
                # Solvers allow a row to be exceeded by a millionth, which is bytes: this plan is ruled out by name.
                chosen = [row[k] for row, k in zip(self.x, choices, strict=True) if len(row) > 1]
                self.model += pulp.lpSum(chosen) <= len(chosen) - 1
        left_gap = gap
        if free and self.model.sol_status != pulp.LpSolutionOptimal:
            left_gap = _gap_left(self.model)
        priced = tuple(sorted(self.priced))
        if self.peak is not None:
            return Solution(choices, float(max(nbytes)), left_gap + _TOLERANCE if free else 0.0, moments=priced)
        seconds = evaluate(problem, choices)
        solved = self.constant + (pulp.value(self.model.objective) or 0.0) * self.unit if free else seconds
        if abs(solved - seconds) > 1e-4 * max(seconds, self.unit):
            raise SolverError(f"The solver {solver_name} reports {solved} s for a plan that costs {seconds} s.")
        return Solution(choices, seconds, left_gap if free else 0.0, moments=priced)

    def _run(self, solver_name: str, time_limit_seconds: float | None, gap: float, threads: int, nodes: int) -> int:
        try:
            return int(self.model.solve(solver(solver_name, time_limit_seconds, gap, threads, nodes)))
        except pulp.PulpSolverError as error:
            raise SolverError(f"The solver {solver_name} failed: {error}") from error


def summits(nbytes: Sequence[int], moments: Sequence[int]) -> list[int]:
    """Of ``moments`` those at which no less is held than at the moments beside them."""
    padded = (0, *nbytes, 0)
    return [m for m in moments if padded[m + 1] >= padded[m] and padded[m + 1] >= padded[m + 2]]


def _gap_left(model: pulp.LpProblem) -> float:
    """The relative gap at which a solver was stopped, as far as it tells."""
    info = getattr(model.solverModel, "getInfo", None)
    return float(info().mip_gap) if info is not None else float("inf")
