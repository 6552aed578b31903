"""Files of the contest: read, written, refused; and the command that solves them."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hidet_dist.errors import ProblemError
from hidet_dist.search.__main__ import app
from hidet_dist.search.pairwise import load_problem, save_problem, solve


def example() -> dict[str, Any]:
    """The best assignment within the limit is [1, 0, 1], at 15 + 40 + 50 + 5."""
    return {
        "problem": {
            "name": "example",
            "nodes": {
                "intervals": [[0, 2], [1, 3], [4, 4]],
                "costs": [[25, 15], [40, 90], [70, 50]],
                "usages": [[10, 25], [20, 5], [10**12, 10**12]],
            },
            "edges": {
                "nodes": [[0, 1], [2, 1], [1, 0]],
                "costs": [[0, 40, 5, 30], [10**18, 40, 0, 5], [0, 0, 0, 0]],
            },
            "usage_limit": 45,
        }
    }


def write(data: Any, path: Path) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_an_instance_is_read_solved_and_written_back(tmp_path):
    problem = load_problem(write(example(), tmp_path / "example.json"))
    assert (problem.nodes, problem.edges, problem.byte_limit) == (3, 3, 45.0)
    found = solve(problem, rounds=5)
    assert found.assignment.tolist() == [1, 0, 1]
    assert (found.cost, problem.peak_of(found.assignment)) == (110.0, 45.0)
    packed = tmp_path / "again.json.gz"
    save_problem(problem, packed)
    again = load_problem(packed)
    assert again.cost_of([1, 0, 1]) == 110.0
    assert json.loads(gzip.decompress(packed.read_bytes()))["problem"]["nodes"] == example()["problem"]["nodes"]
    before = packed.read_bytes()
    save_problem(again, packed)
    assert packed.read_bytes() == before


def test_without_a_limit_any_memory_will_do(tmp_path):
    data = example()
    del data["problem"]["usage_limit"]
    problem = load_problem(write(data, tmp_path / "free.json"))
    assert problem.byte_limit == math.inf
    assert solve(problem, rounds=2).cost == 110.0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("problem",), 3, "the file must have a dict 'problem'"),
        (("problem", "edges"), [], "must have a dict 'edges'"),
        (("problem", "nodes", "costs"), [[1], [2]], "3 intervals, 2 lists of costs"),
        (("problem", "nodes", "costs", 1), [1, 2, 3], "node 1 has 3 costs and 2 usages"),
        (("problem", "nodes", "costs", 1), "12", "costs of node 1 must be a list"),
        (("problem", "nodes", "usages", 2, 0), None, "usages of node 2 must be numbers; got None"),
        (("problem", "nodes", "intervals", 0), [1], "interval 0 must be two integers"),
        (("problem", "nodes", "intervals", 0, 1), 10**30, "too large"),
        (("problem", "edges", "nodes", 1), [0, 9], r"edge 1 joins \[0, 9\], of 3 nodes"),
        (("problem", "edges", "costs", 2), [1, 2, 3], "edge 2 has 3 costs for 2 x 2 strategies"),
        (("problem", "edges", "costs"), [], "3 edges and 0 matrices"),
        (("problem", "usage_limit"), "45", "'usage_limit' must be a number"),
        (("problem", "usage_limit"), True, "'usage_limit' must be a number"),
    ],
)
def test_a_malformed_instance_is_refused_by_name(path, value, message, tmp_path):
    data = example()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ProblemError, match=message):
        load_problem(write(data, tmp_path / "bad.json"))


def test_paths_that_are_not_files_are_refused(tmp_path):
    (tmp_path / "text.json").write_text("[" * 200_000)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(example()).encode())[:-20])
    os.mkfifo(tmp_path / "pipe")
    for name in ("gone.json", "text.json", "cut.json.gz", "pipe", "."):
        with pytest.raises(ProblemError, match="Cannot read the problem"):
            load_problem(tmp_path / name)


def test_the_command_prints_incumbents_and_writes_the_solution(tmp_path):
    file, out = write(example(), tmp_path / "example.json"), tmp_path / "solution.json"
    done = CliRunner().invoke(app, ["solve", str(file), "--seconds", "0.5", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == [1, 0, 1]
    assert "Cost 110" in done.output
    assert "lower bound" in done.output
    out.unlink()
    bad = CliRunner().invoke(app, ["solve", str(tmp_path / "gone"), "--seconds", "1", "--out", str(out)])
    assert bad.exit_code == 1
    assert "Cannot read the problem" in bad.output
    assert not out.exists()
