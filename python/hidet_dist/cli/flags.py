"""The flags that ``hidet-dist plan`` and ``build`` share, made from the options that have one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hidet_dist.cli.parameters import taking
from hidet_dist.cli.request import FLAGS, FlagRow, PlanRequest
from hidet_dist.options.option import REQUIRED, default_of

_MODEL = Annotated[
    Path, typer.Argument(help="A transformers folder, its config.json, or a .onnx file.", metavar="MODEL")
]


def _parameter(name: str, row: FlagRow) -> inspect.Parameter:
    """Make the parameter of a flag; None where it is not given."""
    flag = row.flag
    kind: Any = list[str] if flag.kind is list else flag.kind
    required = default_of(row.kind, row.name) is REQUIRED
    made = typer.Option(
        row.spelled, help=flag.help, metavar=flag.metavar, autocompletion=_completion(row), show_default=False
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, made],
    )


def _completion(row: FlagRow) -> Callable[[str], list[str]] | None:
    offered = row.flag.completions
    if offered is None:
        return None
    return lambda incomplete: [name for name in offered() if name.startswith(incomplete)]


def _parameters() -> Iterator[inspect.Parameter]:
    """List the parameters of a model and of all flags."""
    yield inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, annotation=_MODEL)
    for name, row in FLAGS.items():
        yield _parameter(name, row)


def _request(values: dict[str, Any]) -> PlanRequest:
    model = values.pop("model")
    return PlanRequest(model, {name: value for name, value in values.items() if value not in (None, [])})


of_a_request = taking(_parameters(), _request)
"""Gives a command, whose first parameter is a request, the parameters of its model and of all flags instead."""
