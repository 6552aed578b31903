"""Progress bars of long work on a terminal; none in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

LOG_WIDTH = 120
"""The columns of output that is not a terminal, wide enough for the tables."""


def report_console() -> Console:
    """Make a console on stdout with the terminal's width; without a terminal, ``LOG_WIDTH`` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


class ProgressBar:
    """One bar."""

    def __init__(self, progress: RichProgress, number: int):  # rich's TaskID is an int
        self._progress = progress
        self._number = number

    def total(self, steps: int) -> None:
        """Set the number of steps."""
        self._progress.update(self._number, total=steps)  # type: ignore[arg-type]

    def say(self, text: str) -> None:
        """Set the text beside the bar."""
        self._progress.update(self._number, description=text)  # type: ignore[arg-type]

    def advance(self) -> None:
        """Count one step as done."""
        self._progress.advance(self._number)  # type: ignore[arg-type]


class Progress:
    """Bars on stderr if it is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = RichProgress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Progress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    @contextmanager
    def task(self, what: str) -> Iterator[ProgressBar]:
        """Show ``what`` while the block runs."""
        number = self._progress.add_task(what, total=None)
        yield ProgressBar(self._progress, number)
        self._progress.update(number, total=1, completed=1)
