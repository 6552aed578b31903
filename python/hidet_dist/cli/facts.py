"""Summaries on a terminal: a heading, and facts below it, each with a name."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Facts:
    """Named facts, which are added one by one, and printed below a heading."""

    def __init__(self, heading: str):
        self._heading = heading
        self._table = Table(show_header=False, box=None, pad_edge=False)
        self._table.add_column(style="dim", no_wrap=True)
        self._table.add_column(overflow="fold")

    def add(self, name: str, text: str) -> None:
        """Add a fact; without a name it belongs to the one before."""
        self._table.add_row(Text(name), Text(text))

    def print(self, console: Console) -> None:
        """Print the heading and the facts."""
        console.print(Text(self._heading, style="bold"))
        console.print(self._table)
