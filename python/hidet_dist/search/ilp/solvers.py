"""HiGHS and CBC: a linear program goes in as arrays, the values of its columns and a bound come out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import highspy
import numpy as np
import pulp

from hidet_dist.errors import ConfigError, SolverError
from hidet_dist.highs import RIGHT_PRESOLVE, new_model
from hidet_dist.search.ilp.linear import LinearProgram
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SolveOptions


class Status(Enum):
    """How a solver ended."""

    OPTIMAL = auto()  # within the gap
    FEASIBLE = auto()  # at a limit, with a solution
    STOPPED = auto()  # at a limit, without one
    INFEASIBLE = auto()  # there is no solution


@dataclass(frozen=True)
class Outcome:
    """The result of a solver.

    Attributes
    ----------
    status: how it ended.
    values: of each column; empty without a solution.
    bound: a lower bound of the objective; 0 where none is known.
    gap: the relative gap that is left; infinite where it is unknown.
    """

    status: Status
    values: list[float]
    bound: float
    gap: float


def run_solver(program: LinearProgram, options: SolveOptions, nodes: int, proof: bool) -> Outcome:
    """Solve a program to the relative gap of the options, within their limits and ``nodes`` nodes of the search tree.

    With one thread and before the time limit, the same program has the same outcome. ``proof`` says that most likely
    nothing is left to find: HiGHS then spares its heuristics, which take two thirds of its time.

    Raises
    ------
    ConfigError
        When the solver has an unknown name.
    SolverError
        When the solver fails.
    """
    if options.solver == "highs":
        return _run_highs(program, options, nodes, proof)
    if options.solver == "cbc":
        return _run_cbc(program, options, nodes)
    raise ConfigError(f"Unknown solver {options.solver!r}; choose 'highs' or 'cbc'.")


_WITHOUT_HEURISTICS: dict[str, bool | float] = {
    "mip_heuristic_effort": 0.0,
    **{f"mip_heuristic_run_{name}": False for name in ("rins", "rens", "root_reduced_cost", "feasibility_jump")},
}

_INTERRUPTS = (
    highspy.cb.HighsCallbackType.kCallbackMipInterrupt,
    highspy.cb.HighsCallbackType.kCallbackSimplexInterrupt,
    highspy.cb.HighsCallbackType.kCallbackIpmInterrupt,
)

_STATUS = {
    highspy.HighsModelStatus.kOptimal: Status.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: Status.INFEASIBLE,
    # No program of a plan is unbounded: costs and columns are 0 or more.
    highspy.HighsModelStatus.kUnboundedOrInfeasible: Status.INFEASIBLE,
    **dict.fromkeys(
        (
            highspy.HighsModelStatus.kSolutionLimit,
            highspy.HighsModelStatus.kTimeLimit,
            highspy.HighsModelStatus.kIterationLimit,
            highspy.HighsModelStatus.kInterrupt,
            highspy.HighsModelStatus.kMemoryLimit,
        ),
        Status.STOPPED,
    ),
}


def _run_highs(program: LinearProgram, options: SolveOptions, nodes: int, proof: bool) -> Outcome:
    limits = options.limits
    settings: dict[str, bool | int | float] = {
        "threads": options.solver_threads,
        "mip_rel_gap": options.solver_gap,
        "mip_max_nodes": nodes,
        "presolve_rule_off": RIGHT_PRESOLVE,
        **(_WITHOUT_HEURISTICS if proof else {}),
    }
    left = limits.seconds_left()
    if left is not None and not limits.has_own_clock:
        settings["time_limit"] = float(left)
    model = new_model(**settings)
    if limits.has_own_clock:  # HiGHS looks at the wall's clock
        model.setCallback(partial(_interrupt, limits), None)
        for kind in _INTERRUPTS:
            model.startCallback(kind)
    if model.passModel(_highs_program(program)) == highspy.HighsStatus.kError:
        raise SolverError("The solver highs does not take the program.")
    model.run()
    ended = model.getModelStatus()
    if ended not in _STATUS:
        raise SolverError(f"The solver highs failed: {model.modelStatusToString(ended)}.")
    status, info = _STATUS[ended], model.getInfo()
    if status is Status.STOPPED and info.primal_solution_status == highspy.kSolutionStatusFeasible:
        status = Status.FEASIBLE
    values = list(model.getSolution().col_value) if status in (Status.OPTIMAL, Status.FEASIBLE) else []
    bound = float(info.mip_dual_bound)
    return Outcome(status, values, bound if math.isfinite(bound) else 0.0, float(info.mip_gap))


def _highs_program(program: LinearProgram) -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.starts)
    model.col_cost_, model.col_lower_, model.col_upper_ = map(np.array, (program.costs, program.lower, program.upper))
    model.row_lower_, model.row_upper_ = np.array(program.row_lower), np.array(program.row_upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array([*program.starts, len(program.indices)], dtype=np.int32)
    model.a_matrix_.index_ = np.array(program.indices, dtype=np.int32)
    model.a_matrix_.value_ = np.array(program.values)
    kinds = [highspy.HighsVarType.kContinuous] * len(program.costs)
    for column in program.integer:
        kinds[column] = highspy.HighsVarType.kInteger
    model.integrality_ = kinds
    return model


def _interrupt(limits: Limits, kind: int, message: str, out: Any, into: Any, data: Any) -> None:
    """Have HiGHS stop once the deadline has passed; the other parameters are those of its callbacks."""
    if into is not None and limits.expired():
        into.user_interrupt = True


def _run_cbc(program: LinearProgram, options: SolveOptions, nodes: int) -> Outcome:
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    integer = set(program.integer)
    columns = [
        model.add_variable(
            f"c{column}",
            lowBound=lower,
            upBound=None if math.isinf(upper) else upper,
            cat=pulp.LpInteger if column in integer else pulp.LpContinuous,
        )
        for column, (lower, upper) in enumerate(zip(program.lower, program.upper, strict=True))
    ]
    model.setObjective(pulp.LpAffineExpression({columns[c]: cost for c, cost in enumerate(program.costs) if cost}))
    ends = [*program.starts[1:], len(program.indices)]
    for begin, end, lower, upper in zip(program.starts, ends, program.row_lower, program.row_upper, strict=True):
        terms = zip(program.indices[begin:end], program.values[begin:end], strict=True)
        row = pulp.LpAffineExpression({columns[column]: value for column, value in terms})
        if lower == upper:
            model += row == upper
            continue
        if math.isfinite(lower):
            model += row >= lower
        if math.isfinite(upper):
            model += row <= upper
    cbc = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        threads=options.solver_threads,
        gapRel=options.solver_gap,
        timeLimit=options.limits.seconds_left(),
        maxNodes=nodes,
    )
    try:
        ended = model.solve(cbc)
    except pulp.PulpSolverError as error:
        raise SolverError(f"The solver cbc failed: {error}") from error
    status = {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
        pulp.LpSolutionInfeasible: Status.INFEASIBLE,
    }.get(model.sol_status, Status.STOPPED)
    if ended == pulp.LpStatusInfeasible:
        status = Status.INFEASIBLE
    values = [float(one.value() or 0.0) for one in columns] if status in (Status.OPTIMAL, Status.FEASIBLE) else []
    return Outcome(status, values, 0.0, math.inf)
