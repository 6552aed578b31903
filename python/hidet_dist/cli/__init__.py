"""The command line: ``hidet-dist``, also ``python -m hidet_dist.cli``."""

from __future__ import annotations

import sys

from hidet_dist.frugal import collect_rarely


def main() -> None:
    """Run the command line.

    Where it names a command that serves language models, the others are not imported, which would take longer than to
    find the model.
    """
    collect_rarely()
    from hidet_dist.cli.language_model_commands import COMMANDS

    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        from hidet_dist.cli.application import application

        app = application()
        app.command(name)(COMMANDS[name])
    else:
        from hidet_dist.cli.app import app
    app(prog_name="hidet-dist")
