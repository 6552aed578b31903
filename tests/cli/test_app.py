"""The commands of ``hidet-dist``: what they load, print and return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hidet_dist
from hidet_dist.cli.app import app
from hidet_dist.machine.builtin import MACHINES

HEAVY = {"hidet", "torch", "numpy", "pulp", "highspy", "transformers", "pydantic"}
LANGUAGE_MODELS = {"serve", "generate", "chat"}
COMMANDS = {"machines", "calibrate", "explain", "launch", "plan", "build", "run", "report", *LANGUAGE_MODELS}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hidet_dist.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=1000, check=False, env={**os.environ, **environment}
    )


def heavy_libraries_of(*arguments: str) -> str:
    """The output of a command, and the heavy libraries that it loaded."""
    program = f"""
import sys
from hidet_dist.cli import main
try:
    main()
finally:
    print("loaded", {HEAVY!r} & set(sys.modules))
"""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False).stdout


def test_the_script_of_the_package_is_the_command_line():
    (script,) = entry_points(group="console_scripts", name="hidet-dist")
    assert script.value == "hidet_dist.cli:main"
    done = subprocess.run(
        [Path(sys.executable).with_name("hidet-dist"), "--version"],
        capture_output=True,
        text=True,
        timeout=1000,
        check=True,
    )
    assert done.stdout.strip() == hidet_dist.__version__


def test_help_lists_the_commands_and_loads_no_heavy_library():
    printed = heavy_libraries_of("--help")
    assert all(f" {command} " in printed for command in COMMANDS)
    assert printed.endswith("loaded set()\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--help"),
        ("machines", "--json"),
        ("plan", "nothing", "--mesh", "2"),
        ("launch", "--help"),
        ("generate", "nothing", "a prompt"),
    ],
    ids=" ".join,
)
def test_what_needs_no_model_loads_no_heavy_library(arguments):
    assert heavy_libraries_of(*arguments).endswith("loaded set()\n")


@pytest.mark.parametrize("command", sorted(COMMANDS - {"launch"}))
def test_help_of_a_command_names_it_and_its_options(command):
    done = CliRunner().invoke(app, [command, "--help"], prog_name="hidet-dist", terminal_width=200)
    assert done.exit_code == 0
    assert f"Usage: hidet-dist {command} " in done.output
    assert ("--cache" if command in LANGUAGE_MODELS else "--json") in done.output


def test_an_unknown_command_is_refused():
    done = CliRunner().invoke(app, ["machinery"])
    assert done.exit_code == 2
    assert "machinery" in done.output


def test_machines_are_listed_for_people_and_for_programs():
    table = CliRunner().invoke(app, ["machines"])
    data = CliRunner().invoke(app, ["machines", "--json"])
    assert table.exit_code == data.exit_code == 0
    assert all(name in table.output for name in MACHINES)
    assert json.loads(data.output).keys() == MACHINES.keys()


def test_explain_refuses_what_is_no_plan(tmp_path):
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert str(tmp_path / "none") in done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [("hidet-dist pl", {"plan"}), ("hidet-dist plan m --machine dgx-h100", {"dgx-h100", "dgx-h100-pod"})],
)
def test_completion_knows_commands_and_machines(words, expected):
    number = str(len(words.split()) - 1)
    done = run(_HIDET_DIST_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
    assert set(done.stdout.split()) == expected


def test_launch_passes_arguments_on_and_returns_the_status_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "rank.py"
    say = "os.write(1, ' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:], '\\n']).encode())"  # a line at once
    script.write_text(f"import os, sys\n{say}\nsys.exit(int(sys.argv[2]))\n")
    done = run("launch", "-n", "2", str(script), "--help", "7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["2 --help 7 "] * 2
