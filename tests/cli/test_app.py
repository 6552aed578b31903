"""The commands of ``hidet-dist``: what they load, print and return."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import hidet_dist

HEAVY = {"hidet", "torch", "numpy", "pulp", "highspy"}
COMMANDS = {"machine", "machines", "calibrate", "explain", "launch", "plan", "build", "run", "report"}
PASSED_ON = ("machine", "calibrate", "explain", "launch")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hidet_dist.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)


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
    program = f"""
import sys
from hidet_dist.cli import main
try:
    main()
finally:
    print("loaded", {HEAVY!r} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=1000, check=True
    )
    assert all(f" {command} " in done.stdout for command in COMMANDS)
    assert done.stdout.endswith("loaded set()\n")


@pytest.mark.parametrize("command", PASSED_ON)
def test_help_of_a_command_names_it(command):
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: hidet-dist {command} " in " ".join(done.stdout.split()).replace("Usage:", "usage:")


def test_an_unknown_command_is_refused():
    done = run("machinery")
    assert done.returncode == 2
    assert "machinery" in done.stderr


def test_machine_lists_the_built_in_machines():
    from hidet_dist.machine.builtin import MACHINES

    done = run("machine", "list")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in MACHINES)


def test_explain_refuses_what_is_no_plan(tmp_path):
    done = run("explain", str(tmp_path / "none"))
    assert done.returncode == 1
    assert str(tmp_path / "none") in done.stderr


def test_launch_passes_arguments_on_and_returns_the_status_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "rank.py"
    say = "os.write(1, ' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:], '\\n']).encode())"  # a line at once
    script.write_text(f"import os, sys\n{say}\nsys.exit(int(sys.argv[2]))\n")
    done = run("launch", "-n", "2", str(script), "--help", "7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["2 --help 7 "] * 2
