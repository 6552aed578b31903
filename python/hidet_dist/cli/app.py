"""The commands of ``hidet-dist``.

A command passes its arguments on to the module that implements it. That module is imported when the command runs, so
that ``hidet-dist --help`` loads neither hidet nor PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hidet_dist.cli.failures import errors

app = typer.Typer(
    name="hidet-dist",
    no_args_is_help=True,
    help="Automatic parallelization for the hidet tensor compiler.",
    epilog="Exit status: 0 when done; 1 when a command failed, with one line that says why; 2 for a wrong command "
    "line; of `run` and `launch` that of the rank that failed first, and 124 after a time limit.",
)

# Options, --help among them, belong to the module that a command passes its arguments on to.
_PASS_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("hidet_dist"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Handle the options that stand before a command."""


Model = Annotated[Path, typer.Argument(help="A transformers folder, or its config.json.", metavar="MODEL")]
Mesh = Annotated[str, typer.Option(help="Devices along each mesh axis, such as 8 or 2x8.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="A machine of `hidet-dist machines`, or a machine file (.json).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; by default the configuration's.")]
Budget = Annotated[str | None, typer.Option(help="Memory that a device may hold, such as 60GiB.")]
Batch = Annotated[int, typer.Option(help="Sequences or images in a call.")]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence.")]
Seconds = Annotated[float | None, typer.Option(help="Seconds that the search may take; 60 by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command()
def plan(
    model: Model,
    mesh: Mesh,
    machine: MachineName = None,
    dtype: Dtype = None,
    budget: Budget = None,
    batch: Batch = 1,
    seq: Seq = 128,
    time_limit: Seconds = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the plan, with its report beside it.")] = None,
    html: Annotated[Path | None, typer.Option(help="Where to write the report's page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model for a machine that need not be there, without its weights, and print a summary."""
    with errors():
        from hidet_dist.cli.planning import Job
        from hidet_dist.cli.planning import plan as command

        command(Job(model, mesh, machine, dtype, budget, batch, seq, time_limit), out, html, as_json)


@app.command()
def build(
    model: Model,
    mesh: Mesh,
    out: Annotated[Path, typer.Option(help="The folder for the artifacts.")],
    machine: MachineName = None,
    dtype: Dtype = None,
    budget: Budget = None,
    batch: Batch = 1,
    seq: Seq = 128,
    time_limit: Seconds = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Make weights up.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a model, compile it for CPUs, and write artifacts that ranks load."""
    with errors():
        from hidet_dist.cli.planning import Job
        from hidet_dist.cli.planning import build as command

        command(Job(model, mesh, machine, dtype, budget, batch, seq, time_limit), out, random_weights, as_json)


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="An artifact folder.", metavar="DIR")],
    given: Annotated[Path, typer.Option("--input", help="A .npz file with an array for each input, by name.")],
    ranks: Annotated[int | None, typer.Option("-n", help="Ranks to start; as many as the artifacts are for.")] = None,
    output: Annotated[Path | None, typer.Option(help="The .npz file for the outputs.")] = None,
) -> None:
    """Run artifacts once, as ranks on this machine."""
    with errors():
        from hidet_dist.cli.running import run as command

        raise typer.Exit(command(folder, ranks, given, output))


@app.command()
def machines(as_json: AsJson = False) -> None:
    """List the built-in machine descriptions."""
    if as_json:
        import dataclasses
        import json

        from hidet_dist.machine.builtin import MACHINES

        print(json.dumps({name: dataclasses.asdict(own) for name, own in MACHINES.items()}, indent=1))
        return
    from hidet_dist.machine.__main__ import show

    show()


@app.command(**_PASS_ON)
def machine(context: typer.Context) -> None:
    """List the built-in machine descriptions."""
    from hidet_dist.machine.__main__ import app as command

    command(context.args, prog_name="hidet-dist machine")


@app.command(**_PASS_ON)
def calibrate(context: typer.Context) -> None:
    """Measure this machine, and write a machine file."""
    from hidet_dist.calibration.__main__ import app as command

    command(context.args, prog_name="hidet-dist calibrate")


@app.command(**_PASS_ON)
def explain(context: typer.Context) -> None:
    """Explain the plan of an artifact folder."""
    from hidet_dist.explain.__main__ import main as command

    raise typer.Exit(command(context.args, "hidet-dist explain"))


@app.command(**_PASS_ON)
def launch(context: typer.Context) -> None:
    """Start a program as several ranks on this machine."""
    from hidet_dist.launch import main as command

    raise typer.Exit(command(context.args, "hidet-dist launch"))


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="An artifact folder, or a plan file.", metavar="DIR|PLAN")],
    html: Annotated[Path | None, typer.Option(help="The HTML file to write.", metavar="FILE")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="A trace of a measured run, shown beside the prediction; repeatable.")
    ] = None,
    stage: Annotated[int, typer.Option(help="The stage, of artifacts that have several.")] = 0,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine, to pin weights and search again.")
    ] = False,
) -> None:
    """Draw a plan as one HTML page, serve it, or print its data as JSON."""
    with errors():
        from hidet_dist.cli.report import draw

        draw(path, stage, html, profile or [], live)


def main() -> None:
    """Run the command line."""
    app(prog_name="hidet-dist")
