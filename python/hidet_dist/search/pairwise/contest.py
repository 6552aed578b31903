"""Files of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl): JSON, gzipped or not.

``{"problem": {"nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"}, "usage_limit"}}``: node i has the
interval ``[begin, end)``, and for each strategy a cost and its bytes. An edge has its two nodes and a row-major matrix
of costs. A solution is a list with a strategy for each node.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hidet_dist.checks import shown
from hidet_dist.errors import ProblemError
from hidet_dist.files import open_regular, parse_json, write_bytes, write_text
from hidet_dist.limits import MOST_PROBLEM_BYTES
from hidet_dist.search.pairwise.problem import PairwiseProblem

_GZIP = b"\x1f\x8b"
_NUMBERS = frozenset((int, float))


def load_problem(path: str | Path) -> PairwiseProblem:
    """Read a problem.

    Raises
    ------
    ProblemError
        When the file cannot be read or is not a problem; the message says what is wrong, and where.
    """
    try:
        data = parse_json(_read(path))
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ProblemError(f"Cannot read the problem {path}: {error}") from error
    try:
        return _problem(data)
    except ProblemError as error:
        raise ProblemError(f"{path} is not a problem in the contest's format: {error}") from error


def save_problem(problem: PairwiseProblem, path: str | Path, name: str = "") -> None:
    """Write a problem, gzipped if the path ends in ``.gz``, atomically. Costs and bytes are rounded to integers.

    ``name`` is its name in the file.
    """
    sizes, begin = problem.sizes, problem.strategy_begin
    matrices = [
        _integers(problem.entries[start : start + int(sizes[u] * sizes[v])])
        for (u, v), start in zip(problem.edge_nodes, problem.matrix_begin[problem.edge_matrix], strict=True)
    ]
    body: dict[str, Any] = {"name": name} if name else {}
    body |= {
        "nodes": {
            "intervals": problem.interval.tolist(),
            "costs": [_integers(problem.cost[a:b]) for a, b in itertools.pairwise(begin)],
            "usages": [_integers(problem.nbytes[a:b]) for a, b in itertools.pairwise(begin)],
        },
        "edges": {"nodes": problem.edge_nodes.tolist(), "costs": matrices},
    }
    if math.isfinite(problem.byte_limit):
        body["usage_limit"] = int(problem.byte_limit)
    text = json.dumps({"problem": body}, separators=(",", ":")).encode()
    # Without a time in the header, the same problem is the same file.
    write_bytes(Path(path), gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def save_solution(assignment: Sequence[int] | np.ndarray, path: str | Path) -> None:
    """Write a solution, atomically."""
    write_text(Path(path), json.dumps([int(strategy) for strategy in assignment]) + "\n")


def _integers(values: np.ndarray) -> list[int]:
    return [round(value) for value in values.tolist()]


def _read(path: str | Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        with gzip.open(file) if packed else file as plain:
            data = plain.read(MOST_PROBLEM_BYTES + 1)
    if len(data) > MOST_PROBLEM_BYTES:
        raise ValueError(f"it has more than the {MOST_PROBLEM_BYTES} bytes that are read")
    return bytes(data)


def _problem(data: Any) -> PairwiseProblem:
    problem = _field(data, "problem", dict, "the file")
    nodes = _field(problem, "nodes", dict, "'problem'")
    edges = _field(problem, "edges", dict, "'problem'")
    intervals, costs, usages = (_field(nodes, name, list, "'nodes'") for name in ("intervals", "costs", "usages"))
    ends, matrices = (_field(edges, name, list, "'edges'") for name in ("nodes", "costs"))
    limit = problem.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise ProblemError(f"'usage_limit' must be a number; got {shown(limit)}")
    if not len(intervals) == len(costs) == len(usages):
        raise ProblemError(f"{len(intervals)} intervals, {len(costs)} lists of costs and {len(usages)} of usages")
    if len(ends) != len(matrices):
        raise ProblemError(f"{len(ends)} edges and {len(matrices)} matrices")
    sizes = [len(_numbers(one, f"costs of node {node}")) for node, one in enumerate(costs)]
    for node, one in enumerate(usages):
        if len(_numbers(one, f"usages of node {node}")) != sizes[node]:
            raise ProblemError(f"node {node} has {sizes[node]} costs and {len(one)} usages")
    _check_pairs("interval", intervals)
    _check_pairs("nodes of edge", ends)
    known: dict[tuple[float, ...], int] = {}
    edge_matrix = [known.setdefault(key, len(known)) for key in _matrices(ends, matrices, sizes)]
    begins = np.cumsum([0, *map(len, known)])[:-1]
    try:
        return PairwiseProblem(
            np.cumsum([0, *sizes]),
            np.array([x for one in costs for x in one], dtype=np.float64),
            np.array([x for one in usages for x in one], dtype=np.float64),
            np.array(intervals, dtype=np.int64),
            np.array(ends, dtype=np.int64),
            np.array(edge_matrix, dtype=np.int64),
            begins,
            np.array([x for key in known for x in key], dtype=np.float64),
            math.inf if limit is None else float(limit),
        )
    except OverflowError as error:
        raise ProblemError(f"a number is too large: {error}") from error


def _check_pairs(what: str, pairs: Sequence[Any]) -> None:
    for number, pair in enumerate(pairs):
        if len(_numbers(pair, f"{what} {number}")) != 2 or not all(isinstance(x, int) for x in pair):
            raise ProblemError(f"{what} {number} must be two integers; got {shown(pair)}")


def _matrices(
    ends: Sequence[tuple[int, int]], matrices: Sequence[Any], sizes: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """Yield the costs of each edge, whose ends are nodes with so many strategies."""
    for edge, ((u, v), matrix) in enumerate(zip(ends, matrices, strict=True)):
        if not (0 <= u < len(sizes) and 0 <= v < len(sizes)):
            raise ProblemError(f"edge {edge} joins {[u, v]}, of {len(sizes)} nodes")
        costs = tuple(_numbers(matrix, f"costs of edge {edge}"))
        if len(costs) != sizes[u] * sizes[v]:
            raise ProblemError(f"edge {edge} has {len(costs)} costs for {sizes[u]} x {sizes[v]} strategies")
        yield costs


def _field(data: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(name), kind):
        raise ProblemError(f"{where} must have a {'list' if kind is list else 'dict'} {name!r}")
    return data[name]


def _numbers(values: Any, what: str) -> list[Any]:
    if not isinstance(values, list):
        raise ProblemError(f"the {what} must be a list of numbers; got {shown(values)}")
    if not _NUMBERS.issuperset(map(type, values)):
        wrong = next(value for value in values if type(value) not in _NUMBERS)
        raise ProblemError(f"the {what} must be numbers; got {shown(wrong)}")
    return values
