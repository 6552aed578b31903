"""``hidet-dist`` without commands: its help, and the options before a command."""

from __future__ import annotations

from typing import Annotated

import typer


def application() -> typer.Typer:
    """Make the application, to which commands are added."""
    app = typer.Typer(
        name="hidet-dist",
        no_args_is_help=True,
        help="Automatic parallelization for the hidet tensor compiler.",
        epilog="Exit status: 0 for success; 1 for a failure, with one line that says why; 2 for a wrong command line. "
        "`run` and `launch` exit with the status of the rank that failed first, and with 124 after a time limit.",
    )
    app.callback()(_options)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("hidet_dist"))
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Handle the options before a command."""
