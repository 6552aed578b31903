"""Why an operator of a model cannot be lowered."""

from __future__ import annotations

import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


class Refused(Exception):
    """An unsupported operator, or an unsupported use of one; the message is the reason."""


class Invalid(Exception):
    """An operator that the model's framework refuses, whatever the inputs are; the message is the reason."""


def reason_of(error: Exception) -> str:
    """Say why a lowering failed.

    A ValueError of this package is a sentence about the operator. Of any other error, the kind and the place are told,
    too.
    """
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = Path(where.filename)
    if isinstance(error, ValueError) and str(error) and place.is_relative_to(_PACKAGE):
        return str(error)
    return f"{type(error).__name__}: {error} ({place.name}:{where.lineno})"
