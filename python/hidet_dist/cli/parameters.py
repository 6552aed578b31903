"""Parameters that several commands share. A command passes each group of them on as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def taking(
    parameters: Iterable[inspect.Parameter], made: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these parameters instead of its first one, which ``made`` makes of their values by name."""
    shared = list(parameters)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @wraps(command)
        def with_parameters(**values: Any) -> None:
            first = made({one.name: values.pop(one.name) for one in shared})
            command(first, **values)

        together = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
        with_parameters.__dict__["__signature__"] = inspect.Signature(together, return_annotation=None)
        with_parameters.__annotations__ = {one.name: one.annotation for one in together}
        return with_parameters

    return decorate
