"""Leaving out steps of the search within a memory budget, to measure what they are worth.

``--without STEP ...`` takes names of :data:`hidet_dist.search.steps.STEPS`. This module imports nothing of the package:
a benchmark that counts the time of imports may use it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_without(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark take ``--without``."""
    parser.add_argument("--without", nargs="*", default=[], metavar="STEP", help="steps of the search to leave out")


def passed_on(without: Sequence[str]) -> list[str]:
    """The arguments by which a child process leaves out the same steps."""
    return ["--without", *without] if without else []
