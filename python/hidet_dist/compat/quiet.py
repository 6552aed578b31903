"""hidet 0.6.1 reports its builds on stderr, with progress bars and a line per kernel, even without a terminal.

While :func:`quiet_builds` is active, its bars are silent and advance a callback instead.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hidet.ir.library import tune

_tqdm: Any = importlib.import_module("tqdm")
# Not by attribute: hidet.drivers re-exports functions of the same names as these modules.
_MODULES: tuple[Any, ...] = (
    importlib.import_module("hidet.drivers.build_task"),
    importlib.import_module("hidet.drivers.build_module"),
)


@contextmanager
def quiet_builds(advance: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Silence hidet's build reports; ``advance`` is called for each finished kernel of a batch."""

    def silent(iterable: Iterable[Any], **_: Any) -> Iterator[Any]:
        for item in iterable:
            yield item
            advance()

    # A level would have no effect: these loggers are in no manager, and so remember that INFO was enabled before.
    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    bars = [module.tqdm for module in _MODULES]
    tune_bar, everyones_bar = tune.tqdm, _tqdm.tqdm
    try:
        for module in _MODULES:
            module.logger.addFilter(is_warning)
            module.tqdm = silent
        tune.tqdm = lambda iterable, **_: iterable
        _tqdm.tqdm = tune.tqdm  # some of hidet's functions import it when they are called
        yield
    finally:
        for module, bar in zip(_MODULES, bars, strict=True):
            module.logger.removeFilter(is_warning)
            module.tqdm = bar
        tune.tqdm, _tqdm.tqdm = tune_bar, everyones_bar
