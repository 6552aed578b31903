"""The integer linear program of the search. It knows nothing of graphs: lists of numbers in, choices out.

Every *entity* (an operator, a weight, a graph input or output) takes exactly one of its choices. An *edge* carries a
tensor from its producer to a consumer; where the produced and the consumed spec differ, the conversion costs something,
once for each (tensor, produced spec, consumed spec), however many consumers ask for it.

With x[e,k] in {0,1} the choices, the product x[p,k] x[c,l] of an edge is linearised in flow form: f[s,d] >= 0 with row
sums equal to the producer's spec indicator and column sums equal to the consumer's, which keeps the relaxation tight;
Alpa (Zheng et al., OSDI 2022, section 4.2) linearises it with a one-hot edge vector. z[t,s,d] >= f[s,d]
for all edges of tensor t is what is paid.

    minimise    sum_e,k cost[e][k] x[e,k] + sum_t,s,d convert[t][s][d] z[t,s,d]
    subject to  sum_k x[e,k] = 1,  sum_e,k memory[e][k] x[e,k] <= budget
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from hidet_dist.errors import ConfigError, SolverError


@dataclass(frozen=True)
class Edge:
    """A tensor from ``producer`` to ``consumer`` (entity numbers).

    ``produced[k]`` is the number of the spec that the producer's choice k gives, ``consumed[k]`` the one that the
    consumer's choice k wants; ``convert[s][d]`` the seconds of converting from s to d. Edges of one ``tensor`` share
    the producer and the numbering of specs.
    """

    tensor: int
    producer: int
    consumer: int
    produced: tuple[int, ...]
    consumed: tuple[int, ...]
    convert: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Problem:
    """``cost[e][k]`` in seconds, ``memory[e][k]`` and ``budget`` in bytes, for entity e and its choice k."""

    cost: Sequence[Sequence[float]]
    memory: Sequence[Sequence[int]]
    budget: int
    edges: Sequence[Edge]


@dataclass(frozen=True)
class Solution:
    """The choice of every entity; ``seconds`` is the objective, at most ``gap`` (relative) above the optimum."""

    choices: tuple[int, ...]
    seconds: float
    gap: float


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


def solver(name: str, time_limit_seconds: float | None, gap: float) -> pulp.LpSolver:
    """A PuLP solver: ``highs`` or ``cbc``, one thread so that the same problem gives the same solution."""
    options = {"msg": False, "threads": 1, "gapRel": gap, "timeLimit": time_limit_seconds}
    if name == "highs":
        return pulp.HiGHS(**options)
    if name == "cbc":
        return pulp.PULP_CBC_CMD(**options)
    raise ConfigError(f"Unknown solver {name!r}; choose 'highs' or 'cbc'.")


def solve(
    problem: Problem, solver_name: str = "highs", time_limit_seconds: float | None = None, gap: float = 1e-3
) -> Solution:
    """Solve the problem to a relative gap.

    Raises
    ------
    SolverError
        When the solver fails, or ends without a solution: within the time limit, or because none fits the budget.
    """
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    # Solvers compare with absolute tolerances near 1e-6: costs in seconds and memory in bytes are both brought near 1.
    unit = max((max(costs) for costs in problem.cost if costs), default=0.0) or 1.0
    x = [
        [pulp.LpVariable(f"x_{e}_{k}", cat=pulp.LpBinary) if len(costs) > 1 else None for k in range(len(costs))]
        for e, costs in enumerate(problem.cost)
    ]
    objective = []
    constant = 0.0
    room = problem.budget
    scale = float(max(room, 1))
    used = []
    for e, costs in enumerate(problem.cost):
        if len(costs) == 1:
            constant += costs[0]
            room -= problem.memory[e][0]
            continue
        model += pulp.lpSum(x[e]) == 1
        objective += [(x[e][k], cost / unit) for k, cost in enumerate(costs) if cost]
        used += [(x[e][k], m / scale) for k, m in enumerate(problem.memory[e]) if m]
    if used:
        model += pulp.LpAffineExpression(used) <= room / scale
    elif room < 0:
        raise SolverError(f"No plan fits the memory budget of {problem.budget} bytes.")

    def indicator(entity: int, specs: tuple[int, ...], spec: int) -> pulp.LpAffineExpression:
        chosen = [k for k, own in enumerate(specs) if own == spec]
        if len(specs) == 1:
            return pulp.LpAffineExpression(constant=float(bool(chosen)))
        return pulp.lpSum(x[entity][k] for k in chosen)

    # Edges with the same consumer and the same wish (x * x, say) are one.
    edges = {(edge.tensor, edge.consumer, edge.consumed): edge for edge in problem.edges}
    flows: dict[tuple[int, int, int], list[pulp.LpVariable]] = {}
    price: dict[tuple[int, int, int], float] = {}
    for number, edge in enumerate(edges.values()):
        rows, columns = sorted(set(edge.produced)), sorted(set(edge.consumed))
        f = {(s, d): pulp.LpVariable(f"f_{number}_{s}_{d}", lowBound=0) for s in rows for d in columns}
        for s in rows:
            model += pulp.lpSum(f[s, d] for d in columns) == indicator(edge.producer, edge.produced, s)
        for d in columns:
            model += pulp.lpSum(f[s, d] for s in rows) == indicator(edge.consumer, edge.consumed, d)
        for (s, d), flow in f.items():
            if edge.convert[s][d]:
                flows.setdefault((edge.tensor, s, d), []).append(flow)
                price[edge.tensor, s, d] = edge.convert[s][d]
    for key, own in flows.items():
        paid = own[0]
        if len(own) > 1:
            paid = pulp.LpVariable("z_{}_{}_{}".format(*key), lowBound=0)
            for flow in own:
                model += paid >= flow
        objective.append((paid, price[key] / unit))
    model.setObjective(pulp.LpAffineExpression(objective))
    if not any(v is not None for row in x for v in row):
        choices = tuple(0 for _ in problem.cost)
        return Solution(choices, evaluate(problem, choices), 0.0)
    while True:
        try:
            status = model.solve(solver(solver_name, time_limit_seconds, gap))
        except pulp.PulpSolverError as error:
            raise SolverError(f"The solver {solver_name} failed: {error}") from error
        if status == pulp.LpStatusInfeasible:
            raise SolverError(f"No plan fits the memory budget of {problem.budget} bytes.")
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            limit = "" if time_limit_seconds is None else f" within {time_limit_seconds} s"
            raise SolverError(f"The solver {solver_name} found no plan{limit}: {pulp.LpStatus[status]}.")
        choices = tuple(
            max(range(len(row)), key=[v.value() if v is not None else 0.0 for v in row].__getitem__) for row in x
        )
        if sum(memory[k] for memory, k in zip(problem.memory, choices, strict=True)) <= problem.budget:
            break
        # Solvers allow a row to be exceeded by a millionth, which is bytes here: this plan is ruled out by name.
        heavy = [row[k] for row, own, k in zip(x, problem.memory, choices, strict=True) if len(row) > 1 and any(own)]
        model += pulp.lpSum(heavy) <= len(heavy) - 1
    seconds = evaluate(problem, choices)
    solved = constant + (pulp.value(model.objective) or 0.0) * unit
    if abs(solved - seconds) > 1e-4 * max(seconds, unit):
        raise SolverError(f"The solver {solver_name} reports {solved} s for a plan that costs {seconds} s.")
    return Solution(choices, seconds, gap if model.sol_status == pulp.LpSolutionOptimal else _gap_left(model))


def _gap_left(model: pulp.LpProblem) -> float:
    """The relative gap at which a solver was stopped, as far as it tells."""
    info = getattr(model.solverModel, "getInfo", None)
    return float(info().mip_gap) if info is not None else float("inf")
