"""The integer linear program of the search, for HiGHS or CBC.

With x[e,k] in {0,1} the choices, the product x[p,k] x[c,l] of an edge is linearised in flow form: f[s,d] >= 0 with row
sums equal to the producer's spec indicator and column sums equal to the consumer's, which keeps the relaxation tight;
Alpa (Zheng et al., OSDI 2022, section 4.2) linearises it with a one-hot edge vector. A conversion of tensor t from s to
d is paid once: z[t,s,d] >= f[s,d] for all its edges.

The bytes held at a program point are linear in x and f, except that a converted tensor is held once for all its
readers: y[t,d] >= the conversions to d that a reader before the point and one after it share. A point gets a row only
once a plan exceeds the budget there.

    minimise    sum_e,k cost[e][k] x[e,k] + sum_t,s,d convert[t][s][d] z[t,s,d]
    subject to  sum_k x[e,k] = 1,  sum_e,k memory[e][k] x[e,k] + activations[m] <= budget  for each program point m
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import highspy
import pulp

from hidet_dist.errors import ConfigError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem, Solution, evaluate, held_bytes, peaks, readers


class StoppedError(SolverError):
    """A solver reached its limits before it had a solution.

    Attributes
    ----------
    bound: float
        The lower bound that the solver proved, in seconds.
    """

    def __init__(self, message: str, bound: float = 0.0):
        super().__init__(message)
        self.bound = bound


class TooLargeError(StoppedError):
    """The program would exceed the memory limit of planning."""


class NothingFitsError(SolverError):
    """The solver proved that no plan fits both the budget and the limit on seconds."""


class _HiGHS(pulp.HiGHS):
    """HiGHS with a corrected result: PuLP 3.3.2 raises KeyError at the limit of nodes, and lacks values at others."""

    _STOPPED = (
        highspy.HighsModelStatus.kSolutionLimit,
        highspy.HighsModelStatus.kTimeLimit,
        highspy.HighsModelStatus.kIterationLimit,
        highspy.HighsModelStatus.kInterrupt,
        highspy.HighsModelStatus.kMemoryLimit,
    )

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        if lp.solverModel.getModelStatus() not in self._STOPPED:
            result: tuple[int, int] = super().findSolutionValues(lp)
            return result
        if lp.solverModel.getInfo().primal_solution_status != highspy.kSolutionStatusFeasible:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        values = lp.solverModel.getSolution().col_value
        for variable in lp.variables():
            variable.varValue = values[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


# HiGHS 1.15.1 aggregates columns wrongly: it finds some programs infeasible that are not, and takes some plans for the
# best ones that are not (test_ilp.py).
_RIGHT_PRESOLVE = {"presolve_rule_off": 1 << 12}

_WITHOUT_HEURISTICS = {
    "mip_heuristic_effort": 0.0,
    **{f"mip_heuristic_run_{name}": False for name in ("rins", "rens", "root_reduced_cost", "feasibility_jump")},
}


def _solver(options: SolveOptions, nodes: int, proof: bool) -> pulp.LpSolver:
    """Make a PuLP solver that stops after ``nodes`` nodes of its search tree.

    With one thread and before the time limit the same problem gives the same solution. ``proof`` says that most likely
    nothing is left to find: HiGHS then spares its heuristics, which take two thirds of its time.
    """
    common: dict[str, Any] = {
        "msg": False,
        "threads": options.threads,
        "gapRel": options.gap,
        "timeLimit": options.limits.seconds_left(),
    }
    if options.solver == "highs":
        if options.limits.counts_cpu_time:
            common["timeLimit"] = None  # HiGHS looks at the wall's clock
            common["callbackTuple"] = (partial(_interrupt, options.limits), None)
            common["callbacksToActivate"] = [highspy.cb.HighsCallbackType.kCallbackMipInterrupt]
        heuristics = _WITHOUT_HEURISTICS if proof else {}
        return _HiGHS(mip_max_nodes=nodes, **_RIGHT_PRESOLVE, **heuristics, **common)
    if options.solver == "cbc":
        return pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, maxNodes=nodes, **common)
    raise ConfigError(f"Unknown solver {options.solver!r}; choose 'highs' or 'cbc'.")


def _interrupt(limits: Limits, kind: int, message: str, out: Any, into: Any, data: Any) -> None:
    """Have HiGHS stop once the deadline has passed; the other parameters are those of its callbacks."""
    if into is not None and limits.expired():
        into.user_interrupt = True


def solve(
    problem: Problem,
    options: SolveOptions | None = None,
    nodes: int = tuning.NODES,
    points: Sequence[int] = (),
    most_seconds: float = math.inf,
) -> Solution:
    """Solve the problem to a relative gap, or until the solver has searched ``nodes`` nodes of its tree.

    ``points`` are program points at which the budget is expected to bind: they get rows at once, where a plan that
    exceeds the budget at another point costs another run. Plans of more than ``most_seconds`` are excluded.

    Raises
    ------
    NothingFitsError
        When no plan fits the budget.
    TooLargeError
        When the program would take more memory than the limits allow.
    SolverError
        When the solver fails, or ends without a solution within its limits.
    OutOfTimeError
        When the time limit is reached while the program is built.
    """
    options = SolveOptions() if options is None else options
    return _Program(problem, options.limits, peak=False).solve(options, nodes, points, most_seconds)


def solve_peak(problem: Problem, options: SolveOptions) -> tuple[tuple[int, ...], int]:
    """Find the choices of least peak memory, and a lower bound of every plan's peak, in bytes.

    The problem's budget is ignored. Raises as :func:`solve` does.
    """
    result = _Program(problem, options.limits, peak=True).solve(replace(options, gap=0.0), tuning.NODES)
    return result.choices, math.ceil(result.seconds * (1 - result.gap))


def program_bytes(problem: Problem) -> int:
    """Estimate the bytes that the integer program of a problem takes, before it is built."""
    variables = sum(map(len, problem.cost))
    terms = variables
    readers_of = readers(problem)
    for group in readers_of.values():
        for edge in group:
            flows = len(set(edge.produced)) * len(set(edge.consumed))
            variables += flows
            terms += 4 * flows + len(edge.produced) + len(edge.consumed)
    return variables * tuning.VARIABLE_BYTES + terms * tuning.TERM_BYTES


class _Program:
    """The integer program, built once; rows for the memory of program points are added as plans exceed them.

    With ``peak`` the objective is the bytes of the worst point, without a budget; else the problem's cost within it.
    """

    def __init__(self, problem: Problem, limits: Limits, peak: bool):
        needed = program_bytes(problem)
        if needed > limits.nbytes:
            raise TooLargeError(f"The integer program would take about {needed} bytes, and may take {limits.nbytes}.")
        self.problem = problem
        self.limits = limits
        self.model = pulp.LpProblem("plan", pulp.LpMinimize)
        self.groups: dict[int, list[Edge]] = readers(problem)
        # Solvers compare with absolute tolerances near 1e-6: seconds and bytes are both scaled to near 1.
        self.unit = max((max(costs) for costs in problem.cost if costs), default=0.0) or 1.0
        most = sum(map(max, problem.memory)) + sum(max(live.nbytes) for live in problem.activations.intervals)
        self.scale = float(max(1, _simple_peak(problem, self.groups) if peak else min(most, problem.budget)))
        self.x = [
            [
                self.model.add_variable(f"x_{e}_{k}", cat=pulp.LpBinary) if len(costs) > 1 else None
                for k in range(len(costs))
            ]
            for e, costs in enumerate(problem.cost)
        ]
        self.objective: list[tuple[pulp.LpVariable, float]] = []
        self.constant = 0.0
        self.priced: set[int] = set()
        self.peak = self.model.add_variable("peak", lowBound=0) if peak else None
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
        chosen = [k for k, choice_spec in enumerate(specs) if choice_spec == spec]
        if len(specs) == 1:
            return pulp.LpAffineExpression(constant=float(bool(chosen)))
        return pulp.lpSum(self.x[entity][k] for k in chosen)

    def _tensors(self) -> None:
        for tensor, group in self.groups.items():
            self.limits.check()
            paid: dict[tuple[int, int], list[pulp.LpVariable]] = {}
            flows = []
            for number, edge in enumerate(group):
                rows, columns = sorted(set(edge.produced)), sorted(set(edge.consumed))
                f = {
                    (s, d): self.model.add_variable(f"f_{tensor}_{number}_{s}_{d}", lowBound=0)
                    for s in rows
                    for d in columns
                }
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
            for (s, d), flows_paid in paid.items():
                once = flows_paid[0]
                if len(flows_paid) > 1:
                    once = self.model.add_variable(f"z_{tensor}_{s}_{d}", lowBound=0)
                    for flow in flows_paid:
                        self.model += once >= flow
                self.objective.append((once, group[0].convert[s][d] / self.unit))

    def _add_row(self, point: int) -> None:
        """Constrain the bytes of a program point to the budget, or to the peak where that is minimised."""
        self.limits.check()
        self.priced.add(point)
        problem = self.problem
        terms: list[tuple[pulp.LpVariable, float]] = []
        fixed = 0

        def choose(entity: int, nbytes: Sequence[int]) -> None:
            nonlocal fixed
            if len(nbytes) == 1:
                fixed += nbytes[0]
                return
            terms.extend((self.x[entity][k], n / self.scale) for k, n in enumerate(nbytes) if n)

        for entity, choice_bytes in enumerate(problem.memory):
            choose(entity, choice_bytes)
        for interval in problem.activations.intervals:
            if interval.begin <= point <= interval.end:
                choose(interval.entity, interval.nbytes)
        for tensor, memory in problem.activations.tensors.items():
            if tensor in self.groups:
                terms += self._converted(tensor, memory, point)
        coefficients: dict[pulp.LpVariable, float] = {}
        for variable, value in terms:
            coefficients[variable] = coefficients.get(variable, 0.0) + value
        used = pulp.LpAffineExpression(coefficients)
        if self.peak is not None:
            self.model += used + fixed / self.scale <= self.peak
        else:
            self.model += used <= (problem.budget - fixed) / self.scale

    def _converted(self, tensor: int, memory: ConvertedTensor, point: int) -> list[tuple[pulp.LpVariable, float]]:
        group, flows = self.groups[tensor], self.flows[tensor]
        if not min(e.begin for e in group) <= point <= max(e.end for e in group):
            return []
        self.limits.check()
        terms = []
        for d in sorted({d for f in flows for _, d in f}):

            def converts(number: int, d: int = d) -> pulp.LpAffineExpression:
                """1 if a reader requires the tensor converted to d, else 0."""
                return pulp.lpSum(
                    flow for (s, to), flow in flows[number].items() if to == d and memory.layout[s] != memory.layout[d]
                )

            requiring = [i for i, f in enumerate(flows) if any(to == d for _, to in f)]
            if memory.nbytes[d]:
                y = self.model.add_variable(f"y_{tensor}_{d}_{point}", lowBound=0)
                before = [i for i in requiring if group[i].begin <= point]
                after = [i for i in requiring if group[i].end >= point]
                for i in set(before) & set(after):
                    self.model += y >= converts(i)
                for i in before:
                    for j in after:
                        if group[i].end < point < group[j].begin:
                            self.model += y >= converts(i) + converts(j) - 1
                terms.append((y, memory.nbytes[d] / self.scale))
            at = [i for i in requiring if group[i].begin == point]
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
            working = self.model.add_variable(f"w_{tensor}_{d}_{point}", lowBound=0)
            earlier = [i for i in requiring if group[i].begin < point]
            for i in at:
                self.model += working >= pulp.lpSum(
                    nbytes / self.scale * (flows[i][s, d] - pulp.lpSum(flows[j][s, d] for j in earlier))
                    for s, nbytes in most.items()
                    if nbytes
                )
            terms.append((working, 1.0))
        return terms

    def solve(
        self, options: SolveOptions, nodes: int, points: Sequence[int] = (), most_seconds: float = math.inf
    ) -> Solution:
        """Solve, and add rows, until no program point exceeds the budget."""
        problem = self.problem
        self.model.setObjective(pulp.LpAffineExpression(self.objective) if self.peak is None else self.peak + 0)
        for point in {0: None, **dict.fromkeys(points[: tuning.POINTS_AT_ONCE])}:
            self._add_row(point)
        proof = math.isfinite(most_seconds) and bool(self.objective)
        if proof:
            self.model += pulp.LpAffineExpression(self.objective) <= (most_seconds - self.constant) / self.unit
        refused = f"The solver {options.solver} proved that no plan fits the memory budget of {problem.budget} bytes."
        free = any(v is not None for row in self.x for v in row)
        while True:
            if self.limits.expired():
                raise StoppedError(f"The solver {options.solver} found no plan within {self.limits.given_seconds} s.")
            if free:
                status = self._run(options, nodes, proof)
                if status == pulp.LpStatusInfeasible and self.peak is None:
                    raise NothingFitsError(refused)
                if self.model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
                    limit = "" if not self.limits.expired() else f" within {self.limits.given_seconds} s"
                    raise StoppedError(
                        f"The solver {options.solver} found no plan{limit}: {pulp.LpStatus[status]}.",
                        self.constant + _bound_known(self.model) * self.unit,
                    )
            choices = tuple(
                max(range(len(row)), key=[v.value() if v is not None else 0.0 for v in row].__getitem__)
                for row in self.x
            )
            nbytes = held_bytes(problem, self.groups, choices)
            limit_bytes = problem.budget
            if self.peak is not None:
                limit_bytes = max(nbytes[point] for point in self.priced)
            over = [point for point, n in enumerate(nbytes) if n > limit_bytes]
            unpriced = [point for point in over if point not in self.priced]
            new = peaks(nbytes, unpriced)[: tuning.POINTS_AT_ONCE] or unpriced[: tuning.POINTS_AT_ONCE]
            if new:
                for point in new:
                    self._add_row(point)
            elif not over:
                break
            elif not free:
                raise NothingFitsError(refused)
            else:
                # Solvers tolerate an excess of a millionth, which may be whole bytes: a row excludes this plan.
                chosen = [row[k] for row, k in zip(self.x, choices, strict=True) if len(row) > 1]
                self.model += pulp.lpSum(chosen) <= len(chosen) - 1
        stopped = free and self.model.sol_status != pulp.LpSolutionOptimal
        if stopped:
            self.limits.expired()  # sets time_reached, if that is the reason
        priced = tuple(sorted(self.priced))
        # Both the bound and the rows are right to an absolute tolerance.
        tolerance = 2 * tuning.ROW_TOLERANCE
        if self.peak is not None:
            left_gap = _gap_left(self.model) if stopped else options.gap
            left_gap += tolerance * self.scale / max(1, *nbytes)
            return Solution(choices, float(max(nbytes)), left_gap if free else 0.0, points=priced)
        seconds = evaluate(problem, choices)
        solved = self.constant + (pulp.value(self.model.objective) or 0.0) * self.unit if free else seconds
        # Where the solver stops early, conversions that the plan does not need may still be paid.
        if seconds - solved > 1e-4 * max(seconds, self.unit):
            raise SolverError(f"The solver {options.solver} reports {solved} s for a plan that costs {seconds} s.")
        if not free or not seconds:
            return Solution(choices, seconds, 0.0, points=priced)
        # Where no bound is reported, it follows from the gap. A solver may stop at an absolute gap, too.
        known = _bound_known(self.model) * self.unit
        if not known and not stopped:
            known = (solved - self.constant) * (1 - options.gap)
        bound = max(0.0, self.constant + known - tolerance * self.unit)
        return Solution(choices, seconds, max(0.0, 1 - bound / seconds), points=priced)

    def _run(self, options: SolveOptions, nodes: int, proof: bool) -> int:
        try:
            return int(self.model.solve(_solver(options, nodes, proof)))
        except pulp.PulpSolverError as error:
            raise SolverError(f"The solver {options.solver} failed: {error}") from error


def _simple_peak(problem: Problem, groups: dict[int, list[Edge]]) -> int:
    """Compute the peak of the plan in which every entity takes the choice of the fewest bytes."""
    total = [list(nbytes) for nbytes in problem.memory]
    for interval in problem.activations.intervals:
        own = total[interval.entity]
        for k, nbytes in enumerate(interval.nbytes):
            own[k] += nbytes
    return max(held_bytes(problem, groups, [own.index(min(own)) for own in total]))


def _bound_known(model: pulp.LpProblem) -> float:
    """Return the lower bound of the objective when the solver stopped; 0 where it reports none."""
    info = getattr(model.solverModel, "getInfo", None)
    bound = float(info().mip_dual_bound) if info is not None else 0.0
    return bound if math.isfinite(bound) else 0.0


def _gap_left(model: pulp.LpProblem) -> float:
    """Return the relative gap when the solver stopped; infinite where it reports none."""
    info = getattr(model.solverModel, "getInfo", None)
    return float(info().mip_gap) if info is not None else float("inf")
