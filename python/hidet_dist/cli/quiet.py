"""What commands hide of the messages of libraries."""

from __future__ import annotations

import logging
import warnings

from hidet_dist.errors import SearchLimitWarning


def quiet() -> None:
    """Hide messages of libraries, and the warning of the search's time limit, which the summary repeats.

    Warnings of this package are one line each.
    """
    warnings.simplefilter("ignore", SearchLimitWarning)
    warnings.filterwarnings("ignore", module=r"(torch|transformers)\b.*")
    warnings.formatwarning = lambda message, *_, **__: f"hidet-dist: {message}\n"
    logging.getLogger("transformers").setLevel(logging.CRITICAL)  # what it says of an error is in the error, too
