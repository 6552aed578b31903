"""Reports of errors by commands: one line on stderr, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

FAILED = 1
"""The exit status of a command that failed."""


@contextmanager
def errors() -> Iterator[None]:
    """Print an error of the package, or of the system, as one line, and exit with :data:`FAILED`."""
    from hidet_dist.errors import HidetDistError

    try:
        yield
    except (HidetDistError, OSError) as error:
        print(f"hidet-dist: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
