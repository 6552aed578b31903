"""The integer linear program of a problem.

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

from hidet_dist.errors import SolverError
from hidet_dist.search import tuning
from hidet_dist.search.ilp.linear import LinearProgram
from hidet_dist.search.ilp.solvers import Outcome, Status, run_solver
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
    return _IntegerProgram(problem, options.limits, peak=False).solve(options, nodes, points, most_seconds)


def solve_peak(problem: Problem, options: SolveOptions) -> tuple[tuple[int, ...], int]:
    """Find the choices of least peak memory, and a lower bound of every plan's peak, in bytes.

    The problem's budget is ignored. Raises as :func:`solve` does.
    """
    result = _IntegerProgram(problem, options.limits, peak=True).solve(replace(options, solver_gap=0.0), tuning.NODES)
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


class _IntegerProgram:
    """The integer program, built once; rows for the memory of program points are added as plans exceed them.

    With ``peak`` the objective is the bytes of the worst point, without a budget; else the problem's cost within it.
    """

    def __init__(self, problem: Problem, limits: Limits, peak: bool):
        needed = program_bytes(problem)
        if needed > limits.nbytes:
            raise TooLargeError(f"The integer program would take about {needed} bytes, and may take {limits.nbytes}.")
        self.problem = problem
        self.limits = limits
        self.model = LinearProgram()
        self.groups: dict[int, list[Edge]] = readers(problem)
        # Solvers compare with absolute tolerances near 1e-6: seconds and bytes are both scaled to near 1.
        self.unit = max((max(costs) for costs in problem.cost if costs), default=0.0) or 1.0
        most = sum(map(max, problem.memory)) + sum(max(live.nbytes) for live in problem.activations.intervals)
        self.scale = float(max(1, _simple_peak(problem, self.groups) if peak else min(most, problem.budget)))
        # The columns of an entity's choices; none where there is only one.
        self.x = [[self.model.add_binary() for _ in costs] if len(costs) > 1 else [] for costs in problem.cost]
        self.objective: list[tuple[int, float]] = []
        self.constant = 0.0
        self.priced: set[int] = set()
        self.peak = self.model.add_column() if peak else None
        self.flows: dict[int, list[dict[tuple[int, int], int]]] = {}
        self._choices()
        self._tensors()
        for column, cost in [(self.peak, 1.0)] if self.peak is not None else self.objective:
            self.model.costs[column] = cost

    def _choices(self) -> None:
        for e, costs in enumerate(self.problem.cost):
            if len(costs) == 1:
                self.constant += costs[0]
                continue
            self.model.add_row(((column, 1.0) for column in self.x[e]), 1.0, 1.0)
            self.objective += [(self.x[e][k], cost / self.unit) for k, cost in enumerate(costs) if cost]

    def _add_flow_row(self, flows: Sequence[int], entity: int, specs: Sequence[int], spec: int) -> None:
        """Let flows sum to 1 if an entity chooses a spec, and to 0 otherwise."""
        chosen = [k for k, own in enumerate(specs) if own == spec]
        total = float(bool(chosen)) if len(specs) == 1 else 0.0
        indicator = [] if len(specs) == 1 else [(self.x[entity][k], -1.0) for k in chosen]
        self.model.add_row([*((flow, 1.0) for flow in flows), *indicator], total, total)

    def _tensors(self) -> None:
        for tensor, group in self.groups.items():
            self.limits.check()
            paid: dict[tuple[int, int], list[int]] = {}
            flows = []
            for edge in group:
                rows, columns = sorted(set(edge.produced)), sorted(set(edge.consumed))
                f = {(s, d): self.model.add_column() for s in rows for d in columns}
                for s in rows:
                    self._add_flow_row([f[s, d] for d in columns], edge.producer, edge.produced, s)
                for d in columns:
                    self._add_flow_row([f[s, d] for s in rows], edge.consumer, edge.consumed, d)
                for (s, d), flow in f.items():
                    if edge.convert[s][d]:
                        paid.setdefault((s, d), []).append(flow)
                flows.append(f)
            self.flows[tensor] = flows
            for (s, d), flows_paid in paid.items():
                once = flows_paid[0]
                if len(flows_paid) > 1:
                    once = self.model.add_column()
                    for flow in flows_paid:
                        self.model.add_row([(once, 1.0), (flow, -1.0)], 0.0)
                self.objective.append((once, group[0].convert[s][d] / self.unit))

    def _add_point(self, point: int) -> None:
        """Constrain the bytes of a program point to the budget, or to the peak where that is minimised."""
        self.limits.check()
        self.priced.add(point)
        problem = self.problem
        used: dict[int, float] = {}
        fixed = 0

        def add(column: int, nbytes: float) -> None:
            used[column] = used.get(column, 0.0) + nbytes / self.scale

        def choose(entity: int, nbytes: Sequence[int]) -> None:
            nonlocal fixed
            if len(nbytes) == 1:
                fixed += nbytes[0]
                return
            for k, n in enumerate(nbytes):
                if n:
                    add(self.x[entity][k], n)

        for entity, choice_bytes in enumerate(problem.memory):
            choose(entity, choice_bytes)
        for interval in problem.activations.intervals:
            if interval.begin <= point <= interval.end:
                choose(interval.entity, interval.nbytes)
        for tensor, memory in problem.activations.tensors.items():
            if tensor in self.groups:
                for column, n in self._converted(tensor, memory, point):
                    add(column, n)
        if self.peak is not None:
            self.model.add_row([*used.items(), (self.peak, -1.0)], upper=-fixed / self.scale)
        else:
            self.model.add_row(used.items(), upper=(problem.budget - fixed) / self.scale)

    def _converted(self, tensor: int, memory: ConvertedTensor, point: int) -> list[tuple[int, float]]:
        """Add columns for the bytes that a tensor's conversions hold at a point; return each with its bytes."""
        group, flows = self.groups[tensor], self.flows[tensor]
        if not min(e.begin for e in group) <= point <= max(e.end for e in group):
            return []
        self.limits.check()
        terms = []
        for d in sorted({d for f in flows for _, d in f}):
            requiring = [i for i, f in enumerate(flows) if any(to == d for _, to in f)]
            if memory.nbytes[d]:
                terms.append((self._holds(tensor, memory, d, requiring, point), float(memory.nbytes[d])))
            if any(group[i].begin == point for i in requiring):
                working = self._works(tensor, memory, d, requiring, point)
                if working is not None:
                    terms.append((working, self.scale))
        return terms

    def _holds(self, tensor: int, memory: ConvertedTensor, d: int, requiring: Sequence[int], point: int) -> int:
        """Add a column that is 1 where a tensor is held in spec ``d`` at a point, for the readers ``requiring`` it."""
        group, flows = self.groups[tensor], self.flows[tensor]
        y = self.model.add_column()
        # What sums to 1 if a reader requires the tensor converted to d, else to 0.
        converts = {
            i: [(flow, -1.0) for (s, to), flow in flows[i].items() if to == d and memory.layout[s] != memory.layout[d]]
            for i in requiring
        }
        before = [i for i in requiring if group[i].begin <= point]
        after = [i for i in requiring if group[i].end >= point]
        for i in sorted(set(before) & set(after)):
            self.model.add_row([(y, 1.0), *converts[i]], 0.0)
        for i in before:
            for j in after:
                if group[i].end < point < group[j].begin:
                    self.model.add_row([(y, 1.0), *converts[i], *converts[j]], -1.0)
        return y

    def _works(self, tensor: int, memory: ConvertedTensor, d: int, requiring: Sequence[int], point: int) -> int | None:
        """Add a column for the buffers of a conversion to ``d`` at a point, over ``scale``; None if it has none.

        The first of the readers ``requiring`` it converts.
        """
        group, flows = self.groups[tensor], self.flows[tensor]
        most = {
            s: memory.working(s, d) for f in flows for s, to in f if to == d and memory.layout[s] != memory.layout[d]
        }
        if not any(most.values()):
            return None
        working = self.model.add_column()
        earlier = [i for i in requiring if group[i].begin < point]
        for i in requiring:
            if group[i].begin != point:
                continue
            row = [(working, 1.0)]
            for s, nbytes in most.items():
                row.append((flows[i][s, d], -nbytes / self.scale))
                row += [(flows[j][s, d], nbytes / self.scale) for j in earlier]
            self.model.add_row(row, 0.0)
        return working

    def solve(
        self, options: SolveOptions, nodes: int, points: Sequence[int] = (), most_seconds: float = math.inf
    ) -> Solution:
        """Solve, and add rows, until no program point exceeds the budget."""
        problem = self.problem
        for point in {0: None, **dict.fromkeys(points[: tuning.POINTS_AT_ONCE])}:
            self._add_point(point)
        proof = math.isfinite(most_seconds) and bool(self.objective)
        if proof:
            self.model.add_row(self.objective, upper=(most_seconds - self.constant) / self.unit)
        refused = f"The solver {options.solver} proved that no plan fits the memory budget of {problem.budget} bytes."
        free = any(self.x)
        outcome = Outcome(Status.OPTIMAL, [], 0.0, 0.0)
        while True:
            if self.limits.expired():
                raise StoppedError(f"The solver {options.solver} found no plan within {self.limits.given_seconds} s.")
            if free:
                outcome = self._run(options, nodes, proof, refused)
            rows = [[outcome.values[column] for column in row] or [1.0] for row in self.x]
            choices = tuple(row.index(max(row)) for row in rows)
            nbytes = held_bytes(problem, self.groups, choices)
            over = self._points_over(nbytes)
            unpriced = [point for point in over if point not in self.priced]
            new = peaks(nbytes, unpriced)[: tuning.POINTS_AT_ONCE] or unpriced[: tuning.POINTS_AT_ONCE]
            if new:
                for point in new:
                    self._add_point(point)
            elif not over:
                break
            elif not free:
                raise NothingFitsError(refused)
            else:
                # Solvers tolerate an excess of a millionth, which may be whole bytes: a row excludes this plan.
                chosen = [row[k] for row, k in zip(self.x, choices, strict=True) if row]
                self.model.add_row(((column, 1.0) for column in chosen), upper=len(chosen) - 1.0)
        if outcome.status is not Status.OPTIMAL:
            self.limits.expired()  # sets time_reached, if that is the reason
        return self._solution(options, outcome, choices, nbytes)

    def _run(self, options: SolveOptions, nodes: int, proof: bool, refused: str) -> Outcome:
        """Run the solver. Raises NothingFitsError, which says ``refused``, and StoppedError where it found no plan."""
        outcome = run_solver(self.model, options, nodes, proof)
        if outcome.status is Status.INFEASIBLE and self.peak is None:
            raise NothingFitsError(refused)
        if not outcome.values:
            limit = f" within {self.limits.given_seconds} s" if self.limits.expired() else ""
            raise StoppedError(
                f"The solver {options.solver} found no plan{limit}: {outcome.status.name.lower()}.",
                self.constant + outcome.bound * self.unit,
            )
        return outcome

    def _points_over(self, nbytes: Sequence[int]) -> list[int]:
        """List the program points at which a plan holds more than it may: the budget, or the peak of priced points."""
        limit_bytes = self.problem.budget
        if self.peak is not None:
            limit_bytes = max(nbytes[point] for point in self.priced)
        return [point for point, n in enumerate(nbytes) if n > limit_bytes]

    def _solution(
        self, options: SolveOptions, outcome: Outcome, choices: tuple[int, ...], nbytes: Sequence[int]
    ) -> Solution:
        """Make the solution of a plan that fits, with the gap that the solver's bound leaves."""
        free, stopped = any(self.x), outcome.status is not Status.OPTIMAL
        priced = tuple(sorted(self.priced))
        # Both the bound and the rows are right to an absolute tolerance.
        tolerance = 2 * tuning.ROW_TOLERANCE
        if self.peak is not None:
            left_gap = outcome.gap if stopped else options.solver_gap
            left_gap += tolerance * self.scale / max(1, *nbytes)
            return Solution(choices, float(max(nbytes)), left_gap if free else 0.0, points=priced)
        seconds = evaluate(self.problem, choices)
        if not free or not seconds:
            return Solution(choices, seconds, 0.0, points=priced)
        solved = self.constant + sum(cost * outcome.values[column] for column, cost in self.objective) * self.unit
        # Where the solver stops early, conversions that the plan does not need may still be paid.
        if seconds - solved > 1e-4 * max(seconds, self.unit):
            raise SolverError(f"The solver {options.solver} reports {solved} s for a plan that costs {seconds} s.")
        # Where no bound is reported, it follows from the gap. A solver may stop at an absolute gap, too.
        known = outcome.bound * self.unit
        if not known and not stopped:
            known = (solved - self.constant) * (1 - options.solver_gap)
        bound = max(0.0, self.constant + known - tolerance * self.unit)
        return Solution(choices, seconds, max(0.0, 1 - bound / seconds), points=priced)


def _simple_peak(problem: Problem, groups: dict[int, list[Edge]]) -> int:
    """Compute the peak of the plan in which every entity takes the choice of the fewest bytes."""
    total = [list(nbytes) for nbytes in problem.memory]
    for interval in problem.activations.intervals:
        own = total[interval.entity]
        for k, nbytes in enumerate(interval.nbytes):
            own[k] += nbytes
    return max(held_bytes(problem, groups, [own.index(min(own)) for own in total]))
