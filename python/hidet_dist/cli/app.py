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
    add_completion=False,
    no_args_is_help=True,
    help="Automatic parallelization for the hidet tensor compiler.",
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
) -> None:
    """Draw a plan as one HTML page, or print its data as JSON."""
    from hidet_dist.cli.report import draw

    with errors():
        draw(path, html, profile or [])


def main() -> None:
    """Run the command line."""
    app(prog_name="hidet-dist")
