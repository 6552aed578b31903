"""A check, such as one of a time limit, that native functions call now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from hidet_dist.native.search.signatures import EliminationStop


class StopCheck:
    """A check whose exception stops the native function that calls it, and waits for it to return.

    Attributes
    ----------
    callback: the check, for native functions.
    """

    def __init__(self, check: Callable[[], None]):
        self._check = check
        self._raised: BaseException | None = None
        self.callback = EliminationStop(self._stopped)

    def _stopped(self) -> int:
        try:
            self._check()
        except BaseException as error:
            self._raised = error
            return 1
        return 0

    def raise_again(self) -> NoReturn:
        """Raise the exception that stopped a native function."""
        assert self._raised is not None
        raise self._raised
