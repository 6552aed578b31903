"""The table of options: what follows from a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hidet_dist.cli.app import app
from hidet_dist.cli.request import FLAGS, PlanRequest
from hidet_dist.config import OptimizationConfig
from hidet_dist.errors import ConfigError
from hidet_dist.options.option import default_of, options_of
from hidet_dist.options.planning import OPTIMIZATION, PlanningOptions, SolverOptions, StageOptions
from hidet_dist.pipeline import PipelineOptions
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SearchOptions

ROOT = Path(__file__).parents[2]
# The row of an option, as text, before which others are put.
BEFORE = "    mode: str = option("
ROW = """    depth: int = option(
        3, "int", "How deep to look.", one_of((1, 2, 3)), flag=Flag("How deep to look: 1 to 3.", int)
    )
"""
# Runs what follows from the table, as a user calls it, with the row in it.
PROGRAM = """
import sys, importlib.util, pathlib
sys.path.insert(0, "docs")
spec = importlib.util.find_spec("hidet_dist.options.planning")
before, row = sys.argv[1:]
source = pathlib.Path(spec.origin).read_text()
assert source.count(before) == 1
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(source.replace(before, row + before), spec.origin, "exec"), module.__dict__)

import hooks
from typer.testing import CliRunner
from hidet_dist.cli.app import app
from hidet_dist.cli.request import PlanRequest
from hidet_dist.config import OptimizationConfig
from hidet_dist.errors import ConfigError

print(OptimizationConfig.parse({"depth": 2}).search_options().depth, OptimizationConfig.parse({}).depth)
try:
    OptimizationConfig.parse({"depth": 4})
except ConfigError as error:
    print(error)
for command in ("plan", "build"):
    print("How deep to look: 1 to 3." in CliRunner().invoke(app, [command, "--help"], terminal_width=200).output)
print(CliRunner().invoke(app, ["plan", "nothing", "--mesh", "2", "--depth", "4"]).stderr.strip())
request = PlanRequest(pathlib.Path("m"), {"mesh": "2", "depth": 2})
print(request.configurations()[1], PlanRequest.of_origin(request.origin()) == request, request.origin()["depth"])
page = hooks.configuration()
print("{ #depth }" in page and "How deep to look." in page)
"""


@pytest.mark.slow
def test_an_option_is_added_by_one_row() -> None:
    """A key with its check, a field of the search, a flag of two commands, an origin and an entry of a page."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BEFORE, ROW],
        capture_output=True,
        text=True,
        timeout=1000,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "2 3",
        "optimization_config['depth'] must be one of 1, 2, 3; got 4.",
        "True",
        "True",
        "hidet-dist: --depth must be one of 1, 2, 3; got 4.",
        "{'depth': 2} True 2",
        "True",
    ], done.stderr


def test_the_configuration_is_of_all_options_and_the_search_takes_those_that_steer_it() -> None:
    rows = {name: one for kind in OPTIMIZATION for name, one in options_of(kind).items()}
    assert options_of(OptimizationConfig) == rows
    config = OptimizationConfig.parse(
        {
            "solver": "cbc",
            "solver_gap": 0.5,
            "solver_threads": 2,
            "mode": "propagate",
            "mem_budget": 7,
            "objective": "batch",
            "micro_batches": 4,
            "outputs": "last",
        }
    )
    search, pipeline = config.search_options(), config.pipeline_options()
    assert isinstance(search, SearchOptions) and isinstance(pipeline, PipelineOptions)
    for kind, options in ((PlanningOptions, search), (StageOptions, pipeline)):
        assert {name: getattr(options, name) for name in options_of(kind)} == {
            name: getattr(config, name) for name in options_of(kind)
        }
    of_solvers = search.solve_options(Limits())
    assert [getattr(of_solvers, name) for name in options_of(SolverOptions)] == ["cbc", 0.5, 2]


def test_defaults_are_values_that_fit() -> None:
    for kind in (*OPTIMIZATION, PipelineOptions):
        for name, one in options_of(kind).items():
            if one.check is not None:
                one.check(name, default_of(kind, name))


@pytest.mark.parametrize("given", [0, 2**16 + 1, 1.5, True, "2"])
def test_the_number_of_micro_batches_is_checked_alike_wherever_it_is_given(given: Any) -> None:
    says = "micro.batches.* must be 1 to 65536, a whole number; got "
    with pytest.raises(ConfigError, match=says):
        OptimizationConfig.parse({"objective": "batch", "micro_batches": given})
    with pytest.raises(ConfigError, match=says):
        PipelineOptions(micro_batches=given)
    with pytest.raises(ConfigError, match=says):
        PlanRequest(Path("m"), {"mesh": "2", "objective": "batch", "micro_batches": given}).check()


def test_flags_are_those_of_both_commands_and_come_back_from_an_origin() -> None:
    for command in ("plan", "build"):
        shown = CliRunner().invoke(app, [command, "--help"], terminal_width=300).output
        assert [row.spelled for row in FLAGS.values() if f" {row.spelled} " not in shown] == []
    written: dict[str, Any] = {
        "mesh": "2x2",
        "machine": "dgx-h100",
        "dims": ["batch=8", "seq=4"],
        "budget": "1GiB",
        "time_limit": 2.5,
        "batch": 3,
    }
    request = PlanRequest(Path("model.onnx"), written)
    origin = request.origin()
    assert origin["dims"] == "batch=8;seq=4"
    assert PlanRequest.of_origin(origin) == request
    assert request.configurations() == (
        {"mesh_shape": [2, 2], "machine": "dgx-h100"},
        {"mem_budget": 2**30, "solver_time_limit_seconds": 2.5},
    )
    for broken in ({}, {**origin, "depth": "2"}, {**origin, "batch": "many"}, {"model": "m"}):
        with pytest.raises(ConfigError, match="lacks the options of its plan"):
            PlanRequest.of_origin(broken)
