"""The commands of ``hidet-dist``.

A command hands its arguments to the module that implements it. That module is imported when the command runs, so that
``hidet-dist --help`` loads neither hidet nor PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hidet_dist.cli.application import application
from hidet_dist.cli.failures import errors
from hidet_dist.cli.flags import of_a_request
from hidet_dist.cli.language_model_commands import COMMANDS
from hidet_dist.cli.request import PlanRequest

app = application()

# `launch` passes the arguments after the program on to it, --help included.
_PASS_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
}


ProgramName = Annotated[
    str | None, typer.Option("--program", help="The name of the program, if the artifacts have several.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command()
@of_a_request
def plan(
    request: PlanRequest,
    out: Annotated[Path | None, typer.Option(help="Where to write the plan, with its report beside it.")] = None,
    html: Annotated[Path | None, typer.Option(help="Where to write the report as an HTML page.")] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Where to write the problem in the format of google/iopddl, for other solvers."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan a language model as `hidet-dist serve` runs it: prompts and decoding.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence, with --serve; at most 4096 by default.", show_default=False),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences that run at once, with --serve; 8 by default.", show_default=False)
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step, with --serve; 256 by default.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model for a described machine, without its weights, and print a summary."""
    with errors():
        sizes = {"context": context, "sequences": sequences, "step_tokens": step_tokens}
        if serve:
            from hidet_dist.cli.serving_plan import plan as plan_serving

            plan_serving(request, sizes, {"--out": out, "--html": html, "--export": export}, as_json)
            return
        from hidet_dist.cli.planning import plan as command

        command(request, out, html, export, sizes, as_json)


@app.command()
@of_a_request
def build(
    request: PlanRequest,
    out: Annotated[Path, typer.Option(help="The folder for the artifacts.")],
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Build with random weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a model, compile it, and write artifacts that ranks load."""
    with errors():
        from hidet_dist.cli.planning import build as command

        command(request, out, random_weights, as_json)


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="An artifact folder.", metavar="DIR")],
    given: Annotated[Path, typer.Option("--input", help="A .npz file with an array for each input, by name.")],
    program: ProgramName = None,
    ranks: Annotated[int | None, typer.Option("-n", help="Ranks to start; by default those of the artifacts.")] = None,
    output: Annotated[Path | None, typer.Option(help="The .npz file for the outputs.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Where to write a trace of one more call, for `report --profile`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run artifacts once, as ranks on this machine."""
    with errors():
        from hidet_dist.cli.running import run as command

        raise typer.Exit(command(folder, program, ranks, given, output, profile, as_json))


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="An artifact folder, or a plan file.", metavar="DIR|PLAN")],
    program: ProgramName = None,
    html: Annotated[Path | None, typer.Option(help="The HTML file to write.", metavar="FILE")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="A trace of a measured run, shown beside the prediction; repeatable.")
    ] = None,
    stage: Annotated[int, typer.Option(help="The number of the stage, if the plan has several.")] = 0,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine, to pin weights and search again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a plan as one HTML page, serve the page, or print a summary (with --json all data)."""
    with errors():
        from hidet_dist.cli.report import draw

        draw(path, program, stage, html, profile or [], live, as_json)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="An artifact folder, or a plan file.", metavar="DIR|PLAN")],
    program: ProgramName = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print only the calls that shard the model by hand.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a plan as text: operator by operator, with each runner-up and the bound."""
    with errors():
        from hidet_dist.cli.explaining import explain as command

        command(path, program, schedule, as_json)


@app.command()
def machines(as_json: AsJson = False) -> None:
    """List the built-in machine descriptions."""
    from hidet_dist.cli.machines import show

    show(as_json)


@app.command()
def calibrate(
    mesh: Annotated[str, typer.Option(help="Devices along each mesh axis, such as 2 or 2x2.")],
    out: Annotated[Path, typer.Option(help="The machine file to write.")],
    repeats: Annotated[int | None, typer.Option(help="Measurements of each figure; 20 by default.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="The time limit of the ranks in seconds; 600 by default.")
    ] = None,
    nnodes: Annotated[int, typer.Option(help="The number of hosts; start the command on each of them.")] = 1,
    node_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0.")] = None,
    rdzv: Annotated[str | None, typer.Option(help="An address and port of host 0, such as 10.0.0.1:29500.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, and write a machine file."""
    with errors():
        from hidet_dist.cli.calibrating import measure

        hosts = {"nnodes": nnodes, "node_rank": node_rank, "rdzv": rdzv}
        measure(mesh, out, as_json, repeats=repeats, timeout_seconds=timeout, **hosts)


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


@app.command(**_PASS_ON)
def launch(context: typer.Context) -> None:
    """Start a program as several ranks on this machine."""
    from hidet_dist.launch import main as command

    raise typer.Exit(command(context.args, "hidet-dist launch"))
