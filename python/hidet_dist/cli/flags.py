"""The flags that ``hidet-dist plan`` and ``build`` share, made from the options that have one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from hidet_dist.cli.request import FLAGS, PlanRequest, Row
from hidet_dist.options.option import REQUIRED, default_of

_MODEL = Annotated[
    Path, typer.Argument(help="A transformers folder, its config.json, or a .onnx file.", metavar="MODEL")
]


def of_a_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is a request, the parameters of its model and of all flags instead."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def with_flags(**values: Any) -> None:
        model = values.pop("model")
        given = {name: value for name in FLAGS if (value := values.pop(name)) not in (None, [])}
        command(PlanRequest(model, given), **values)

    model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, annotation=_MODEL)
    flags = [_parameter(name, row) for name, row in FLAGS.items()]
    parameters = [model, *flags, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
    signature = inspect.Signature(parameters, return_annotation=None)
    with_flags.__dict__["__signature__"] = signature
    with_flags.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_flags


def _parameter(name: str, row: Row) -> inspect.Parameter:
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


def _completion(row: Row) -> Callable[[str], list[str]] | None:
    offered = row.flag.completions
    if offered is None:
        return None
    return lambda incomplete: [name for name in offered() if name.startswith(incomplete)]
