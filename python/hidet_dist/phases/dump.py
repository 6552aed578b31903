"""What each pass made of a graph, written as text where the environment variable ``HIDET_DIST_DUMP`` names a folder.

Each graph gets a folder of its own in it, ``graph0`` and so on, with a file for each value on the way, in order. What
is made several times, as a plan after whose program the budget was exceeded, is numbered: ``5-plan.txt``,
``5-plan-2.txt``. A value is written as soon as it is made, so that a build that fails leaves those before the failure.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hidet_dist.errors import ConfigError
from hidet_dist.files import write_text
from hidet_dist.rules.rule import RuleTable
from hidet_dist.view import GraphView

VARIABLE = "HIDET_DIST_DUMP"
NAMES = (
    "1-traced",
    "2-normal-form",
    "3-rules",
    "4-choices",
    "5-plan",
    "6-program",
    "7-fused",
    "8-launches",
)
"""The names of the files, without what numbers them."""


@dataclass(frozen=True)
class Dump:
    """Where the values of a graph are written; nowhere if ``folder`` is None."""

    folder: Path | None = None

    @classmethod
    def begin(cls) -> Dump:
        """Make the folder of a graph, if the environment asks for it. Raises ConfigError where it cannot be made."""
        given = os.environ.get(VARIABLE)
        if not given:
            return cls()
        for number in itertools.count():
            folder = Path(given) / f"graph{number}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                if not folder.is_dir():
                    raise _refusal(given, f"{folder} is no folder") from None
                continue  # of an earlier graph, or of another process
            except OSError as error:
                raise _refusal(given, str(error)) from error
            return cls(folder)
        raise AssertionError("there is always a next number")

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Write a text, one of :data:`NAMES`. It is made only where it is written. Raises ConfigError."""
        if self.folder is None:
            return
        content = text().rstrip("\n") + "\n"
        path = self.folder / f"{name}.txt"
        for number in itertools.count(2):
            if not path.exists():
                break
            path = self.folder / f"{name}-{number}.txt"
        try:
            write_text(path, content)
        except OSError as error:
            raise _refusal(str(self.folder.parent), str(error)) from error

    def once(self, name: str, text: Callable[[], str]) -> None:
        """Write a text unless it is written already: one that other plans share. Raises ConfigError."""
        if self.folder is not None and not (self.folder / f"{name}.txt").exists():
            self(name, text)


def rules_text(view: GraphView, rules: RuleTable) -> str:
    """Write the rule of each operator, one a line, by the number of the operator."""
    return "\n".join(f"{n} {op.name}: {rules.rule(op).notation()}" for n, op in enumerate(view.operators))


def choices_text(view: GraphView, rules: RuleTable) -> str:
    """Write the choices of each operator, one a line; those of operators that differ only in their data once."""
    lines: list[str] = []
    first: dict[int, int] = {}  # of equal operators, by the identity of their choices
    for number, op in enumerate(view.operators):
        _, choices = rules(op)
        same = first.setdefault(id(choices), number)
        lines.append(f"{number} {op.name}: {len(choices)} choices" + (f", those of {same}" if same != number else ""))
        if same == number:
            lines += [f"  {choice.spec}" for choice in choices]
    return "\n".join(lines)


def _refusal(given: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE} = {given} cannot be written to: {reason}. Name a folder, or unset the variable.")
